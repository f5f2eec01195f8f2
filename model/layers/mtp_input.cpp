// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/mtp_input.hpp>

namespace bellows {

struct MtpInput::Impl {
    const ModelConfig config;
    ParameterStore& parameters;
    LayerScratch& scratch;
    const Parameter &table, &embedding_gain, &state_gain, &projection;

    float eps() const { return static_cast<float>(config.norm_eps); }
    /// Where a rank has both ends of the model, the last end's gradient stands apart.
    const TensorView& table_gradient() const {
        return table.info.both_ends ? table.head_gradient : table.gradient;
    }
};

namespace {

class MtpInputSlot final : public RecordedSlot {
public:
    MtpInputSlot(const MtpInput::Impl& layer, const MtpInputSlotDesc& desc);

private:
    using Frame = Arena::Frame;

    void forward(Recording& r, Frame& scratch) const;
    void input_gradient(Recording& r, Frame& scratch) const;
    void weight_gradient(Recording& r, Frame& scratch) const;

    TensorView embedding_of(const TensorView& both) const {
        return ops::slice(both, 1, 0, layer_.config.hidden);
    }
    TensorView state_of(const TensorView& both) const {
        return ops::slice(both, 1, layer_.config.hidden, layer_.config.hidden);
    }
    TensorView embeddings(Recording& r, Frame& scratch) const {
        const TensorView rows = rows_in(scratch);
        ops::embedding_forward(r, tokens_, layer_.table.compute, rows);
        return rows;
    }
    TensorView rows_in(Frame& scratch) const {
        return scratch.tensor(t_.x.dtype, {t_.x.extent[0], layer_.config.hidden});
    }

    const MtpInput::Impl& layer_;
    TensorView tokens_;
    LayerTensors t_;
    TensorView both_, d_both_; ///< [tokens, embedding | state]
    TensorView embedding_inv_rms_, state_inv_rms_;
};

MtpInputSlot::MtpInputSlot(const MtpInput::Impl& layer, const MtpInputSlotDesc& desc)
    : RecordedSlot("mtp_input", layer.config,
                   slot_shape(layer.parameters, desc.tokens.extent[0], 1, /*training=*/true),
                   layer.parameters.device(), layer.scratch, desc.name),
      layer_(layer), tokens_(desc.tokens), t_(desc.tensors), both_(tensor("embedding and state")),
      d_both_(tensor("embedding and state gradient")),
      embedding_inv_rms_(tensor("embedding inverse rms")),
      state_inv_rms_(tensor("state inverse rms")) {
    record("MTP_IN(F)", [&](Recording& r, Frame& scratch) { forward(r, scratch); });
    record("MTP_IN(B)", [&](Recording& r, Frame& scratch) { input_gradient(r, scratch); });
    record("MTP_IN(W)", [&](Recording& r, Frame& scratch) { weight_gradient(r, scratch); });
}

void MtpInputSlot::forward(Recording& r, Frame& scratch) const {
    ops::rmsnorm_forward(r, embeddings(r, scratch), layer_.embedding_gain.weight,
                         embedding_of(both_), embedding_inv_rms_, layer_.eps());
    ops::rmsnorm_forward(r, t_.x, layer_.state_gain.weight, state_of(both_), state_inv_rms_,
                         layer_.eps());
    ops::gemm_nt(r, both_, layer_.projection.compute, t_.y);
}

void MtpInputSlot::input_gradient(Recording& r, Frame&) const {
    ops::gemm_nn(r, t_.dy, layer_.projection.compute, d_both_);
    ops::rmsnorm_dgrad(r, state_of(d_both_), t_.x, layer_.state_gain.weight, state_inv_rms_, t_.dx,
                       false);
}

void MtpInputSlot::weight_gradient(Recording& r, Frame& scratch) const {
    const std::uint64_t rows = t_.x.extent[0], hidden = layer_.config.hidden;
    const auto workspace = [&] {
        return scratch.bytes(ops::rmsnorm_wgrad_workspace_bytes(rows, hidden));
    };
    ops::gemm_tn(r, t_.dy, both_, layer_.projection.gradient, true);
    ops::rmsnorm_wgrad(r, state_of(d_both_), t_.x, state_inv_rms_, layer_.state_gain.gradient, true,
                       workspace());
    const TensorView embedding = embeddings(r, scratch), d_embedding = rows_in(scratch);
    ops::rmsnorm_wgrad(r, embedding_of(d_both_), embedding, embedding_inv_rms_,
                       layer_.embedding_gain.gradient, true, workspace());
    ops::rmsnorm_dgrad(r, embedding_of(d_both_), embedding, layer_.embedding_gain.weight,
                       embedding_inv_rms_, d_embedding, false);
    ops::embedding_wgrad(r, tokens_, d_embedding, layer_.table_gradient(), true,
                         scratch.bytes(ops::embedding_wgrad_workspace_bytes(rows)));
}

} // namespace

MtpInput::MtpInput(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
                   LayerScratch& scratch) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    impl_.reset(new Impl{config, parameters, scratch, parameters.at("model.embed_tokens.weight"),
                         parameters.at(prefix + "enorm.weight"),
                         parameters.at(prefix + "hnorm.weight"),
                         parameters.at(prefix + "eh_proj.weight")});
}

MtpInput::~MtpInput() = default;

std::unique_ptr<LayerSlot> MtpInput::create_slot(const MtpInputSlotDesc& desc) const {
    return std::make_unique<MtpInputSlot>(*impl_, desc);
}

} // namespace bellows
