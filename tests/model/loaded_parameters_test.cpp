// SPDX-License-Identifier: MIT
// Parameters that are set from a source of rows, larger ones part by part, and what layers then
// read of them.
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <atomic>
#include <bit>

namespace bellows {
namespace {

/// Two of more elements than are set at once, whose last part is no multiple of 128 rows, the first
/// with padding behind it, and some small ones.
std::vector<ParameterInfo> parameters_of_test() {
    const auto info = [](const char* name, std::vector<std::uint64_t> shape, ParameterKind kind) {
        ParameterInfo made;
        made.name = name;
        made.shape = std::move(shape);
        made.kind = kind;
        made.layer = 0;
        made.weight_decay = kind != ParameterKind::Norm;
        return made;
    };
    return {info("model.embed_tokens.weight", {8329, 4104}, ParameterKind::Embedding),
            info("model.layers.0.input_layernorm.weight", {24}, ParameterKind::Norm),
            info("model.layers.0.mlp.gate_up_proj.weight", {8328, 4104}, ParameterKind::Ffn),
            info("model.layers.0.mlp.down_proj.weight", {24, 40}, ParameterKind::Ffn)};
}

float value_of(const ParameterInfo& info, std::uint64_t element) {
    const auto seed = static_cast<std::uint32_t>(info.shape[0] * 31 + info.name.size());
    const std::uint32_t mixed = (static_cast<std::uint32_t>(element) + seed) * 2654435761u;
    return static_cast<float>(mixed >> 16) / 32768.0f - 1.0f;
}

void fill(const ParameterInfo& info, std::uint64_t first_row, std::span<float> values) {
    const std::uint64_t first = first_row * (info.size() / info.shape[0]);
    for (std::uint64_t i = 0; i < values.size(); ++i)
        values[i] = value_of(info, first + i);
}

std::vector<std::uint8_t> bytes_of(Device& device, const TensorView& view) {
    return view.buffer ? testing::read_back<std::uint8_t>(device, view.buffer)
                       : std::vector<std::uint8_t>();
}

TEST(LoadedParameters, AreThoseOfWholeUploads) {
    const std::vector<ParameterInfo> infos = parameters_of_test();
    ASSERT_GT(infos[0].size(), kInitialisedAtOnce);
    ASSERT_GT(stored_elements(infos[0]), infos[0].size());
    const auto device = testing::make_device();
    ParameterStore loaded(*device, infos, DType::BF16, false, LinearPrecision::Fp8);
    std::vector<std::uint64_t> masters(loaded.num_elements(), 0);
    std::uint64_t last = 0;
    loaded.load(
        fill,
        [&](std::uint64_t first, std::span<const float> values) {
            for (std::uint64_t i = 0; i < values.size(); ++i)
                ++masters[first + i];
        },
        [&](std::uint64_t elements) {
            EXPECT_GT(elements, last);
            last = elements;
        });
    EXPECT_EQ(last, loaded.num_elements());
    ParameterStore uploaded(*device, infos, DType::BF16, false, LinearPrecision::Fp8);
    for (const Parameter& parameter : loaded.all()) {
        const ParameterInfo& info = parameter.info;
        SCOPED_TRACE(info.name);
        for (std::uint64_t i = 0; i < stored_elements(info); ++i)
            ASSERT_EQ(masters[parameter.first + i], 1u) << "every master once, not " << i;
        std::vector<float> values(info.size());
        fill(info, 0, values);
        uploaded.upload(info.name, values);
        const Parameter& other = uploaded.at(info.name);
        EXPECT_EQ(bytes_of(*device, parameter.weight), bytes_of(*device, other.weight));
        EXPECT_EQ(bytes_of(*device, parameter.compute), bytes_of(*device, other.compute));
        ASSERT_EQ(parameter.quantized.has_value(), is_linear(info));
        if (!parameter.quantized)
            continue;
        EXPECT_EQ(bytes_of(*device, parameter.quantized->codes),
                  bytes_of(*device, other.quantized->codes));
        EXPECT_EQ(bytes_of(*device, parameter.quantized->scales),
                  bytes_of(*device, other.quantized->scales));
    }
}

TEST(LoadedParameters, MayComeRounded) {
    const std::vector<ParameterInfo> infos = parameters_of_test();
    const auto device = testing::make_device();
    ParameterStore plain(*device, infos, DType::BF16, false),
        rounded(*device, infos, DType::BF16, false);
    plain.load(fill);
    std::atomic<std::uint64_t> asked = 0;
    std::uint64_t last = 0;
    rounded.load(
        fill, {}, [&](std::uint64_t elements) { last = elements; },
        [&](const ParameterInfo& info, std::uint64_t first_row, std::span<std::uint16_t> values) {
            std::vector<float> wide(values.size());
            fill(info, first_row, wide);
            for (std::uint64_t i = 0; i < wide.size(); ++i) {
                const auto bits = std::bit_cast<std::uint32_t>(wide[i]);
                values[i] = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
            asked += values.size();
        });
    EXPECT_EQ(last, rounded.num_elements());
    EXPECT_EQ(asked, infos[0].size() + infos[2].size() + infos[3].size());
    for (const Parameter& parameter : plain.all()) {
        const Parameter& other = rounded.at(parameter.info.name);
        EXPECT_EQ(bytes_of(*device, parameter.weight), bytes_of(*device, other.weight));
        EXPECT_EQ(bytes_of(*device, parameter.compute), bytes_of(*device, other.compute));
    }
}

TEST(LoadedParameters, TellWhatTheirSourceThrows) {
    const auto device = testing::make_device();
    ParameterStore store(*device, {parameters_of_test()[3]}, DType::F32, false);
    EXPECT_BELLOWS_ERROR(store.load([](const ParameterInfo& info, std::uint64_t, std::span<float>) {
        throw Error(ErrorCode::Corrupt, info.name + " is damaged");
    }),
                         Corrupt, "down_proj.weight is damaged");
}

} // namespace
} // namespace bellows
