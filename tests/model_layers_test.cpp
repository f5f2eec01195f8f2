// SPDX-License-Identifier: MIT
// Attention, dense FFN, embedding and head: forward, input gradients and weight gradients of two
// micro-batches against the f64 reference, alone and joined to a dense model; the same bits however
// the nodes of the micro-batches interleave and whatever order the device runs them in.

#include "reference/model.hpp"
#include "support/compare.hpp"
#include "support/model_parameters.hpp"
#include "support/test_device.hpp"

#include <bellows/engine/error.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/dense_ffn.hpp>
#include <bellows/model/embedding.hpp>
#include <bellows/model/head.hpp>
#include <bellows/model/mla.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <sstream>

namespace bellows {
namespace {

using reference::Parameters;
using reference::Vector;
using testing::read_back;

constexpr std::size_t kMicroBatches = 2;

ModelConfig small_config() {
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
ModelConfig wide_config() {
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

struct Case {
    const char* name;
    ModelConfig (*config)();
    DType dtype;
    std::size_t batch, seq; ///< of a micro-batch
    bool tied = false;

    ModelConfig model() const {
        ModelConfig c = config();
        c.tied_embeddings = tied;
        return c;
    }
    std::size_t tokens() const { return batch * seq; }
};

void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
    return info.param.name;
}

/// What calc_diff and an element's error, relative to the largest element, may be after so many
/// sub-layers in a row: errors are independent, so their squares add up. f32: some hundred
/// roundings of 2^-24, at most 1e-6 of the norm; ten times the worst seen. bf16: each of the ten
/// tensors of a sub-layer is rounded by up to 2^-9, gradients cancel; two to three times the worst
/// seen.
struct Tolerance {
    Tolerance(DType dtype, std::size_t sub_layers)
        : diff((dtype == DType::F32 ? 2e-12 : 1e-4) * static_cast<double>(sub_layers)),
          element((dtype == DType::F32 ? 3e-6 : 0.025) *
                  std::sqrt(static_cast<double>(sub_layers))) {}
    double diff, element;
};

void expect_close(const std::vector<float>& actual, const Vector& expected, Tolerance tolerance,
                  const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    EXPECT_LE(test::calc_diff(actual, expected), tolerance.diff) << what;
    double largest = 1e-9;
    for (const double value : expected)
        largest = std::max(largest, std::abs(value));
    EXPECT_TRUE(
        test::elements_match(actual, expected, {}, test::within(tolerance.element * largest, 0)))
        << what;
}

std::vector<float> stored(std::vector<float> values, DType dtype) {
    if (dtype == DType::BF16)
        for (float& value : values)
            value = test::round_to_bf16(value);
    return values;
}

void add_to(Vector& sum, const Vector& part) {
    sum.resize(std::max(sum.size(), part.size()));
    for (std::size_t i = 0; i < part.size(); ++i)
        sum[i] += part[i];
}

/// Matrices as the device stores them; gains keep their f32 values in every type.
Parameters values_for(const ModelConfig& config, DType dtype) {
    Parameters values = test::random_parameters(config, 3);
    for (const ParameterInfo& info : parameters(config))
        if (info.kind != ParameterKind::Norm)
            values[info.name] = test::to_double(stored(test::to_float(values[info.name]), dtype));
    return values;
}

/// A device with the parameters of one small model.
struct Rig {
    Rig(const Case& c, const DeviceOptions& options)
        : config(c.model()), dtype(c.dtype), device(testing::make_device(options)),
          store(*device, parameters(config), dtype), scratch(*device),
          positions(*device, config, c.seq) {
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
    Scratch scratch;
    RopeTable positions;
    std::vector<Buffer> buffers;
};

void submit(LayerSlot& slot, NodeKind kind) {
    for (const Node& node : slot.nodes(kind))
        node.submit();
}

// ---- One sub-layer ------------------------------------------------------------------------------

enum class Kind { Attention, Ffn };

std::unique_ptr<Layer> make_layer(Kind kind, Rig& rig) {
    if (kind == Kind::Attention)
        return std::make_unique<MlaAttention>(rig.config, 1, rig.store, rig.positions, rig.scratch);
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
        expect_close(results.y[m], expected.y[m], {c.dtype, 1}, "y of " + std::to_string(m));
        expect_close(results.dx[m], expected.dx[m], {c.dtype, 1}, "dx of " + std::to_string(m));
    }
    for (const auto& [name, gradient] : results.gradients) {
        const auto found = expected.gradients.find(name);
        if (found != expected.gradients.end())
            expect_close(gradient, found->second, {c.dtype, 1}, name);
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

INSTANTIATE_TEST_SUITE_P(Cases, SubLayer,
                         ::testing::Values(Case{"small_f32", small_config, DType::F32, 3, 7},
                                           Case{"small_bf16", small_config, DType::BF16, 3, 7},
                                           Case{"wide_f32", wide_config, DType::F32, 2, 45},
                                           Case{"wide_bf16", wide_config, DType::BF16, 2, 45},
                                           Case{"one_token_f32", small_config, DType::F32, 1, 1},
                                           Case{"sequences_of_one_bf16", wide_config, DType::BF16,
                                                5, 1}),
                         name_of);

class SubLayerOrder : public ::testing::TestWithParam<Kind> {};

TEST_P(SubLayerOrder, WeightGradientsMayBeDeferred) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const Case c{"order", small_config, dtype, 2, 9};
        const Results plain = run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1");
        EXPECT_EQ(run_layer(GetParam(), c, "F0 B0 F1 W0 B1 W1"), plain);
        EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 B1 W0 W1"), plain);
        EXPECT_EQ(run_layer(GetParam(), c, "F1 F0 B1 B0 W0 W1"), plain);
        EXPECT_EQ(run_layer(GetParam(), c, "F0 B0 W0 F1 B1 W1", testing::test_options(), 1), plain)
            << "one slot, replayed";
    }
}

TEST_P(SubLayerOrder, EveryLegalOrderGivesTheSameBits) {
    const Case c{"order", small_config, DType::F32, 2, 9};
    DeviceOptions options = testing::test_options();
    options.sync = SyncMode::Overlap;
    const Results overlap = run_layer(GetParam(), c, "F0 F1 B0 W0 B1 W1", options);
    options.sync = SyncMode::Serial;
    EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 W0 B1 W1", options), overlap);
    options.sync = SyncMode::Shuffle;
    for (options.shuffle_seed = 1; options.shuffle_seed <= 3; ++options.shuffle_seed)
        EXPECT_EQ(run_layer(GetParam(), c, "F0 F1 B0 W0 B1 W1", options), overlap);
}

std::string kind_name(const ::testing::TestParamInfo<Kind>& info) {
    return info.param == Kind::Attention ? "Attention" : "Ffn";
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

// ---- A dense model ------------------------------------------------------------------------------

std::vector<std::uint32_t> as_u32(const std::vector<std::int32_t>& values, std::size_t first,
                                  std::size_t count) {
    std::vector<std::uint32_t> out;
    for (std::size_t i = first; i < first + count; ++i)
        out.push_back(static_cast<std::uint32_t>(values[i])); // -1 becomes kIgnoreTarget
    return out;
}

/// One micro-batch's slots of all layers, joined.
struct ModelSlots {
    std::vector<TensorView> hidden, d_hidden; ///< [sub-layers + 1]
    TensorView tokens, targets, loss, logits;
    std::vector<std::unique_ptr<LayerSlot>> slots; ///< embedding, sub-layers, head
    std::unique_ptr<LayerSlot> logits_slot;

    void forward() {
        for (auto& slot : slots)
            submit(*slot, NodeKind::Forward);
        submit(*logits_slot, NodeKind::Forward);
    }
    void backward(NodeKind kind) {
        for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot)
            submit(**slot, kind);
    }
};

class DenseModel {
public:
    DenseModel(const Case& c, const DeviceOptions& options)
        : case_(c), rig(c, options), embedding_(rig.store, rig.scratch),
          head_(rig.config, rig.store, rig.scratch) {
        for (std::uint64_t layer = 0; layer < rig.config.layers; ++layer) {
            layers_.push_back(std::make_unique<MlaAttention>(rig.config, layer, rig.store,
                                                             rig.positions, rig.scratch));
            layers_.push_back(
                std::make_unique<DenseFfn>(rig.config, layer, rig.store, rig.scratch));
        }
    }

    /// The micro-batch m of `batch`.
    ModelSlots slots(const reference::Batch& batch, std::size_t m, float scale) {
        const std::size_t tokens = case_.tokens();
        ModelSlots s;
        for (std::size_t i = 0; i <= layers_.size(); ++i) {
            s.hidden.push_back(rig.make(tokens, rig.config.hidden));
            s.d_hidden.push_back(rig.make(tokens, rig.config.hidden));
        }
        s.tokens = rig.indices(as_u32(batch.tokens, m * tokens, tokens));
        s.targets = rig.indices(as_u32(batch.targets, m * tokens, tokens));
        losses.emplace_back(*rig.device,
                            BufferDesc{.name = "loss", .bytes = 8, .kind = MemoryKind::Readback});
        s.loss = losses.back().tensor(DType::F32, {2});
        rig.buffers.emplace_back(
            *rig.device, BufferDesc{.name = "logits", .bytes = tokens * rig.config.vocabulary * 4});
        s.logits = rig.buffers.back().tensor(DType::F32, {tokens, rig.config.vocabulary});
        s.slots.push_back(
            embedding_.create_slot({"embedding", s.tokens, s.hidden[0], s.d_hidden[0]}));
        for (std::size_t i = 0; i < layers_.size(); ++i)
            s.slots.push_back(layers_[i]->create_slot(
                {"sub-layer " + std::to_string(i),
                 tokens,
                 case_.seq,
                 {s.hidden[i], s.hidden[i + 1], s.d_hidden[i + 1], s.d_hidden[i]}}));
        s.slots.push_back(head_.create_slot(
            {"head", s.hidden.back(), s.d_hidden.back(), s.targets, s.loss, scale}));
        s.logits_slot = head_.create_logits_slot("logits", s.hidden.back(), s.logits);
        return s;
    }

private:
    const Case& case_;

public:
    Rig rig;
    std::vector<Buffer> losses;

private:
    Embedding embedding_;
    Head head_;
    std::vector<std::unique_ptr<Layer>> layers_;
};

/// Tokens repeat; two of the targets are ignored beside each sequence's last.
reference::Batch batch_for(const Case& c) {
    reference::Batch batch = test::random_batch(c.model(), kMicroBatches * c.batch, c.seq, 5);
    batch.tokens[1] = batch.tokens[2] = batch.tokens[0];
    batch.targets[0] = batch.targets[c.tokens()] = -1;
    return batch;
}

class WholeModel : public ::testing::TestWithParam<Case> {};

TEST_P(WholeModel, LossAndGradientsMatchTheReference) {
    const Case& c = GetParam();
    const reference::Batch batch = batch_for(c);
    const Parameters p = values_for(c.model(), c.dtype);
    const auto forward = reference::model_forward(c.model(), p, batch);
    const auto expected = reference::model_backward(c.model(), p, batch, forward);
    const auto targets = std::count_if(batch.targets.begin(), batch.targets.end(),
                                       [](std::int32_t target) { return target >= 0; });
    const Tolerance tolerance(c.dtype, 2 * c.model().layers);
    const float scale = 1 / static_cast<float>(targets);

    DenseModel model(c, testing::test_options());
    std::vector<ModelSlots> micro_batches;
    for (std::size_t m = 0; m < kMicroBatches; ++m)
        micro_batches.push_back(model.slots(batch, m, scale));
    for (ModelSlots& m : micro_batches)
        m.forward();
    for (ModelSlots& m : micro_batches)
        m.backward(NodeKind::InputGradient);
    for (ModelSlots& m : micro_batches)
        m.backward(NodeKind::WeightGradient);
    model.rig.device->wait_idle();

    double loss = 0;
    std::vector<float> logits, dx;
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        for (const float part : model.losses[m].mapped_as<float>())
            loss += static_cast<double>(part) / static_cast<double>(targets);
        for (const float value : model.rig.read(micro_batches[m].logits))
            logits.push_back(value);
        for (const float value : model.rig.read(micro_batches[m].d_hidden[0]))
            dx.push_back(value);
    }
    EXPECT_NEAR(loss, forward.loss, (c.dtype == DType::F32 ? 1e-6 : 2e-3) * forward.loss);
    expect_close(logits, forward.logits, tolerance, "logits");
    expect_close(dx, expected.dhidden[0], tolerance, "gradient of the embedded tokens");
    for (const Parameter& parameter : model.rig.store.all())
        expect_close(model.rig.store.download_gradient(parameter.info.name),
                     expected.parameters.at(parameter.info.name), tolerance, parameter.info.name);
}

INSTANTIATE_TEST_SUITE_P(Cases, WholeModel,
                         ::testing::Values(Case{"f32", small_config, DType::F32, 2, 9},
                                           Case{"tied_f32", wide_config, DType::F32, 1, 33, true},
                                           Case{"bf16", small_config, DType::BF16, 2, 9},
                                           Case{"tied_bf16", wide_config, DType::BF16, 1, 33,
                                                true}),
                         name_of);

} // namespace
} // namespace bellows
