// SPDX-License-Identifier: MIT
// FP8 linear layers in detail: the weights' codes and scales bit by bit, and an FFN's forward and
// backward passes against the f64 reference of the same recipe, quantised by hand at every place.

#include "support/layer_rig.hpp"
#include "support/packed_weights.hpp"
#include "verify/reference/fp8.hpp"

#include <bellows/base/error.hpp>
#include <bellows/model/dense_ffn.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <cmath>

namespace bellows {
namespace {

using namespace testing;
using reference::Vector;

struct ByHand {
    std::vector<std::uint8_t> codes;
    std::vector<float> scales;
    Vector values; ///< code * scale
};

/// x: [rows, columns] in blocks of block_rows x block_columns.
ByHand quantise(const Vector& x, std::size_t rows, std::size_t columns, std::size_t block_rows,
                std::size_t block_columns) {
    ByHand q;
    const std::vector<float> narrow = test::to_float(x);
    q.codes.resize(x.size());
    q.values.resize(x.size());
    for (std::size_t row = 0; row < rows; row += block_rows)
        for (std::size_t column = 0; column < columns; column += block_columns) {
            const reference::Fp8Block block{row, std::min(row + block_rows, rows), column,
                                            std::min(column + block_columns, columns)};
            const float scale =
                reference::fp8_quantize_block(narrow, columns, block, reference::Fp8Format::E4M3,
                                              reference::Fp8Rule::PowerOfTwo, q.codes);
            q.scales.push_back(scale);
            for (std::size_t r = block.row; r < block.row_end; ++r)
                for (std::size_t c = block.column; c < block.column_end; ++c)
                    q.values[r * columns + c] =
                        reference::fp8_value(reference::Fp8Format::E4M3, q.codes[r * columns + c]) *
                        static_cast<double>(scale);
        }
    return q;
}

Vector weights(const Vector& x, std::size_t rows, std::size_t columns) {
    return quantise(x, rows, columns, 128, 128).values;
}
Vector along_features(const Vector& x, std::size_t rows, std::size_t columns) {
    return quantise(x, rows, columns, 1, 128).values;
}
Vector along_rows(const Vector& x, std::size_t rows, std::size_t columns) {
    return quantise(x, rows, columns, 128, 1).values;
}
Vector in_bf16(Vector x) {
    for (double& value : x)
        value = test::round_to_bf16(static_cast<float>(value));
    return x;
}

struct FfnResults {
    Vector y, dx, gate_up, down; ///< the last two: gradients
};

/// The FFN in f64; `fp8`: with every rounding of the recipe.
FfnResults ffn_by_hand(const Case& c, const Vector& x, const Vector& dy, bool fp8) {
    using namespace reference;
    const ModelConfig config = c.model();
    const Parameters p = values_for(config, c.dtype);
    const std::string layer = "model.layers.1.";
    const Vector& gain = p.at(layer + "post_attention_layernorm.weight");
    const std::size_t rows = c.tokens(), ffn = config.dense_ffn, hidden = config.hidden;
    const auto features = [&](const Vector& v) {
        return fp8 ? along_features(v, rows, v.size() / rows) : v;
    };
    const auto tokens = [&](const Vector& v) {
        return fp8 ? along_rows(v, rows, v.size() / rows) : v;
    };
    const auto stored = [&](const Vector& v) { return fp8 ? in_bf16(v) : v; };
    const auto matrix = [&](const char* name, std::size_t out, std::size_t in) {
        const Vector& w = p.at(layer + "mlp." + name + ".weight");
        return fp8 ? weights(w, out, in) : w;
    };
    const Vector gate_up = matrix("gate_up_proj", 2 * ffn, hidden);
    const Vector down = matrix("down_proj", hidden, ffn);

    FfnResults results;
    const RmsNorm norm = rmsnorm_forward(x, gain, rows, hidden, config.norm_eps);
    const Vector n = features(norm.y);
    const Vector up = stored(gemm_nt(n, gate_up, rows, 2 * ffn, hidden));
    const Vector inner = features(swiglu_forward(up, {}, rows, ffn));
    results.y = gemm_nt(inner, down, rows, hidden, ffn);
    add_to(results.y, x);

    const Vector kept = features(up); // the backward pass goes on from here
    const Vector again = features(swiglu_forward(kept, {}, rows, ffn));
    results.down = gemm_tn(tokens(dy), tokens(again), hidden, ffn, rows);
    const Vector d_inner = stored(gemm_nn(features(dy), down, rows, ffn, hidden));
    const Vector d_up = stored(swiglu_input_grad(d_inner, kept, {}, rows, ffn).dx);
    results.gate_up = gemm_tn(tokens(d_up), tokens(n), 2 * ffn, hidden, rows);
    const Vector dn = stored(gemm_nn(features(d_up), gate_up, rows, hidden, 2 * ffn));
    results.dx = rmsnorm_input_grad(dn, x, gain, norm.inv_rms, rows, hidden);
    add_to(results.dx, dy);
    return results;
}

const Case kCase{"fp8", wide_config, DType::BF16, 3, 50, false, LinearPrecision::Fp8};

/// The parts that a residual connection adds are taken off, so that only products are compared.
void expect_same_recipe(const std::vector<float>& actual, const Vector& fp8, const Vector& exact,
                        const Vector& residual, const char* what) {
    std::vector<float> part = actual;
    Vector by_hand = fp8, without = exact;
    for (std::size_t i = 0; i < residual.size(); ++i) {
        part[i] -= static_cast<float>(residual[i]);
        by_hand[i] -= residual[i];
        without[i] -= residual[i];
    }
    // A few intermediate values lie so near the middle of two codes that f32 decides otherwise.
    const double near = test::calc_diff(part, by_hand), far = test::calc_diff(part, without);
    EXPECT_LE(near, 4e-5) << what;
    EXPECT_GE(far, 2e-4) << what << " has not been quantised";
    EXPECT_GE(far, 8 * near) << what;
}

TEST(Fp8Ffn, EveryProductHasTheRecipe) {
    Rig rig(kCase, testing::test_options());
    DenseFfn layer(rig.config, 1, rig.store, rig.scratch);
    const auto make = [&] { return rig.make(kCase.tokens(), rig.config.hidden); };
    const LayerTensors t{make(), make(), make(), make()};
    const auto slot = layer.create_slot({"slot", kCase.tokens(), kCase.seq, t});
    const std::size_t elements = kCase.tokens() * rig.config.hidden;
    const auto x = stored(test::random_f32(elements, 1), DType::BF16);
    const auto dy = stored(test::random_f32(elements, 2), DType::BF16);
    rig.write(t.x, x);
    rig.write(t.dy, dy);
    for (const NodeKind kind :
         {NodeKind::Forward, NodeKind::InputGradient, NodeKind::WeightGradient})
        submit(*slot, kind);
    rig.device->wait_idle();

    const Vector wide_x = test::to_double(x), wide_dy = test::to_double(dy);
    const FfnResults fp8 = ffn_by_hand(kCase, wide_x, wide_dy, true);
    const FfnResults exact = ffn_by_hand(kCase, wide_x, wide_dy, false);
    const auto gradient = [&](const char* name) {
        return rig.store.download_gradient("model.layers.1.mlp." + std::string(name) + ".weight");
    };
    expect_same_recipe(rig.read(t.y), fp8.y, exact.y, wide_x, "y");
    expect_same_recipe(rig.read(t.dx), fp8.dx, exact.dx, wide_dy, "dx");
    expect_same_recipe(gradient("gate_up_proj"), fp8.gate_up, exact.gate_up, {}, "gate_up_proj");
    expect_same_recipe(gradient("down_proj"), fp8.down, exact.down, {}, "down_proj");
}

/// Codes of a [rows, columns] view without their rows' padding.
std::vector<std::uint8_t> codes_of(Device& device, const TensorView& view) {
    const auto all = read_back<std::uint8_t>(device, view.buffer);
    std::vector<std::uint8_t> codes;
    for (std::uint64_t row = 0; row < view.extent[0]; ++row)
        for (std::uint64_t column = 0; column < view.extent[1]; ++column)
            codes.push_back(all[row * view.stride[0] + column]);
    return codes;
}

/// masters: of all elements.
void expect_copies(ParameterStore& store, const std::vector<float>& masters) {
    std::size_t matrices = 0;
    for (const Parameter& parameter : store.all()) {
        const ParameterInfo& info = parameter.info;
        const bool linear = info.kind == ParameterKind::Attention ||
                            info.kind == ParameterKind::Ffn || info.kind == ParameterKind::Expert;
        ASSERT_EQ(parameter.quantized.has_value(), linear) << info.name;
        if (!linear)
            continue;
        const auto begin = masters.begin() + static_cast<std::ptrdiff_t>(parameter.first);
        const std::vector<float> values(begin, begin + static_cast<std::ptrdiff_t>(info.size()));
        const ByHand expected =
            quantise(test::to_double(values), info.shape[0], info.shape[1], 128, 128);
        EXPECT_EQ(codes_of(store.device(), parameter.quantized->codes), expected.codes)
            << info.name;
        auto scales = read_back<float>(store.device(), parameter.quantized->scales.buffer);
        scales.resize(expected.scales.size());
        EXPECT_EQ(scales, expected.scales) << info.name;
        ++matrices;
    }
    EXPECT_GT(matrices, 0u);
}

ModelConfig config_with_experts() {
    ModelConfig c = wide_config();
    c.dense_layers = 1;
    c.moe_ffn = 72;
    c.routed_experts = 3;
    c.shared_experts = 1;
    c.top_k = 2;
    return c;
}

TEST(Fp8Weights, FollowTheMasterBitByBit) {
    const auto device = testing::make_device();
    const ModelConfig config = config_with_experts();
    ParameterStore store(*device, parameters(config), DType::BF16, true, LinearPrecision::Fp8);
    std::vector<float> masters(store.num_elements());
    store.initialise(1, [&](std::uint64_t first, std::span<const float> values) {
        std::ranges::copy(values, masters.begin() + static_cast<std::ptrdiff_t>(first));
    });
    expect_copies(store, masters);
    for (const Parameter& parameter : store.all())
        EXPECT_TRUE(
            std::ranges::equal(initial_values(parameter.info, 1),
                               std::span(masters).subspan(parameter.first, parameter.info.size())))
            << parameter.info.name;
    std::uint64_t seed = 5;
    for (const Parameter& parameter : store.all()) {
        const auto values = test::random_f32(parameter.info.size(), ++seed, -3, 3);
        store.upload(parameter.info.name, values);
        std::ranges::copy(values, masters.begin() + static_cast<std::ptrdiff_t>(parameter.first));
    }
    expect_copies(store, masters);
    // All at once, and what stands from row 128 of a matrix on, as after an optimiser's step.
    masters = test::random_f32(store.num_elements(), 4, -0.01, 0.01);
    const auto quantise_from = [&](std::uint64_t first) {
        const std::span<const float> values = std::span(masters).subspan(first);
        Buffer buffer(*device, {.name = "masters", .bytes = values.size_bytes()});
        device->upload(buffer.view(), values);
        Recording r(*device, QueueRole::Compute, "quantise");
        store.quantize(r, first, buffer.tensor(DType::F32, {values.size()}));
        device->submit(r).wait();
    };
    quantise_from(0);
    expect_copies(store, masters);
    const auto tall = std::ranges::find_if(store.all(), [](const Parameter& parameter) {
        return parameter.quantized && parameter.info.shape[0] > 128;
    });
    ASSERT_NE(tall, store.all().end());
    const std::uint64_t first = tall->first + divisible_by(tall->info);
    const auto others = test::random_f32(store.num_elements() - first, 7, -0.01, 0.01);
    std::ranges::copy(others, masters.begin() + static_cast<std::ptrdiff_t>(first));
    quantise_from(first);
    expect_copies(store, masters);
}

/// They are what their codes give; layer: one with experts.
void expect_packed(ParameterStore& store, std::uint64_t layer) {
    Device& device = store.device();
    const auto expect = [&](const Parameter& parameter) {
        for (const auto& packed : {parameter.packed_nt, parameter.packed_nn}) {
            ASSERT_TRUE(packed) << parameter.info.name;
            const Buffer anew(device, {.name = "anew", .bytes = packed->memory.bytes});
            Recording r(device, QueueRole::Compute, "pack anew");
            r.fill(anew.view(), 0);
            fp8::prepack(r, *parameter.quantized, packed->form, anew.view());
            device.submit(r).wait();
            EXPECT_EQ(read_back<std::uint8_t>(device, packed->memory),
                      read_back<std::uint8_t>(device, anew.view()))
                << parameter.info.name << (packed->form == GemmForm::NT ? " nt" : " nn");
        }
    };
    std::size_t packed = 0, experts = 0;
    for (const Parameter& parameter : packable(store, layer))
        if (parameter.packed_nt) {
            expect(parameter);
            ++(parameter.quantized->codes.rank == 3 ? experts : packed);
        }
    EXPECT_GT(packed, 4u);
    // CPUs' work lists have no tiles that packed products of experts take.
    EXPECT_EQ(experts, device.info().is_cpu ? 0u : 2u);
}

TEST(PackedWeights, FollowTheCodes) {
    const auto device = testing::make_device();
    if (!fp8::why_not(*device, fp8::Variant::Packed).empty())
        GTEST_SKIP() << "no matrix units of f16";
    const ModelConfig config = config_with_experts();
    const std::uint64_t layer = config.dense_layers;
    ParameterStore store(*device, parameters(config), DType::BF16, true, LinearPrecision::Fp8);
    store.initialise(1);
    store.use_products(packed_choice());
    wipe_packed(store, layer);
    store.initialise(2);
    expect_packed(store, layer);
    std::uint64_t seed = 5;
    for (const ParameterInfo& info : parameters(config)) // of experts one by one
        store.upload(info.name, test::random_f32(info.size(), ++seed, -3, 3));
    expect_packed(store, layer);

    const std::uint64_t with = device->memory_report().bytes;
    store.use_products(fp8::Choice(fp8::Variant::Decoded));
    EXPECT_LT(device->memory_report().bytes, with);
    for (const Parameter& parameter : store.all())
        EXPECT_FALSE(parameter.packed_nt || parameter.packed_nn) << "nobody wants them any more";
    EXPECT_FALSE(store.experts(layer, "down_proj").packed_nt);
}

TEST(PackedWeights, AreMadeForTrainingInFp8Alone) {
    const auto device = testing::make_device();
    for (const bool training : {true, false})
        for (const auto linear : {LinearPrecision::AsActivations, LinearPrecision::Fp8}) {
            ParameterStore store(*device, parameters(config_with_experts()), DType::BF16, training,
                                 linear);
            store.use_products(packed_choice());
            const bool wanted = training && linear == LinearPrecision::Fp8 &&
                                fp8::why_not(*device, fp8::Variant::Packed).empty();
            EXPECT_EQ(std::ranges::any_of(
                          store.all(), [](const Parameter& p) { return p.packed_nt.has_value(); }),
                      wanted);
        }
}

/// Once they are packed, products of many rows read no codes, forwards nor backwards.
TEST(PackedWeights, AreWhatProductsRead) {
    Rig rig(kCase, testing::test_options());
    if (!fp8::why_not(*rig.device, fp8::Variant::Packed).empty())
        GTEST_SKIP() << "no matrix units of f16";
    rig.store.use_products(packed_choice());
    DenseFfn layer(rig.config, 1, rig.store, rig.scratch);
    const auto make = [&] { return rig.make(kCase.tokens(), rig.config.hidden); };
    const LayerTensors t{make(), make(), make(), make()};
    const auto slot = layer.create_slot({"slot", kCase.tokens(), kCase.seq, t});
    const std::size_t elements = kCase.tokens() * rig.config.hidden;
    rig.write(t.x, test::random_f32(elements, 1));
    rig.write(t.dy, test::random_f32(elements, 2));
    const auto results = [&] {
        submit(*slot, NodeKind::Forward);
        submit(*slot, NodeKind::InputGradient);
        rig.device->wait_idle();
        return std::pair(rig.read(t.y), rig.read(t.dx));
    };
    const auto expected = results();
    for (const float value : expected.second)
        ASSERT_TRUE(std::isfinite(value));
    for (const Parameter& parameter : rig.store.all())
        if (parameter.quantized) {
            const BufferView& codes = parameter.quantized->codes.buffer;
            const std::vector<std::uint8_t> nans(codes.bytes, fp8::kNanCode);
            rig.device->upload(codes, std::span<const std::uint8_t>(nans));
        }
    EXPECT_EQ(results(), expected);
}

/// What is kept of an element: one byte in FP8, two of other matrices, six of gains and biases.
TEST(Fp8Weights, TakeWhatLayersRead) {
    ModelConfig config = config_with_experts();
    config.vocabulary = 1024;
    for (const LinearPrecision linear : {LinearPrecision::AsActivations, LinearPrecision::Fp8}) {
        const auto device = testing::make_device();
        const ParameterStore store(*device, parameters(config), DType::BF16, false, linear);
        std::uint64_t bytes = 0;
        for (const Parameter& parameter : store.all()) {
            const bool codes = linear == LinearPrecision::Fp8 && is_linear(parameter.info);
            bytes += stored_elements(parameter.info) * (codes                         ? 1
                                                        : kept_in_f32(parameter.info) ? 6
                                                                                      : 2);
            EXPECT_EQ(static_cast<bool>(parameter.compute.buffer), !codes) << parameter.info.name;
            EXPECT_EQ(static_cast<bool>(parameter.weight.buffer), kept_in_f32(parameter.info));
        }
        const auto taken = device->memory_report().of(MemoryCategory::Weights).bytes;
        EXPECT_GE(taken, bytes);
        EXPECT_LE(taken, bytes + bytes / 20) << "scales";
        const Parameter experts = store.experts(config.dense_layers, "down_proj");
        EXPECT_THROW(static_cast<void>(store.download(experts.info.name)), Error)
            << "f32 values are nowhere";
    }
}

TEST(Fp8Weights, OddSizesAreRefused) {
    const auto device = testing::make_device();
    ParameterInfo info;
    info.name = "model.layers.0.mlp.down_proj.weight";
    info.shape = {16, 150};
    info.kind = ParameterKind::Ffn;
    info.layer = 0;
    EXPECT_NO_THROW(ParameterStore(*device, {info}, DType::BF16));
    try {
        ParameterStore(*device, {info}, DType::BF16, true, LinearPrecision::Fp8);
        FAIL() << "150 is no multiple of 8";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("150"), std::string::npos) << error.message();
    }
}

} // namespace
} // namespace bellows
