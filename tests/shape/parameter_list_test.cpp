// SPDX-License-Identifier: MIT
// The list of a rank's parameters: places in the flat buffers, ranges, experts that stand together,
// and the parts of a run of elements.

#include <bellows/base/error.hpp>
#include <bellows/shape/parameter_list.hpp>
#include <bellows/shape/presets.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

namespace bellows {
namespace {

ParameterInfo expert(std::int64_t layer, std::int64_t index, const std::string& matrix,
                     std::vector<std::uint64_t> shape = {4, 8}) {
    return {"model.layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(index) +
                "." + matrix + ".weight",
            std::move(shape),
            ParameterKind::Expert,
            layer,
            index,
            0,
            0,
            true};
}

/// One parameter of each kind of range, and the experts 2 and 5 of layer 1.
std::vector<ParameterInfo> small_list() {
    return {
        {"gain", {5}, ParameterKind::Norm, 0, -1, 1, 0, false},
        expert(1, 2, "gate_up_proj"),
        expert(1, 2, "down_proj"),
        {"matrix", {3, 10}, ParameterKind::Attention, 0, -1, 0, 0, true},
        expert(1, 5, "gate_up_proj"),
        expert(1, 5, "down_proj"),
        {"bias", {6}, ParameterKind::RouterBias, 1, -1, 0, 0, false},
        {"second", {4, 4}, ParameterKind::Attention, 1, -1, 0, 0, true},
    };
}

std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.message();
        return error.message();
    }
    ADD_FAILURE() << "accepted";
    return "";
}

TEST(ParameterList, PlacesAndRanges) {
    const ParameterList list(small_list());
    const struct {
        const char* name;
        std::uint64_t first;
    } expected[] = {
        {"matrix", 0}, // 30 elements and 2 of padding
        {"second", 32},
        {"gain", 48}, // 5 elements and 11 of padding
        {"bias", 64},
        {"model.layers.1.mlp.experts.2.down_proj.weight", 80},
        {"model.layers.1.mlp.experts.5.down_proj.weight", 112},
        {"model.layers.1.mlp.experts.2.gate_up_proj.weight", 144},
        {"model.layers.1.mlp.experts.5.gate_up_proj.weight", 176},
    };
    ASSERT_EQ(list.size(), std::size(expected));
    for (std::size_t i = 0; i < list.size(); ++i) {
        EXPECT_EQ(list[i].info.name, expected[i].name);
        EXPECT_EQ(list[i].first, expected[i].first) << expected[i].name;
        EXPECT_EQ(list.index_of(expected[i].name), i);
        EXPECT_TRUE(list.has(expected[i].name));
    }
    EXPECT_EQ(list.num_elements(), 208u);
    const struct {
        std::uint64_t first, count;
        bool expert, weight_decay;
    } ranges[] = {{0, 48, false, true},
                  {48, 16, false, false},
                  {64, 16, false, false},
                  {80, 128, true, true}};
    ASSERT_EQ(list.ranges().size(), std::size(ranges));
    for (std::size_t i = 0; i < std::size(ranges); ++i) {
        EXPECT_EQ(list.ranges()[i].first, ranges[i].first) << i;
        EXPECT_EQ(list.ranges()[i].count, ranges[i].count) << i;
        EXPECT_EQ(list.ranges()[i].expert, ranges[i].expert) << i;
        EXPECT_EQ(list.ranges()[i].weight_decay, ranges[i].weight_decay) << i;
    }
}

TEST(ParameterList, ExpertsOfOneLayerAndMatrixStandTogether) {
    const ParameterList list(small_list());
    const std::size_t expected[] = {1, 1, 1, 1, 2, 1, 2, 1};
    for (std::size_t i = 0; i < list.size(); ++i)
        EXPECT_EQ(list.together(i), expected[i]) << list[i].info.name;
    EXPECT_EQ(list.first_expert(1, "down_proj"), 4u);
    EXPECT_EQ(list.first_expert(1, "gate_up_proj"), 6u);
}

TEST(ParameterList, RefusesWhatItDoesNotHave) {
    const ParameterList list(small_list());
    EXPECT_FALSE(list.has("other"));
    EXPECT_EQ(refusal([&] { list.index_of("other"); }), "this rank has no parameter other");
    EXPECT_EQ(refusal([&] { list.first_expert(0, "down_proj"); }),
              "this rank has no experts of layer 0");
    EXPECT_EQ(refusal([] { ParameterList({expert(0, 0, "down_proj", {3, 8})}); }),
              "model.layers.0.mlp.experts.0.down_proj.weight has 24 elements; an expert's matrix "
              "must have a multiple of 16");
    EXPECT_EQ(ParameterList({}).num_elements(), 0u);
    EXPECT_TRUE(ParameterList({}).ranges().empty());
}

TEST(ParameterList, RunsEndWithTheRangeOrWhenTheyAreFull) {
    const ParameterList list(small_list());
    EXPECT_EQ(list.end_of_run(0, 48), 2u);
    EXPECT_EQ(list.end_of_run(0, 1000), 2u) << "the gain is in another range";
    EXPECT_EQ(list.end_of_run(0, 47), 1u);
    EXPECT_EQ(list.end_of_run(0, 1), 1u) << "a run has at least one parameter";
    EXPECT_EQ(list.end_of_run(4, 95), 6u);
    EXPECT_EQ(list.end_of_run(4, 96), 7u);
    EXPECT_EQ(list.end_of_run(4, 1000), 8u);
}

TEST(ParameterList, PartsOfARunOfElements) {
    const ParameterList list(small_list());
    const struct {
        std::uint64_t first, count;
        std::vector<ParameterPart> parts;
    } cases[] = {
        {0, 0, {}},
        {0, 48, {{0, 1, true, 0, 30}, {1, 1, true, 0, 16}}},
        {0, 30, {{0, 1, true, 0, 30}}},
        {10, 20, {{0, 1, false, 10, 30}}},
        {30, 2, {}}, // padding alone
        {10, 30, {{0, 1, false, 10, 30}, {1, 1, false, 0, 8}}},
        {80, 64, {{4, 2, true, 0, 32}}},
        {80, 128, {{4, 2, true, 0, 32}, {6, 2, true, 0, 32}}},
        {112, 64, {{5, 1, true, 0, 32}, {6, 1, true, 0, 32}}},
        {88, 80, {{4, 1, false, 8, 32}, {5, 1, true, 0, 32}, {6, 1, false, 0, 24}}},
    };
    for (const auto& c : cases)
        EXPECT_TRUE(list.parts(c.first, c.count) == c.parts) << c.first << " + " << c.count;
}

/// Every element but those of the padding is in exactly one part, in order.
TEST(ParameterList, PartsCoverARunOnce) {
    const ParameterList list(parameters(load_model("tiny")));
    const std::uint64_t all = list.num_elements();
    for (const std::uint64_t first : {std::uint64_t{0}, all / 3, all / 2 + 5})
        for (const std::uint64_t count : {std::uint64_t{1}, all / 7, all - first}) {
            std::uint64_t expected = 0, covered = 0, end = first;
            for (const ListedParameter& parameter : list.all()) {
                const std::uint64_t begin = std::max(first, parameter.first);
                const std::uint64_t until =
                    std::min(first + count, parameter.first + parameter.info.size());
                expected += until > begin ? until - begin : 0;
            }
            for (const ParameterPart& part : list.parts(first, count)) {
                const std::uint64_t begin = list[part.index].first + part.begin;
                const std::uint64_t elements = part.count * (part.end - part.begin);
                EXPECT_GE(begin, end);
                end = begin + elements;
                covered += elements;
                EXPECT_LE(end, first + count);
                EXPECT_EQ(part.whole, part.begin == 0 && part.end == list[part.index].info.size());
            }
            EXPECT_EQ(covered, expected) << first << " + " << count;
        }
}

} // namespace
} // namespace bellows
