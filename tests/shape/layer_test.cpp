// SPDX-License-Identifier: MIT
// Declarations of layers: what follows from them, and a kind from outside of the library.
#include "gqa_attention.hpp"

#include <bellows/base/error.hpp>
#include <bellows/plan/memory_estimate.hpp>
#include <bellows/shape/layer.hpp>
#include <bellows/shape/presets.hpp>
#include <bellows/shape/stages.hpp>

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>

namespace bellows {
namespace {

ModelConfig tiny() {
    return load_model("tiny");
}

/// With GQA in the place of MLA: one row is another.
std::array<LayerKind, 5> with_gqa() {
    return {layer_kind("embedding"), test::gqa_attention(), layer_kind("dense_ffn"),
            layer_kind("moe_ffn"), layer_kind("head")};
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
        EXPECT_NE(error.message().find("mla, dense_ffn, moe_ffn"), std::string::npos)
            << error.message();
    }
}

TEST(Layers, NamesAreUniqueAndNodesInOrder) {
    const ModelConfig config = tiny();
    for (const DType act : {DType::F32, DType::BF16})
        for (const LinearPrecision linear : {LinearPrecision::AsActivations, LinearPrecision::Fp8})
            for (const bool training : {false, true})
                for (const LayerKind& kind : layer_kinds()) {
                    SCOPED_TRACE(kind.name);
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

TEST(Layers, AGroupedQueryLayerIsOneFileAndOneRow) {
    const ModelConfig config = tiny();
    const auto kinds = with_gqa();

    const std::vector<ParameterInfo> list = parameters(config, kinds);
    std::map<std::string, std::vector<std::uint64_t>> shapes;
    for (const ParameterInfo& info : list)
        EXPECT_TRUE(shapes.emplace(info.name, info.shape).second) << info.name;
    using Shape = std::vector<std::uint64_t>;
    EXPECT_EQ(shapes.at("model.layers.1.self_attn.k_proj.weight"),
              (Shape{2 * test::kHeadDim, config.hidden}));
    EXPECT_EQ(shapes.count("model.layers.1.self_attn.kv_b_proj.weight"), 0u);
    EXPECT_EQ(shapes.count("model.layers.1.mlp.gate.weight"), 1u) << "others stay";

    // Every stage has its own, and all of them together are the model.
    std::uint64_t of_stages = 0;
    for (std::uint64_t stage = 0; stage < 2; ++stage)
        of_stages += elements(parameters_of_stage(config, stage, 2, 0, 1, kinds));
    EXPECT_EQ(of_stages, elements(list));
    EXPECT_EQ(count_parameters(config, kinds).total, elements(list));
    const std::uint64_t attention =
        (2 * config.heads + 2 * test::kKeyValueHeads) * test::kHeadDim * config.hidden;
    EXPECT_EQ(count_parameters(config, kinds).attention_per_layer, attention);

    // What it computes: its matrices, and scores over the keys that a token sees.
    const auto flops = [&](std::uint64_t seq, LayerTable table) {
        return training_flops_per_token(config, seq, table);
    };
    EXPECT_DOUBLE_EQ(flops(129, kinds) - flops(1, kinds),
                     3.0 * 64 * double(config.layers) * 4 * double(config.heads * test::kHeadDim));

    // The memory estimate: the difference between the two tables is that of the declarations.
    TrainingShape shape;
    const LayerKind& mla = layer_kind("mla");
    const SlotShape slot{.tokens = shape.batch * shape.seq, .seq = shape.seq};
    const auto kept = [&](const LayerKind& kind) {
        std::uint64_t sum = 0;
        for (const BufferInfo& buffer : kind.buffers(config, slot))
            if (buffer.category == MemoryCategory::Activations)
                sum += buffer.bytes(0);
        return sum * config.layers;
    };
    MemoryEstimate gqa = estimate_memory(config, shape, {}, 0, {}, kinds);
    MemoryEstimate usual = estimate_memory(config, shape, {}, 0, {});
    EXPECT_EQ(gqa.of(MemoryCategory::Activations) + kept(mla),
              usual.of(MemoryCategory::Activations) + kept(kinds[1]));
    EXPECT_EQ(gqa.of(MemoryCategory::Gradients) + 4 * elements(parameters(config)),
              usual.of(MemoryCategory::Gradients) + 4 * elements(list));
}

} // namespace
} // namespace bellows
