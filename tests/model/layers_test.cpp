// SPDX-License-Identifier: MIT
// Attention and dense FFN: forward, input gradients and weight gradients of two micro-batches
// against the f64 reference; the same bits however the nodes of the micro-batches interleave and
// whatever order the device runs them in.

#include "support/layer_rig.hpp"

#include <bellows/base/error.hpp>
#include <bellows/model/dense_ffn.hpp>
#include <bellows/model/mla.hpp>

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

namespace bellows {
namespace {

using namespace testing;
using reference::Parameters;
using reference::Vector;

enum class Kind { Attention, Ffn };

std::unique_ptr<Layer> make_layer(Kind kind, Rig& rig) {
    if (kind == Kind::Attention)
        return make_attention(rig, 1);
    return std::make_unique<DenseFfn>(rig.config, 1, rig.store, rig.scratch);
}

struct Results {
    std::vector<std::vector<float>> y, dx; ///< per micro-batch
    std::map<std::string, std::vector<float>> gradients;
    bool operator==(const Results&) const = default;
};

std::vector<float> input(const Case& c, std::size_t micro_batch, std::uint64_t what) {
    return stored(test::random_f32(c.tokens() * c.model().hidden, 10 * micro_batch + what),
                  c.dtype);
}

/// Runs the nodes of both micro-batches in the order of `schedule`, e.g. "F0 B0 W0 F1 B1 W1". With
/// one slot the second micro-batch follows in the tensors of the first.
Results run_layer(Kind kind, const Case& c, const std::string& schedule,
                  const DeviceOptions& options = testing::test_options(),
                  std::size_t num_slots = kMicroBatches) {
    Rig rig(c, options);
    const auto layer = make_layer(kind, rig);
    std::vector<LayerTensors> tensors;
    std::vector<std::unique_ptr<LayerSlot>> slots;
    const auto fill = [&](std::size_t m) {
        rig.write(tensors[m % num_slots].x, input(c, m, 0));
        rig.write(tensors[m % num_slots].dy, input(c, m, 1));
    };
    for (std::size_t s = 0; s < num_slots; ++s) {
        const auto make = [&] { return rig.make(c.tokens(), rig.config.hidden); };
        tensors.push_back({make(), make(), make(), make()});
        SlotDesc desc{"slot " + std::to_string(s), c.tokens(), c.seq, tensors.back()};
        slots.push_back(layer->create_slot(desc));
        fill(s);
    }
    Results results;
    std::size_t done = 0;
    const auto collect = [&](std::size_t m) {
        results.y.push_back(rig.read(tensors[m % num_slots].y));
        results.dx.push_back(rig.read(tensors[m % num_slots].dx));
        ++done;
    };
    std::istringstream steps(schedule);
    for (std::string step; steps >> step;) {
        const auto m = static_cast<std::size_t>(step[1] - '0');
        if (step[0] == 'F' && m >= num_slots) {
            collect(done);
            fill(m);
        }
        submit(*slots[m % num_slots], step[0] == 'F'   ? NodeKind::Forward
                                      : step[0] == 'B' ? NodeKind::InputGradient
                                                       : NodeKind::WeightGradient);
    }
    rig.device->wait_idle();
    while (done < kMicroBatches)
        collect(done);
    for (const Parameter& parameter : rig.store.all())
        results.gradients[parameter.info.name] = rig.store.download_gradient(parameter.info.name);
    EXPECT_GT(rig.device->num_checked_accesses(), 0u);
    return results;
}

struct Expected {
    std::vector<Vector> y, dx;
    Parameters gradients; ///< summed over the micro-batches; parameters of this layer only
};

/// Gradient of the sub-layer's body with respect to its normalised input; sets its gradients.
Vector body(Kind kind, const Case& c, const Parameters& p, const Vector& n, const Vector& dy,
            Vector& y, Parameters& g) {
    using namespace reference;
    const ModelConfig config = c.model();
    if (kind == Kind::Attention) {
        const std::string prefix = "model.layers.1.self_attn.";
        if (!config.is_mla()) {
            const Gqa forward = gqa_forward(n, config, p, prefix, c.batch, c.seq);
            y = forward.y;
            return gqa_backward(dy, n, forward, config, p, prefix, c.batch, c.seq, g);
        }
        const Mla forward = mla_forward(n, config, p, prefix, c.batch, c.seq);
        y = forward.y;
        return mla_backward(dy, n, forward, config, p, prefix, c.batch, c.seq, g);
    }
    const std::size_t rows = c.tokens(), ffn = config.dense_ffn, hidden = config.hidden;
    const std::string gate_up = "model.layers.1.mlp.gate_up_proj.weight";
    const std::string down = "model.layers.1.mlp.down_proj.weight";
    const Vector up = gemm_nt(n, p.at(gate_up), rows, 2 * ffn, hidden);
    const Vector inner = swiglu_forward(up, {}, rows, ffn);
    y = gemm_nt(inner, p.at(down), rows, hidden, ffn);
    g[down] = gemm_tn(dy, inner, hidden, ffn, rows);
    const Vector d_up =
        swiglu_input_grad(gemm_nn(dy, p.at(down), rows, ffn, hidden), up, {}, rows, ffn).dx;
    g[gate_up] = gemm_tn(d_up, n, 2 * ffn, hidden, rows);
    return gemm_nn(d_up, p.at(gate_up), rows, hidden, 2 * ffn);
}

Expected expect_layer(Kind kind, const Case& c) {
    const ModelConfig config = c.model();
    const Parameters p = values_for(config, c.dtype);
    const std::string gain = kind == Kind::Attention
                                 ? "model.layers.1.input_layernorm.weight"
                                 : "model.layers.1.post_attention_layernorm.weight";
    Expected expected;
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        const Vector x = test::to_double(input(c, m, 0)), dy = test::to_double(input(c, m, 1));
        const auto norm =
            reference::rmsnorm_forward(x, p.at(gain), c.tokens(), config.hidden, config.norm_eps);
        Parameters g;
        Vector y;
        const Vector dn = body(kind, c, p, norm.y, dy, y, g);
        g[gain] = reference::rmsnorm_gain_grad(dn, x, norm.inv_rms, c.tokens(), config.hidden);
        Vector dx = reference::rmsnorm_input_grad(dn, x, p.at(gain), norm.inv_rms, c.tokens(),
                                                  config.hidden);
        add_to(y, x);
        add_to(dx, dy);
        expected.y.push_back(y);
        expected.dx.push_back(dx);
        for (const auto& [name, gradient] : g)
            add_to(expected.gradients[name], gradient);
    }
    return expected;
}

void check_layer(Kind kind, const Case& c) {
    const Results results = run_layer(kind, c, "F0 F1 B0 B1 W0 W1");
    const Expected expected = expect_layer(kind, c);
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        expect_close(results.y[m], expected.y[m], {c, 1}, "y of " + std::to_string(m));
        expect_close(results.dx[m], expected.dx[m], {c, 1}, "dx of " + std::to_string(m));
    }
    for (const auto& [name, gradient] : results.gradients) {
        const auto found = expected.gradients.find(name);
        if (found != expected.gradients.end())
            expect_close(gradient, found->second, {c, 1}, name);
        else
            EXPECT_TRUE(std::all_of(gradient.begin(), gradient.end(),
                                    [](float value) { return value == 0; }))
                << name << " belongs to another layer";
    }
}

class SubLayer : public ::testing::TestWithParam<Case> {};

TEST_P(SubLayer, AttentionMatchesTheReference) {
    check_layer(Kind::Attention, GetParam());
}

TEST_P(SubLayer, DenseFfnMatchesTheReference) {
    check_layer(Kind::Ffn, GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Cases, SubLayer,
    ::testing::Values(
        Case{"small_f32", small_config, DType::F32, 3, 7},
        Case{"small_bf16", small_config, DType::BF16, 3, 7},
        Case{"wide_f32", wide_config, DType::F32, 2, 45},
        Case{"wide_bf16", wide_config, DType::BF16, 2, 45},
        Case{"one_token_f32", small_config, DType::F32, 1, 1},
        Case{"sequences_of_one_bf16", wide_config, DType::BF16, 5, 1},
        Case{"small_fp8", small_config, DType::BF16, 3, 7, false, LinearPrecision::Fp8},
        Case{"wide_fp8", wide_config, DType::BF16, 2, 45, false, LinearPrecision::Fp8},
        Case{"fp8_with_f32", wide_config, DType::F32, 2, 45, false, LinearPrecision::Fp8},
        Case{"usual_products_bf16", wide_config, DType::BF16, 2, 45, false,
             LinearPrecision::AsActivations, Bf16Products::Usual},
        Case{"direct_products_bf16", wide_config, DType::BF16, 2, 45, false,
             LinearPrecision::AsActivations, Bf16Products::Direct}),
    name_of);

/// What small_config and wide_config do not have.
class OtherAttention : public ::testing::TestWithParam<Case> {};

TEST_P(OtherAttention, MatchesTheReference) {
    check_layer(Kind::Attention, GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Cases, OtherAttention,
    ::testing::Values(Case{"stretched_f32", stretched_config, DType::F32, 3, 7},
                      Case{"grouped_f32", grouped_config, DType::F32, 3, 7},
                      Case{"grouped_bf16", grouped_config, DType::BF16, 3, 7},
                      Case{"wide_grouped_f32", wide_grouped_config, DType::F32, 2, 45},
                      Case{"wide_grouped_bf16", wide_grouped_config, DType::BF16, 2, 45},
                      Case{"grouped_one_token_f32", grouped_config, DType::F32, 1, 1},
                      Case{"grouped_fp8", grouped_config, DType::BF16, 3, 7, false,
                           LinearPrecision::Fp8},
                      Case{"wide_grouped_fp8", wide_grouped_config, DType::BF16, 2, 45, false,
                           LinearPrecision::Fp8},
                      Case{"grouped_direct_products_bf16", wide_grouped_config, DType::BF16, 2, 45,
                           false, LinearPrecision::AsActivations, Bf16Products::Direct}),
    name_of);

class SubLayerOrder : public ::testing::TestWithParam<Kind> {};

TEST_P(SubLayerOrder, WeightGradientsMayBeDeferred) {
    for (const auto& [config, dtype, linear] :
         {std::tuple(&small_config, DType::F32, LinearPrecision::AsActivations),
          std::tuple(&small_config, DType::BF16, LinearPrecision::AsActivations),
          std::tuple(&small_config, DType::BF16, LinearPrecision::Fp8),
          std::tuple(&grouped_config, DType::BF16, LinearPrecision::Fp8)}) {
        const Case c{"order", config, dtype, 2, 9, false, linear};
        const Results plain = run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1");
        EXPECT_EQ(run_layer(GetParam(), c, "F0 B0 F1 W0 B1 W1"), plain);
        EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 B1 W0 W1"), plain);
        EXPECT_EQ(run_layer(GetParam(), c, "F1 F0 B1 B0 W0 W1"), plain);
        EXPECT_EQ(run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1", testing::test_options(), 1), plain)
            << "one slot, replayed";
    }
}

TEST_P(SubLayerOrder, EveryLegalOrderGivesTheSameBits) {
    for (const auto& [config, linear] : {std::pair(&small_config, LinearPrecision::AsActivations),
                                         std::pair(&small_config, LinearPrecision::Fp8),
                                         std::pair(&grouped_config, LinearPrecision::AsActivations),
                                         std::pair(&grouped_config, LinearPrecision::Fp8)}) {
        const Case c{"order", config, DType::F32, 2, 9, false, linear};
        DeviceOptions options = testing::test_options();
        options.sync = SyncMode::Overlap;
        const Results overlap = run_layer(GetParam(), c, "F0 F1 B0 W0 B1 W1", options);
        options.sync = SyncMode::Serial;
        EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 W0 B1 W1", options), overlap);
        options.sync = SyncMode::Shuffle;
        for (options.shuffle_seed = 1; options.shuffle_seed <= 3; ++options.shuffle_seed)
            EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 W0 B1 W1", options), overlap);
    }
}

std::string kind_name(const ::testing::TestParamInfo<Kind>& info) {
    return info.param == Kind::Attention ? "Attention" : "Ffn";
}

// Some of wide_config's products have shapes that cannot go Direct or are too narrow for it.
TEST_P(SubLayerOrder, DirectProductsGiveEachTokenItsBits) {
    Case c{"direct",
           wide_config,
           DType::BF16,
           2,
           20,
           false,
           LinearPrecision::AsActivations,
           Bf16Products::Direct};
    if (!direct_choice(*testing::make_device()))
        return;
    std::set<std::string> kernels;
    DeviceOptions options = testing::test_options();
    options.on_pipeline_compiled = [&](const std::string& kernel, std::uint32_t) {
        kernels.insert(kernel);
    };
    const Results direct = run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1", options);
    EXPECT_TRUE(kernels.contains("gemm_direct_nt")) << "nothing went Direct";
    EXPECT_TRUE(kernels.contains("transpose"));
    if (GetParam() == Kind::Ffn) { // all of its, input gradients too
        for (const char* engine : {"gemm_nt", "gemm_nn", "gemm_coopmat_nt", "gemm_coopmat_nn"})
            EXPECT_FALSE(kernels.contains(engine)) << engine;
    }
    EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 B1 W0 W1"), direct);
    c.batch = 1; // the first sequence by itself
    const Results alone = run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1");
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        EXPECT_TRUE(std::equal(alone.y[m].begin(), alone.y[m].end(), direct.y[m].begin()));
        EXPECT_TRUE(std::equal(alone.dx[m].begin(), alone.dx[m].end(), direct.dx[m].begin()));
    }
    kernels.clear();
    c.products = Bf16Products::Engine;
    run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1", options);
    EXPECT_FALSE(kernels.contains("gemm_direct_nt") || kernels.contains("transpose"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, SubLayerOrder, ::testing::Values(Kind::Attention, Kind::Ffn),
                         kind_name);

TEST(SubLayerMemory, SlotsShareScratchAndReportTheRest) {
    const Case c{"memory", small_config, DType::F32, 2, 9};
    Rig rig(c, testing::test_options());
    MlaAttention attention(rig.config, 1, rig.store, rig.positions, rig.scratch);
    DenseFfn ffn(rig.config, 1, rig.store, rig.scratch);
    const auto bytes = [&](MemoryCategory category) {
        return rig.device->memory_report().categories[static_cast<std::size_t>(category)].bytes;
    };
    const auto make = [&] { return rig.make(c.tokens(), rig.config.hidden); };
    const SlotDesc desc{"slot", c.tokens(), c.seq, {make(), make(), make(), make()}};
    const std::uint64_t before = bytes(MemoryCategory::Activations);
    const auto first = attention.create_slot(desc);
    const std::uint64_t per_slot = bytes(MemoryCategory::Activations) - before;
    const std::uint64_t scratch = rig.scratch.size();
    EXPECT_GT(per_slot, 0u);
    EXPECT_GT(scratch, 0u);
    EXPECT_GT(bytes(MemoryCategory::DeferredWgrad), 0u);
    const auto second = attention.create_slot(desc);
    const auto third = ffn.create_slot(desc);
    EXPECT_EQ(rig.scratch.size(), scratch) << "the FFN needs less than attention";
    EXPECT_GT(bytes(MemoryCategory::Activations), before + 2 * per_slot);
}

TEST(SubLayerMemory, SlotsTakeWhatTheirKindDeclares) {
    for (const auto& [config, linear] : {std::pair(&small_config, LinearPrecision::AsActivations),
                                         std::pair(&small_config, LinearPrecision::Fp8),
                                         std::pair(&grouped_config, LinearPrecision::AsActivations),
                                         std::pair(&grouped_config, LinearPrecision::Fp8),
                                         std::pair(&wide_grouped_config, LinearPrecision::Fp8)}) {
        const DType act = linear == LinearPrecision::Fp8 ? DType::BF16 : DType::F32;
        const Case c{.name = "declared",
                     .config = config,
                     .dtype = act,
                     .batch = 2,
                     .seq = 160,
                     .linear = linear};
        const SlotShape shape{
            .tokens = c.tokens(), .seq = c.seq, .activation = act, .linear = linear};
        for (const Kind kind : {Kind::Attention, Kind::Ffn}) {
            Rig rig(c, testing::test_options());
            const auto make = [&] { return rig.make(c.tokens(), rig.config.hidden); };
            const SlotDesc desc{"slot", c.tokens(), c.seq, {make(), make(), make(), make()}};
            const char* attention = rig.config.is_mla() ? "mla" : "gqa";
            const LayerKind& declared =
                layer_kind(kind == Kind::Attention ? attention : "dense_ffn");
            SCOPED_TRACE(std::string(declared.name) + " in " + to_string(act));
            const MemoryReport before = rig.device->memory_report();
            const auto layer = make_layer(kind, rig);
            const auto slot = layer->create_slot(desc);
            const MemoryReport after = rig.device->memory_report();
            MemorySizes expected{};
            for (const BufferInfo& buffer : declared.buffers(rig.config, shape))
                expected[static_cast<std::size_t>(buffer.category)] += buffer.bytes(0);
            for (const MemoryCategory category :
                 {MemoryCategory::Activations, MemoryCategory::DeferredWgrad})
                EXPECT_EQ(after.of(category).bytes - before.of(category).bytes,
                          expected[static_cast<std::size_t>(category)])
                    << to_string(category);
            std::vector<std::string> names, declared_names;
            std::uint64_t most = 0;
            for (const NodeInfo& node : declared.nodes(rig.config, shape)) {
                declared_names.push_back(node.name);
                most = std::max(most, node.scratch_bytes);
            }
            for (const NodeKind of :
                 {NodeKind::Forward, NodeKind::InputGradient, NodeKind::WeightGradient})
                for (const Node& node : slot->nodes(of))
                    names.push_back(node.name);
            EXPECT_EQ(names, declared_names);
            constexpr std::uint64_t kAlignment = 16 * 256; // of some tensors in scratch
            EXPECT_LE(rig.scratch.size(), most + kAlignment);
            EXPECT_GE(rig.scratch.size(), most / (linear == LinearPrecision::Fp8 ? 2 : 1));
        }
    }
}

TEST(SubLayerErrors, WhatDoesNotFitIsRefused) {
    const Case c{"errors", small_config, DType::F32, 2, 9};
    Rig rig(c, testing::test_options());
    MlaAttention attention(rig.config, 0, rig.store, rig.positions, rig.scratch);
    const auto make = [&](std::uint64_t rows) { return rig.make(rows, rig.config.hidden); };
    const LayerTensors tensors{make(18), make(18), make(18), make(18)};
    EXPECT_THROW(attention.create_slot({"part of a sequence", 18, 8, tensors}), Error);
    EXPECT_THROW(attention.create_slot({"longer than the table", 18, 18, tensors}), Error);
    EXPECT_THROW(attention.create_slot({"wrong x", 9, 9, tensors}), Error);
    EXPECT_THROW(DenseFfn(rig.config, 2, rig.store, rig.scratch), Error) << "no such layer";
    EXPECT_THROW(MlaAttention(rig.config, 2, rig.store, rig.positions, rig.scratch), Error);
}

} // namespace
} // namespace bellows
