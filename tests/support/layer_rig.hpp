// SPDX-License-Identifier: MIT
#pragma once

// What the tests of layers share: small models, a device with their parameters, and how close
// results must be to the f64 reference.

#include "support/bf16_products.hpp"
#include "support/compare.hpp"
#include "support/model_parameters.hpp"
#include "support/test_device.hpp"
#include "verify/reference/model.hpp"

#include <bellows/model/gqa.hpp>
#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/mla.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bellows::testing {

inline constexpr std::size_t kMicroBatches = 2;

inline ModelConfig small_config() {
    ModelConfig c;
    c.vocabulary = 40;
    c.hidden = 24;
    c.layers = 2;
    c.dense_layers = 2;
    c.heads = 3;
    c.q_lora_rank = 16;
    c.kv_lora_rank = 24;
    c.qk_nope_head_dim = 16;
    c.qk_rope_head_dim = 8;
    c.v_head_dim = 8;
    c.dense_ffn = 40;
    return c;
}

/// Larger than every tile: several GEMM tiles, several blocks of keys.
inline ModelConfig wide_config() {
    ModelConfig c = small_config();
    c.hidden = 136;
    c.heads = 2;
    c.q_lora_rank = 0;
    c.kv_lora_rank = 40;
    c.qk_nope_head_dim = 32;
    c.qk_rope_head_dim = 16;
    c.v_head_dim = 40;
    c.dense_ffn = 152;
    c.vocabulary = 264;
    return c;
}

/// Latent attention with stretched rotations and a constant of its own for the latents' norms.
inline ModelConfig stretched_config() {
    ModelConfig c = small_config();
    c.latent_norm_eps = 0.05;
    c.norm_eps = 1e-3;
    c.rope_scaling = RopeScaling::Yarn;
    c.rope_factor = 8;
    c.rope_original_context = 4;
    c.rope_beta_fast = 1;
    c.rope_beta_slow = 0.1;
    c.rope_mscale = 1.5;
    c.rope_mscale_all_dim = 0.7;
    return c;
}

/// Three heads of queries to one of keys, each with a norm.
inline ModelConfig grouped_config() {
    ModelConfig c;
    c.vocabulary = 40;
    c.hidden = 24;
    c.layers = 2;
    c.dense_layers = 2;
    c.attention = AttentionKind::Gqa;
    c.heads = 6;
    c.kv_heads = 2;
    c.head_dim = 16;
    c.qk_norm = true;
    c.norm_eps = 1e-3;
    c.dense_ffn = 40;
    return c;
}

/// Larger than every tile, without norms of heads, with rotations as Llama-3 stretches them.
inline ModelConfig wide_grouped_config() {
    ModelConfig c = grouped_config();
    c.hidden = 136;
    c.heads = 4;
    c.kv_heads = 1;
    c.head_dim = 40;
    c.qk_norm = false;
    c.rope_scaling = RopeScaling::Llama3;
    c.rope_factor = 8;
    c.rope_original_context = 16;
    c.dense_ffn = 152;
    c.vocabulary = 264;
    return c;
}

struct Case {
    const char* name;
    ModelConfig (*config)();
    DType dtype;
    std::size_t batch, seq; ///< of a micro-batch
    bool tied = false;
    LinearPrecision linear = LinearPrecision::AsActivations;
    Bf16Products products = Bf16Products::Engine;

    ModelConfig model() const {
        ModelConfig c = config();
        c.tied_embeddings = tied;
        return c;
    }
    std::size_t tokens() const { return batch * seq; }
};

inline void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

inline std::string name_of(const ::testing::TestParamInfo<Case>& info) {
    return info.param.name;
}

/// What calc_diff and an element's error, relative to the largest element, may be after so many
/// sub-layers in a row: errors are independent, so their squares add up. f32: some hundred
/// roundings of 2^-24, at most 1e-6 of the norm; ten times the worst seen. bf16: each of the ten
/// tensors of a sub-layer is rounded by up to 2^-9, gradients cancel; two to three times the worst
/// seen. FP8: what enters a product is rounded by up to 2^-4, 2.6 % on average.
struct Tolerance {
    Tolerance(const Case& c, std::size_t sub_layers) : Tolerance(c.dtype, sub_layers) {
        if (c.linear != LinearPrecision::Fp8)
            return;
        diff = 2e-2 * static_cast<double>(sub_layers);
        element = 0.25 * std::sqrt(static_cast<double>(sub_layers));
    }
    Tolerance(DType dtype, std::size_t sub_layers)
        : diff((dtype == DType::F32 ? 2e-12 : 1e-4) * static_cast<double>(sub_layers)),
          element((dtype == DType::F32 ? 3e-6 : 0.025) *
                  std::sqrt(static_cast<double>(sub_layers))) {}
    double diff, element;
};

inline void expect_close(const std::vector<float>& actual, const reference::Vector& expected,
                         Tolerance tolerance, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    EXPECT_LE(test::calc_diff(actual, expected), tolerance.diff) << what;
    double largest = 1e-9;
    for (const double value : expected)
        largest = std::max(largest, std::abs(value));
    EXPECT_TRUE(
        test::elements_match(actual, expected, {}, test::within(tolerance.element * largest, 0)))
        << what;
}

inline std::vector<float> stored(std::vector<float> values, DType dtype) {
    if (dtype == DType::BF16)
        for (float& value : values)
            value = test::round_to_bf16(value);
    return values;
}

inline void add_to(reference::Vector& sum, const reference::Vector& part) {
    sum.resize(std::max(sum.size(), part.size()));
    for (std::size_t i = 0; i < part.size(); ++i)
        sum[i] += part[i];
}

/// Matrices as the device stores them; gains keep their f32 values in every type.
inline reference::Parameters values_for(const ModelConfig& config, DType dtype) {
    reference::Parameters values = test::random_parameters(config, 3);
    for (const ParameterInfo& info : parameters(config))
        if (info.kind != ParameterKind::Norm)
            values[info.name] = test::to_double(stored(test::to_float(values[info.name]), dtype));
    return values;
}

/// A device with the parameters of one small model.
struct Rig {
    Rig(const Case& c, const DeviceOptions& options)
        : config(c.model()), dtype(c.dtype), device(testing::make_device(options)),
          store(*device, parameters(config), dtype, true, c.linear), scratch(*device),
          positions(*device, config, c.seq) {
        if (c.products != Bf16Products::Engine)
            store.use_products(choice_of(*device, c.products));
        store.initialise(1);
        for (const auto& [name, values] : values_for(config, dtype))
            store.upload(name, test::to_float(values));
    }

    TensorView make(std::size_t rows, std::size_t columns) {
        buffers.emplace_back(
            *device, BufferDesc{.name = "tensor", .bytes = rows * columns * size_of(dtype)});
        return buffers.back().tensor(dtype, {rows, columns});
    }
    /// Written by the host.
    TensorView indices(const std::vector<std::uint32_t>& values) {
        buffers.emplace_back(
            *device,
            BufferDesc{.name = "indices", .bytes = values.size() * 4, .kind = MemoryKind::Upload});
        std::copy(values.begin(), values.end(), buffers.back().mapped_as<std::uint32_t>().begin());
        return buffers.back().tensor(DType::U32, {values.size()});
    }
    void write(const TensorView& view, const std::vector<float>& values) {
        if (view.dtype == DType::F32) {
            device->upload(view.buffer, std::span<const float>(values));
            return;
        }
        std::vector<std::uint16_t> bits;
        for (const float value : values)
            bits.push_back(test::bf16_bits(value));
        device->upload(view.buffer, std::span<const std::uint16_t>(bits));
    }
    std::vector<float> read(const TensorView& view) {
        if (view.dtype == DType::F32)
            return read_back<float>(*device, view.buffer);
        std::vector<float> values;
        for (const std::uint16_t bits : read_back<std::uint16_t>(*device, view.buffer))
            values.push_back(test::from_bf16(bits));
        return values;
    }

    ModelConfig config;
    DType dtype;
    std::unique_ptr<Device> device;
    ParameterStore store;
    LayerScratch scratch;
    RopeTable positions;
    std::vector<Buffer> buffers;
};

/// The attention of a layer of the rig's model.
inline std::unique_ptr<Layer> make_attention(Rig& rig, std::uint64_t layer) {
    if (rig.config.is_mla())
        return std::make_unique<MlaAttention>(rig.config, layer, rig.store, rig.positions,
                                              rig.scratch);
    return std::make_unique<GqaAttention>(rig.config, layer, rig.store, rig.positions, rig.scratch);
}

inline void submit(LayerSlot& slot, NodeKind kind) {
    for (const Node& node : slot.nodes(kind))
        node.submit({});
}

} // namespace bellows::testing
