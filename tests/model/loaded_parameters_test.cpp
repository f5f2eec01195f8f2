// SPDX-License-Identifier: MIT
// Parameters that are set from a source of rows, larger ones part by part, and what layers then
// read of them.
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <atomic>
#include <bit>
#include <cmath>

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

/// Codes and scales go to the device as they are, of a matrix that is set part by part and of small
/// ones whose rows are padded there, beside what the store quantises itself.
TEST(LoadedParameters, MayComeAsCodes) {
    std::vector<ParameterInfo> infos = parameters_of_test();
    infos.push_back(infos[3]);
    infos.back().name = "model.layers.0.self_attn.o_proj.weight";
    infos.push_back(infos[3]);
    infos.back().name = "model.layers.0.self_attn.kv_b_proj.weight";
    const auto device = testing::make_device();
    ParameterStore store(*device, infos, DType::BF16, false, LinearPrecision::Fp8, {},
                         [](const ParameterInfo& info) {
                             return info.name.ends_with("o_proj.weight") ? LinearForm::PowerOfTwo
                                    : info.name.ends_with("kv_b_proj.weight")
                                        ? LinearForm::Plain
                                        : LinearForm::StoredCodes;
                         });
    EXPECT_TRUE(store.has_f32_scales());
    const auto code_of = [](const ParameterInfo& info, std::uint64_t element) {
        return static_cast<std::uint8_t>(value_of(info, element) * 63) & 0xbfu;
    };
    const auto scale_of = [](const ParameterInfo& info, std::uint64_t block) {
        return 0.001f + std::abs(value_of(info, block + 5));
    };
    std::uint64_t last = 0;
    std::atomic<std::uint64_t> values_asked = 0;
    store.load(
        [&](const ParameterInfo& info, std::uint64_t first_row, std::span<float> values) {
            values_asked += values.size();
            fill(info, first_row, values);
        },
        {},
        [&](std::uint64_t elements) {
            EXPECT_GT(elements, last);
            last = elements;
        },
        {},
        {.codes =
             [&](const ParameterInfo& info, std::uint64_t first_row,
                 std::span<std::uint8_t> codes) {
                 for (std::uint64_t i = 0; i < codes.size(); ++i)
                     codes[i] = code_of(info, first_row * info.shape[1] + i);
             },
         .scales =
             [&](const ParameterInfo& info, std::span<float> scales) {
                 for (std::uint64_t i = 0; i < scales.size(); ++i)
                     scales[i] = scale_of(info, i);
             }});
    EXPECT_EQ(last, store.num_elements());
    EXPECT_EQ(values_asked, infos[0].size() + infos[1].size() + infos[4].size() + infos[5].size());
    for (const std::size_t index : {2, 3}) {
        const Parameter& parameter = store.at(infos[index].name);
        const ParameterInfo& info = parameter.info;
        SCOPED_TRACE(info.name);
        ASSERT_EQ(parameter.quantized->recipe.rule, fp8::ScaleRule::F32);
        const std::uint64_t pitch = parameter.quantized->codes.stride[0];
        const auto codes = bytes_of(*device, parameter.quantized->codes);
        for (std::uint64_t i = 0; i < codes.size(); ++i) {
            const std::uint64_t row = i / pitch, column = i % pitch;
            const unsigned there =
                column < info.shape[1] ? code_of(info, row * info.shape[1] + column) : 0;
            ASSERT_EQ(codes[i], there) << "row " << row << ", column " << column;
        }
        const auto scales = testing::read_back<float>(*device, parameter.quantized->scales.buffer);
        const TensorView& view = parameter.quantized->scales;
        for (std::uint64_t i = 0; i < view.extent[0] * view.extent[1]; ++i)
            ASSERT_EQ(scales[i], scale_of(info, i)) << "block " << i;
    }
    EXPECT_EQ(store.at(infos[4].name).quantized->recipe.rule, fp8::ScaleRule::PowerOfTwo);
    EXPECT_FALSE(store.at(infos[5].name).quantized);
    EXPECT_EQ(store.at(infos[5].name).compute.dtype, DType::BF16);
}

TEST(LoadedParameters, RefuseFormsThatNoProductTakes) {
    const auto device = testing::make_device();
    const auto make = [&](bool training, std::vector<ParameterInfo> infos, LinearForms forms) {
        ParameterStore(*device, std::move(infos), DType::BF16, training, LinearPrecision::Fp8, {},
                       std::move(forms));
    };
    EXPECT_BELLOWS_ERROR(make(true, {parameters_of_test()[3]},
                              [](const ParameterInfo&) { return LinearForm::StoredCodes; }),
                         InvalidArgument, "training has FP8 weights of LinearForm::PowerOfTwo");
    std::vector<ParameterInfo> experts;
    for (const std::int64_t expert : {0, 1}) {
        experts.push_back(parameters_of_test()[3]);
        experts.back().name =
            "model.layers.0.mlp.experts." + std::to_string(expert) + ".down_proj.weight";
        experts.back().kind = ParameterKind::Expert;
        experts.back().expert = expert;
    }
    EXPECT_BELLOWS_ERROR(make(false, experts,
                              [](const ParameterInfo& info) {
                                  return info.expert == 0 ? LinearForm::StoredCodes
                                                          : LinearForm::PowerOfTwo;
                              }),
                         InvalidArgument, "must have the same LinearForm");
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
