// SPDX-License-Identifier: MIT
#include "attention_parts.hpp"
#include "recorded_slot.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/gqa.hpp>

namespace bellows {

struct GqaAttention::Impl : AttentionParts {
    using AttentionParts::AttentionParts;
};

namespace {

/// The queries of a slot, or its keys.
struct Heads {
    const char* projection;
    const char* norm;
    TensorView in{}; ///< [tokens, heads, head_dim] as projected; without norms rotated in place
    TensorView rotated{}; ///< what attention takes
    TensorView inv_rms{}; ///< with norms
    // From ATTN(B) on. Without norms and in f32 or bf16 `in` holds its own gradient.
    TensorView d_norm{}; ///< with norms: gradient of their results
    TensorView d_in{};   ///< with norms, in f32 or bf16
    LinearRows d{};      ///< of `in`; in FP8 set anew by each node that needs it
};

class GqaSlot final : public RecordedSlot {
public:
    GqaSlot(const GqaAttention::Impl& layer, const SlotDesc& desc);

private:
    using Frame = Arena::Frame;

    void keep_gradients();
    void forward(Recording& r, Frame& scratch);
    void place_heads(Frame& scratch);
    void project(Recording& r, Frame& scratch) const;
    void rotate(Recording& r, const Heads& heads) const;
    void input_gradient(Recording& r, Frame& scratch);
    void heads_gradient(Recording& r, Frame& scratch, Heads& heads, const TensorView& d) const;
    void values_gradient(Recording& r, Frame& scratch, const TensorView& d);
    void weight_gradient(Recording& r, Frame& scratch) const;

    /// Whether q, k and v live within a node, and ATTN(B) computes them again.
    bool recomputes() const { return fp8() && !c_.qk_norm; }
    TensorView make_heads(Frame& scratch, std::uint64_t count) const {
        return scratch.tensor(act_, {tokens_, count, c_.head_dim});
    }
    TensorView flat(const TensorView& heads) const {
        return heads.reshaped({tokens_, heads.extent[1] * c_.head_dim});
    }
    /// Each head is a row.
    TensorView by_head(const TensorView& heads) const {
        return heads.reshaped({tokens_ * heads.extent[1], c_.head_dim});
    }
    ops::AttentionOptions attention_options() const {
        return {seq_, static_cast<float>(c_.attention_scale()), t_.documents};
    }
    float eps() const { return static_cast<float>(c_.norm_eps); }

    const GqaAttention::Impl& layer_;
    const ModelConfig& c_;
    DType act_;
    std::uint64_t tokens_, seq_;
    LayerTensors t_;
    LinearRows norm_;
    TensorView inv_rms_;
    Heads q_{.projection = "q_proj", .norm = "q_norm"},
        k_{.projection = "k_proj", .norm = "k_norm"};
    TensorView v_; ///< [tokens, kv_heads, head_dim]; after ATTN(B) its gradient, but in FP8
    TensorView o_; ///< [tokens, heads, head_dim]
    TensorView lse_;
    TensorView d_norm_; ///< kept from ATTN(B)
    LinearRows d_v_;    ///< as Heads::d
};

GqaSlot::GqaSlot(const GqaAttention::Impl& layer, const SlotDesc& desc)
    : RecordedSlot("gqa", layer.config, slot_shape(layer.parameters, desc),
                   layer.parameters.device(), layer.scratch, desc.name),
      layer_(layer), c_(layer.config), act_(layer.parameters.activation()), tokens_(desc.tokens),
      seq_(desc.seq), t_(desc.tensors) {
    norm_ = rows("norm");
    inv_rms_ = tensor("inverse rms");
    if (!recomputes()) {
        q_.in = tensor("queries");
        k_.in = tensor("keys");
        v_ = tensor("values");
    }
    if (c_.qk_norm) {
        q_.inv_rms = tensor("query inverse rms");
        k_.inv_rms = tensor("key inverse rms");
    }
    o_ = tensor("attention");
    lse_ = tensor("attention log-sum");
    record("ATTN(F)", [&](Recording& r, Frame& scratch) { forward(r, scratch); });
    if (!t_.training())
        return;
    keep_gradients();
    record("ATTN(B)", [&](Recording& r, Frame& scratch) { input_gradient(r, scratch); });
    record("ATTN(W)", [&](Recording& r, Frame& scratch) { weight_gradient(r, scratch); });
}

void GqaSlot::keep_gradients() {
    d_norm_ = tensor("norm gradient");
    if (c_.qk_norm) {
        q_.d_norm = tensor("query norm gradient");
        k_.d_norm = tensor("key norm gradient");
    }
    if (fp8()) {
        q_.d.columns = codes("query gradient");
        k_.d.columns = codes("key gradient");
        d_v_.columns = codes("value gradient");
        return;
    }
    if (c_.qk_norm) {
        q_.d_in = tensor("query gradient");
        k_.d_in = tensor("key gradient");
    }
    q_.d = flat(c_.qk_norm ? q_.d_in : q_.in);
    k_.d = flat(c_.qk_norm ? k_.d_in : k_.in);
    d_v_ = flat(v_);
}

/// What a node has in its scratch.
void GqaSlot::place_heads(Frame& scratch) {
    if (recomputes()) {
        q_.in = make_heads(scratch, c_.heads);
        k_.in = make_heads(scratch, c_.kv_heads);
        v_ = make_heads(scratch, c_.kv_heads);
    }
    q_.rotated = c_.qk_norm ? make_heads(scratch, c_.heads) : q_.in;
    k_.rotated = c_.qk_norm ? make_heads(scratch, c_.kv_heads) : k_.in;
}

void GqaSlot::project(Recording& r, Frame& scratch) const {
    layer_.linear("q_proj").forward(r, scratch, norm_, flat(q_.in));
    layer_.linear("k_proj").forward(r, scratch, norm_, flat(k_.in));
    layer_.linear("v_proj").forward(r, scratch, norm_, flat(v_));
}

void GqaSlot::rotate(Recording& r, const Heads& heads) const {
    if (c_.qk_norm)
        ops::rmsnorm_forward(r, by_head(heads.in), layer_.projection(heads.norm).weight,
                             by_head(heads.rotated), heads.inv_rms, eps());
    ops::rope_forward(r, heads.rotated, layer_.positions, heads.rotated, seq_);
}

void GqaSlot::forward(Recording& r, Frame& scratch) {
    place_heads(scratch);
    normalise(r, t_.x, layer_.parameter("input_layernorm.weight").weight, norm_, inv_rms_, eps());
    project(r, scratch);
    rotate(r, q_);
    rotate(r, k_);
    ops::attention_forward(r, q_.rotated, k_.rotated, v_, o_, lse_, attention_options());
    ops::copy(r, t_.x, t_.y);
    layer_.linear("o_proj").forward(r, scratch, flat(o_), t_.y, true);
}

void GqaSlot::input_gradient(Recording& r, Frame& scratch) {
    place_heads(scratch);
    if (recomputes())
        project(r, scratch);
    if (recomputes() || c_.qk_norm) {
        rotate(r, q_);
        rotate(r, k_);
    }
    const TensorView d_o = make_heads(scratch, c_.heads);
    const ops::AttentionGradients d{.dq = make_heads(scratch, c_.heads),
                                    .dk = make_heads(scratch, c_.kv_heads),
                                    .dv = make_heads(scratch, c_.kv_heads)};
    layer_.linear("o_proj").input_gradient(r, scratch, t_.dy, flat(d_o));
    ops::attention_dgrad(r, d_o, q_.rotated, k_.rotated, v_, o_, lse_, d, attention_options(),
                         scratch.bytes(ops::attention_dgrad_workspace_bytes(tokens_, c_.heads)));
    heads_gradient(r, scratch, q_, d.dq);
    heads_gradient(r, scratch, k_, d.dk);
    values_gradient(r, scratch, d.dv);
    layer_.linear("q_proj").input_gradient(r, scratch, q_.d, d_norm_);
    layer_.linear("k_proj").input_gradient(r, scratch, k_.d, d_norm_, true);
    layer_.linear("v_proj").input_gradient(r, scratch, d_v_, d_norm_, true);
    ops::copy(r, t_.dy, t_.dx);
    ops::rmsnorm_dgrad(r, d_norm_, t_.x, layer_.parameter("input_layernorm.weight").weight,
                       inv_rms_, t_.dx, true);
}

/// d: gradient of heads.rotated, used up.
void GqaSlot::heads_gradient(Recording& r, Frame& scratch, Heads& heads,
                             const TensorView& d) const {
    TensorView d_in = heads.in;
    if (c_.qk_norm) {
        d_in = fp8() ? d : heads.d_in;
        ops::rope_dgrad(r, d, layer_.positions, heads.d_norm, seq_);
        ops::rmsnorm_dgrad(r, by_head(heads.d_norm), by_head(heads.in),
                           layer_.projection(heads.norm).weight, heads.inv_rms, by_head(d_in),
                           false);
    } else {
        ops::rope_dgrad(r, d, layer_.positions, d_in, seq_);
    }
    if (fp8())
        heads.d = quantise_gradient(r, scratch, flat(d_in), *heads.d.columns->quantized);
}

void GqaSlot::values_gradient(Recording& r, Frame& scratch, const TensorView& d) {
    if (fp8())
        d_v_ = quantise_gradient(r, scratch, flat(d), *d_v_.columns->quantized);
    else
        ops::copy(r, d, v_);
}

void GqaSlot::weight_gradient(Recording& r, Frame& scratch) const {
    const LinearRows norm = with_columns(r, scratch, norm_, layer_.parameters.products());
    layer_.linear("o_proj").weight_gradient(r, scratch, t_.dy, flat(o_));
    for (const Heads* heads : {&q_, &k_}) {
        layer_.linear(heads->projection).weight_gradient(r, scratch, heads->d, norm);
        if (c_.qk_norm)
            gain_gradient(r, scratch, by_head(heads->d_norm), by_head(heads->in), heads->inv_rms,
                          layer_.projection(heads->norm));
    }
    layer_.linear("v_proj").weight_gradient(r, scratch, d_v_, norm);
    gain_gradient(r, scratch, d_norm_, t_.x, inv_rms_, layer_.parameter("input_layernorm.weight"));
}

} // namespace

GqaAttention::GqaAttention(const ModelConfig& config, std::uint64_t layer,
                           ParameterStore& parameters, const RopeTable& positions,
                           LayerScratch& scratch)
    : impl_(new Impl(config, layer, parameters, positions, scratch)) {
}

GqaAttention::~GqaAttention() = default;

std::unique_ptr<LayerSlot> GqaAttention::create_slot(const SlotDesc& desc) {
    return std::make_unique<GqaSlot>(*impl_, desc);
}

} // namespace bellows
