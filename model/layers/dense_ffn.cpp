// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/model/dense_ffn.hpp>

namespace bellows {

struct DenseFfn::Impl {
    const ModelConfig config;
    ParameterStore& parameters;
    LayerScratch& scratch;
    const Parameter& gain;
    Linear gate_up, down;
};

namespace {

class DenseSlot final : public RecordedSlot {
public:
    DenseSlot(const DenseFfn::Impl& layer, const SlotDesc& desc);

private:
    void forward(Recording& r, Arena::Frame& scratch) const;
    void input_gradient(Recording& r, Arena::Frame& scratch) const;
    void weight_gradient(Recording& r, Arena::Frame& scratch) const;

    float eps() const { return static_cast<float>(layer_.config.norm_eps); }

    const DenseFfn::Impl& layer_;
    std::uint64_t tokens_;
    LayerTensors t_;
    LinearRows norm_;
    TensorView inv_rms_;
    KeptSwiglu swiglu_;
    TensorView d_norm_;
};

DenseSlot::DenseSlot(const DenseFfn::Impl& layer, const SlotDesc& desc)
    : RecordedSlot("dense_ffn", layer.config, slot_shape(layer.parameters, desc),
                   layer.parameters.device(), layer.scratch, desc.name),
      layer_(layer), tokens_(desc.tokens), t_(desc.tensors), norm_(rows("norm")),
      inv_rms_(tensor("inverse rms")), swiglu_(swiglu("")) {
    record("FFN(F)", [&](Recording& r, Arena::Frame& scratch) { forward(r, scratch); });
    if (!t_.training())
        return;
    d_norm_ = tensor("norm gradient");
    record("FFN(B)", [&](Recording& r, Arena::Frame& scratch) { input_gradient(r, scratch); });
    record("FFN(W)", [&](Recording& r, Arena::Frame& scratch) { weight_gradient(r, scratch); });
}

void DenseSlot::forward(Recording& r, Arena::Frame& scratch) const {
    normalise(r, t_.x, layer_.gain.weight, norm_, inv_rms_, eps());
    const TensorView gate_up = swiglu_.input(scratch);
    layer_.gate_up.forward(r, scratch, norm_, gate_up);
    const LinearRows inner = swiglu_.forward(r, scratch, gate_up, {});
    ops::copy(r, t_.x, t_.y);
    layer_.down.forward(r, scratch, inner, t_.y, true);
}

void DenseSlot::input_gradient(Recording& r, Arena::Frame& scratch) const {
    const TensorView d_inner = scratch.tensor(d_norm_.dtype, {tokens_, layer_.config.dense_ffn});
    layer_.down.input_gradient(r, scratch, t_.dy, d_inner);
    const LinearRows d_gate_up = swiglu_.input_gradient(r, scratch, d_inner, {}, {});
    layer_.gate_up.input_gradient(r, scratch, d_gate_up, d_norm_);
    ops::copy(r, t_.dy, t_.dx);
    ops::rmsnorm_dgrad(r, d_norm_, t_.x, layer_.gain.weight, inv_rms_, t_.dx, true);
}

void DenseSlot::weight_gradient(Recording& r, Arena::Frame& scratch) const {
    layer_.down.weight_gradient(r, scratch, t_.dy, swiglu_.output_again(r, scratch, {}));
    layer_.gate_up.weight_gradient(r, scratch, swiglu_.gradient_again(), norm_);
    ops::rmsnorm_wgrad(
        r, d_norm_, t_.x, inv_rms_, layer_.gain.gradient, true,
        scratch.bytes(ops::rmsnorm_wgrad_workspace_bytes(tokens_, layer_.config.hidden)));
}

} // namespace

DenseFfn::DenseFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
                   LayerScratch& scratch) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    impl_.reset(new Impl{
        config, parameters, scratch, parameters.at(prefix + "post_attention_layernorm.weight"),
        Linear(parameters.at(prefix + "mlp.gate_up_proj.weight"), parameters.products()),
        Linear(parameters.at(prefix + "mlp.down_proj.weight"), parameters.products())});
}

DenseFfn::~DenseFfn() = default;

std::unique_ptr<LayerSlot> DenseFfn::create_slot(const SlotDesc& desc) {
    return std::make_unique<DenseSlot>(*impl_, desc);
}

} // namespace bellows
