// SPDX-License-Identifier: MIT
// Declarations of layers, and what follows from them.
#include <bellows/base/error.hpp>
#include <bellows/plan/memory_estimate.hpp>
#include <bellows/shape/layer.hpp>
#include <bellows/shape/presets.hpp>
#include <bellows/shape/stages.hpp>

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace bellows {
namespace {

ModelConfig tiny() {
    return load_model("tiny");
}

/// tiny with grouped queries in the place of latent attention.
ModelConfig grouped() {
    ModelConfig config = tiny();
    config.attention = AttentionKind::Gqa;
    config.q_lora_rank = config.kv_lora_rank = 0;
    config.qk_nope_head_dim = config.qk_rope_head_dim = config.v_head_dim = 0;
    config.kv_heads = 2;
    config.head_dim = 64;
    return config;
}

std::uint64_t elements(const std::vector<ParameterInfo>& list) {
    std::uint64_t sum = 0;
    for (const ParameterInfo& info : list)
        sum += info.size();
    return sum;
}

TEST(Layers, StandInTheOrderOfTheForwardPass) {
    ModelConfig config = tiny();
    config.layers = 3;
    config.dense_layers = 1;
    const auto names = [&](std::uint64_t stage, std::uint64_t stages) {
        std::string all;
        for (const PlacedLayer& placed : placed_layers(config, stage, stages))
            all += std::string(placed.kind->name) + " " + std::to_string(placed.layer) + ", ";
        return all;
    };
    EXPECT_EQ(names(0, 1), "embedding 0, mla 0, dense_ffn 0, mla 1, moe_ffn 1, mla 2, moe_ffn 2, "
                           "head 0, ");
    EXPECT_EQ(names(0, 3), "embedding 0, mla 0, dense_ffn 0, ");
    EXPECT_EQ(names(1, 3), "mla 1, moe_ffn 1, ");
    EXPECT_EQ(names(2, 3), "mla 2, moe_ffn 2, head 0, ");
}

TEST(Layers, AKindThatIsMissingIsToldWithThoseThatAreThere) {
    try {
        layer_kind("mamba");
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("mla, gqa, dense_ffn, moe_ffn"), std::string::npos)
            << error.message();
    }
}

TEST(Layers, NamesAreUniqueAndNodesInOrder) {
    ModelConfig with_norms = grouped();
    with_norms.qk_norm = true;
    for (const DType act : {DType::F32, DType::BF16})
        for (const LinearPrecision linear : {LinearPrecision::AsActivations, LinearPrecision::Fp8})
            for (const bool training : {false, true})
                for (const LayerKind& kind : layer_kinds()) {
                    SCOPED_TRACE(kind.name);
                    const ModelConfig config =
                        kind.name == std::string("gqa") ? with_norms : tiny();
                    const SlotShape shape{.tokens = 64,
                                          .seq = 32,
                                          .activation = act,
                                          .linear = linear,
                                          .training = training,
                                          .local_experts = 4,
                                          .expert_rows = 128};
                    std::set<std::string> names;
                    for (const BufferInfo& buffer : kind.buffers(config, shape)) {
                        EXPECT_TRUE(names.insert(buffer.name).second) << buffer.name;
                        EXPECT_GT(buffer.bytes(128), 0u) << buffer.name;
                        EXPECT_TRUE(training || buffer.category != MemoryCategory::DeferredWgrad)
                            << buffer.name;
                    }
                    NodeKind last = NodeKind::Forward;
                    for (const NodeInfo& node : kind.nodes(config, shape)) {
                        EXPECT_GE(node.kind, last) << node.name;
                        last = node.kind;
                    }
                    EXPECT_EQ(last, training ? NodeKind::WeightGradient : NodeKind::Forward);
                }
}

TEST(Layers, BytesOfEveryStorage) {
    BufferInfo info{.name = "x", .dtype = DType::BF16, .extents = {100, 300}};
    EXPECT_EQ(info.bytes(0), 100u * 300 * 2);
    info.storage = Storage::Fp8Rows; // codes at a pitch of 304, three scales a row
    EXPECT_EQ(info.bytes(0), fp8::quantized_bytes(kRowsRecipe, {100, 300}));
    EXPECT_GE(info.bytes(0), 100u * (304 + 3 * 4));
    info.rows = RowCount::Arriving;
    EXPECT_EQ(info.bytes(40), fp8::quantized_bytes(kRowsRecipe, {40, 300}));
    EXPECT_EQ(info.bytes(400), info.bytes(100)) << "no more than could come";
    info.storage = Storage::Fp8Columns; // scales for all that could come, of each group its own
    info.groups = 3;
    EXPECT_EQ(info.bytes(40),
              fp8::codes_bytes({40, 300}) + fp8::scales_bytes(kColumnsRecipe, {100, 300}, 3));
}

TEST(Layers, GroupedQueriesStandInThePlaceOfLatentAttention) {
    const ModelConfig config = grouped();
    const std::vector<ParameterInfo> list = parameters(config);
    std::map<std::string, std::vector<std::uint64_t>> shapes;
    for (const ParameterInfo& info : list)
        EXPECT_TRUE(shapes.emplace(info.name, info.shape).second) << info.name;
    using Shape = std::vector<std::uint64_t>;
    const std::string attention = "model.layers.1.self_attn.";
    EXPECT_EQ(shapes.at(attention + "q_proj.weight"), (Shape{config.heads * 64, config.hidden}));
    EXPECT_EQ(shapes.at(attention + "k_proj.weight"), (Shape{2 * 64, config.hidden}));
    EXPECT_EQ(shapes.at(attention + "v_proj.weight"), (Shape{2 * 64, config.hidden}));
    EXPECT_EQ(shapes.at(attention + "o_proj.weight"), (Shape{config.hidden, config.heads * 64}));
    EXPECT_EQ(shapes.count(attention + "kv_b_proj.weight"), 0u);
    EXPECT_EQ(shapes.count(attention + "q_norm.weight"), 0u);
    EXPECT_EQ(shapes.count("model.layers.1.mlp.gate.weight"), 1u) << "others stay";
    ModelConfig normed = config;
    normed.qk_norm = true;
    EXPECT_EQ(elements(parameters(normed)), elements(list) + config.layers * 2 * 64);

    // Every stage has its own, and all of them together are the model.
    std::uint64_t of_stages = 0;
    for (std::uint64_t stage = 0; stage < 2; ++stage)
        of_stages += elements(parameters_of_stage(config, stage, 2, 0, 1));
    EXPECT_EQ(of_stages, elements(list));
    EXPECT_EQ(count_parameters(config).total, elements(list));
    EXPECT_EQ(count_parameters(config).attention_per_layer,
              (2 * config.heads + 2 * 2) * 64 * config.hidden);

    // What it computes: its matrices, and scores over the keys that a token sees.
    EXPECT_DOUBLE_EQ(training_flops_per_token(config, 129) - training_flops_per_token(config, 1),
                     3.0 * 64 * double(config.layers) * 4 * double(config.heads * 64));

    // The memory estimates differ by what the declarations do.
    TrainingShape shape;
    const SlotShape slot{.tokens = shape.batch * shape.seq, .seq = shape.seq};
    const auto kept = [&](const ModelConfig& of, const char* kind) {
        std::uint64_t sum = 0;
        for (const BufferInfo& buffer : layer_kind(kind).buffers(of, slot))
            if (buffer.category == MemoryCategory::Activations)
                sum += buffer.bytes(0);
        return sum * of.layers;
    };
    MemoryEstimate gqa = estimate_memory(config, shape, {}, 0, {});
    MemoryEstimate mla = estimate_memory(tiny(), shape, {}, 0, {});
    EXPECT_EQ(gqa.of(MemoryCategory::Activations) + kept(tiny(), "mla"),
              mla.of(MemoryCategory::Activations) + kept(config, "gqa"));
    EXPECT_EQ(gqa.of(MemoryCategory::Gradients) + 4 * elements(parameters(tiny())),
              mla.of(MemoryCategory::Gradients) + 4 * elements(list));
}

} // namespace
} // namespace bellows
