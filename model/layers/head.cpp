// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/head.hpp>
#include <bellows/shape/vocabulary.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

struct Head::Impl {
    const ModelConfig config;
    ParameterStore& parameters;
    LayerScratch& scratch;
    const Parameter &gain, &matrix;
    bool of_module;

    /// What its declaration is called, and its nodes are with this letter.
    const char* kind() const { return of_module ? "mtp_head" : "head"; }
    std::string node(char letter) const {
        return std::string(of_module ? "MTP_" : "") + "HEAD(" + letter + ")";
    }

    float eps() const { return static_cast<float>(config.norm_eps); }
    std::uint64_t columns() const { return padded_vocabulary(config.vocabulary); }
    /// [columns(), hidden]: the matrix as layers read it, with its rows of zeros.
    TensorView padded_matrix() const {
        const std::uint64_t count = columns() * config.hidden;
        const TensorView f32 = parameters.f32_weights(matrix.first, count);
        return (f32.buffer ? f32 : parameters.bf16_runs(matrix.first, count).front().weights)
            .reshaped({columns(), config.hidden});
    }
    TensorView padded_gradient() const {
        const std::uint64_t first =
            matrix.info.both_ends ? matrix.head_gradient_first : matrix.first;
        return parameters.flat_gradients()
            .rows(first, columns() * config.hidden)
            .reshaped({columns(), config.hidden});
    }
};

namespace {

class HeadSlot final : public RecordedSlot {
public:
    HeadSlot(const Head::Impl& layer, const HeadSlotDesc& desc);

    const TensorView& normed() const noexcept { return norm_; }
    const TensorView& normed_gradient() const noexcept { return d_norm_; }

private:
    using Frame = Arena::Frame;

    void forward(Recording& r, Frame& scratch) const;
    void input_gradient(Recording& r, Frame& scratch) const;
    void weight_gradient(Recording& r, Frame& scratch) const;

    const Head::Impl& layer_;
    HeadSlotDesc t_;
    std::uint64_t tokens_;
    TensorView norm_, inv_rms_;
    TensorView d_logits_;
    TensorView d_norm_;
};

HeadSlot::HeadSlot(const Head::Impl& layer, const HeadSlotDesc& desc)
    : RecordedSlot(layer.kind(), layer.config,
                   slot_shape(layer.parameters, desc.x.extent[0], 1, /*training=*/true),
                   layer.parameters.device(), layer.scratch, desc.name),
      layer_(layer), t_(desc), tokens_(desc.x.extent[0]), norm_(tensor("norm")),
      inv_rms_(tensor("inverse rms")), d_logits_(tensor("logit gradient")),
      d_norm_(tensor("norm gradient")) {
    record(layer.node('F'), [&](Recording& r, Frame& scratch) { forward(r, scratch); });
    record(layer.node('B'), [&](Recording& r, Frame& scratch) { input_gradient(r, scratch); });
    record(layer.node('W'), [&](Recording& r, Frame& scratch) { weight_gradient(r, scratch); });
}

void HeadSlot::forward(Recording& r, Frame& scratch) const {
    ops::rmsnorm_forward(r, t_.x, layer_.gain.weight, norm_, inv_rms_, layer_.eps());
    const TensorView losses = scratch.tensor(DType::F32, {tokens_});
    const bool in_place = d_logits_.dtype == DType::F32;
    const std::uint64_t step = in_place ? tokens_ : std::min(tokens_, kLogitRows);
    const TensorView chunk =
        in_place ? d_logits_ : scratch.tensor(DType::F32, {step, layer_.columns()});
    for (std::uint64_t first = 0; first < tokens_; first += step) {
        const std::uint64_t rows = std::min(step, tokens_ - first);
        const TensorView padded = chunk.rows(0, rows),
                         logits = ops::slice(padded, 1, 0, layer_.config.vocabulary);
        ops::gemm_nt(r, norm_.rows(first, rows), layer_.padded_matrix(), padded);
        // What stands behind the vocabulary is zero and stays so.
        ops::cross_entropy(r, logits, t_.targets.rows(first, rows), losses.rows(first, rows),
                           logits, t_.scale, t_.factor);
        if (!in_place)
            ops::cast(r, padded, d_logits_.rows(first, rows));
    }
    ops::sum_pairs(r, losses, t_.loss, scratch.bytes(ops::sum_pairs_workspace_bytes(tokens_)));
}

void HeadSlot::input_gradient(Recording& r, Frame&) const {
    ops::gemm_nn(r, d_logits_, layer_.padded_matrix(), d_norm_, t_.module_behind);
    ops::rmsnorm_dgrad(r, d_norm_, t_.x, layer_.gain.weight, inv_rms_, t_.dx, false);
}

void HeadSlot::weight_gradient(Recording& r, Frame& scratch) const {
    ops::gemm_tn(r, d_logits_, norm_, layer_.padded_gradient(), true);
    ops::rmsnorm_wgrad(
        r, d_norm_, t_.x, inv_rms_, layer_.gain.gradient, true,
        scratch.bytes(ops::rmsnorm_wgrad_workspace_bytes(tokens_, layer_.config.hidden)));
}

class LogitsSlot final : public RecordedSlot {
public:
    LogitsSlot(const Head::Impl& layer, const std::string& name, const TensorView& x,
               const TensorView& logits)
        : RecordedSlot("head", layer.config,
                       slot_shape(layer.parameters, x.extent[0], 1, /*training=*/false),
                       layer.parameters.device(), layer.scratch, name) {
        record("HEAD(F)", [&](Recording& r, Arena::Frame& scratch) {
            const std::uint64_t rows = x.extent[0];
            const TensorView norm =
                scratch.tensor(layer.parameters.activation(), {rows, layer.config.hidden});
            const TensorView inv_rms = scratch.tensor(DType::F32, {rows});
            ops::rmsnorm_forward(r, x, layer.gain.weight, norm, inv_rms, layer.eps());
            ops::gemm_nt(r, norm, layer.matrix.compute, logits);
        });
    }
};

} // namespace

Head::Head(const ModelConfig& config, ParameterStore& parameters, LayerScratch& scratch,
           std::optional<std::uint64_t> module)
    : impl_(new Impl{
          config, parameters, scratch,
          parameters.at(module
                            ? "model.layers." + std::to_string(*module) + ".shared_head.norm.weight"
                            : "model.norm.weight"),
          parameters.at(config.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight"),
          module.has_value()}) {
}

Head::~Head() = default;

HeadSlotParts Head::create_slot(const HeadSlotDesc& desc) const {
    auto slot = std::make_unique<HeadSlot>(*impl_, desc);
    const TensorView normed = slot->normed(), gradient = slot->normed_gradient();
    return {std::move(slot), normed, gradient};
}

std::unique_ptr<LayerSlot> Head::create_logits_slot(const std::string& name, const TensorView& x,
                                                    const TensorView& logits) const {
    return std::make_unique<LogitsSlot>(*impl_, name, x, logits);
}

} // namespace bellows
