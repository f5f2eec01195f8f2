// SPDX-License-Identifier: MIT
// A dense model made of embedding, attention, FFN and head: loss, logits and all gradients of two
// micro-batches against the f64 reference.

#include "support/layer_rig.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/model/dense_ffn.hpp>
#include <bellows/model/embedding.hpp>
#include <bellows/model/head.hpp>

namespace bellows {
namespace {

using namespace testing;
using reference::Parameters;
using reference::Vector;

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
            layers_.push_back(make_attention(rig, layer));
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
        s.slots.push_back(
            head_
                .create_slot({"head", s.hidden.back(), s.d_hidden.back(), s.targets, s.loss, scale})
                .slot);
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

/// Loss, logits and every gradient of two micro-batches.
void expect_reference(const Case& c, const DeviceOptions& options) {
    const reference::Batch batch = batch_for(c);
    const Parameters p = values_for(c.model(), c.dtype);
    const auto forward = reference::model_forward(c.model(), p, batch);
    const auto expected = reference::model_backward(c.model(), p, batch, forward);
    const auto targets = std::count_if(batch.targets.begin(), batch.targets.end(),
                                       [](std::int32_t target) { return target >= 0; });
    const Tolerance tolerance(c.dtype, 2 * c.model().layers);
    const float scale = 1 / static_cast<float>(targets);

    DenseModel model(c, options);
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

class WholeModel : public ::testing::TestWithParam<Case> {};

TEST_P(WholeModel, LossAndGradientsMatchTheReference) {
    expect_reference(GetParam(), testing::test_options());
}

TEST(WholeModelByClass, EveryNumericClassOfTheDeviceMatchesTheReference) {
    const Case c{"tied_bf16", wide_config, DType::BF16, 1, 33, true};
    for (const GemmClass& numerics : gemm_classes(*testing::make_device())) {
        if (!numerics.why_not.empty())
            continue;
        SCOPED_TRACE(numerics.name);
        DeviceOptions options = testing::test_options();
        options.gemm_class = numerics.name;
        expect_reference(c, options);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, WholeModel,
    ::testing::Values(Case{"f32", small_config, DType::F32, 2, 9},
                      Case{"tied_f32", wide_config, DType::F32, 1, 33, true},
                      Case{"stretched_f32", stretched_config, DType::F32, 2, 9},
                      Case{"grouped_f32", grouped_config, DType::F32, 2, 9},
                      Case{"grouped_tied_f32", wide_grouped_config, DType::F32, 1, 33, true},
                      Case{"grouped_bf16", grouped_config, DType::BF16, 2, 9},
                      Case{"bf16", small_config, DType::BF16, 2, 9},
                      Case{"tied_bf16", wide_config, DType::BF16, 1, 33, true}),
    name_of);

} // namespace
} // namespace bellows
