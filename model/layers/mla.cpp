// SPDX-License-Identifier: MIT
#include "attention_parts.hpp"
#include "recorded_slot.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/mla.hpp>

#include <string>

namespace bellows {

struct MlaAttention::Impl : AttentionParts {
    using AttentionParts::AttentionParts;

    bool low_rank_queries() const noexcept { return config.q_lora_rank > 0; }
};

namespace {

class MlaSlot final : public RecordedSlot {
public:
    MlaSlot(const MlaAttention::Impl& layer, const SlotDesc& desc);

private:
    using Frame = Arena::Frame;

    void forward(Recording& r, Frame& scratch);
    void place_heads(Frame& scratch);
    void queries(Recording& r, Frame& scratch) const;
    void up_queries(Recording& r, Frame& scratch) const;
    void keys_and_values(Recording& r, Frame& scratch) const;
    void up_keys_and_values(Recording& r, Frame& scratch) const;
    void input_gradient(Recording& r, Frame& scratch);
    void attention_gradient(Recording& r, Frame& scratch) const;
    void keys_and_values_gradient(Recording& r, Frame& scratch) const;
    void queries_gradient(Recording& r, Frame& scratch) const;
    void weight_gradient(Recording& r, Frame& scratch) const;

    /// The part of every head without position, and the rotated one.
    TensorView nope(const TensorView& heads) const {
        return ops::slice(heads, 2, 0, c_.qk_nope_head_dim);
    }
    TensorView rope(const TensorView& heads) const {
        return ops::slice(heads, 2, c_.qk_nope_head_dim, c_.qk_rope_head_dim);
    }
    TensorView values() const { return ops::slice(kv_up_, 2, c_.qk_nope_head_dim, c_.v_head_dim); }
    /// The latent's columns of a [tokens, kv_lora_rank + rope] tensor, and the shared key part's.
    TensorView latent(const TensorView& kv) const { return ops::slice(kv, 1, 0, c_.kv_lora_rank); }
    TensorView key_rope(const TensorView& kv) const {
        return ops::slice(kv, 1, c_.kv_lora_rank, c_.qk_rope_head_dim);
    }
    TensorView flat(const TensorView& heads) const {
        return heads.reshaped({tokens_, heads.extent[1] * heads.extent[2]});
    }
    ops::AttentionOptions attention_options() const {
        return {seq_, static_cast<float>(c_.attention_scale()), t_.documents};
    }
    float eps() const { return static_cast<float>(c_.norm_eps); }
    float latent_eps() const { return static_cast<float>(c_.latent_eps()); }

    const MlaAttention::Impl& layer_;
    const ModelConfig& c_;
    DType act_;
    std::uint64_t tokens_, seq_;
    LayerTensors t_;
    // Kept from ATTN(F). From ATTN(B) on, q_ and kv_up_ hold their own gradients. In FP8 both live
    // within a node: ATTN(B) computes them again from the latents' norms.
    LinearRows norm_, q_norm_, kv_norm_; ///< queries': if they are low-rank
    TensorView inv_rms_, q_inv_rms_, kv_inv_rms_;
    TensorView q_latent_; ///< low-rank queries only
    TensorView q_;        ///< [tokens, heads, nope | rope], rotated
    TensorView kv_;       ///< [tokens, latent | key rope], the latter rotated
    TensorView kv_up_;    ///< [tokens, heads, nope | value]
    TensorView o_;        ///< [tokens, heads, value]
    TensorView lse_;
    // Kept from ATTN(B).
    TensorView d_norm_, d_q_latent_, d_q_norm_, d_kv_, d_kv_norm_;
    LinearRows d_q_, d_kv_up_; ///< in FP8 set anew by each node that needs them
};

SlotShape shape_of(const MlaAttention::Impl& layer, const SlotDesc& desc) {
    SlotShape shape = slot_shape(layer.parameters, desc);
    shape.kv_up_in_fp8 = layer.projection("kv_b_proj").quantized.has_value();
    return shape;
}

MlaSlot::MlaSlot(const MlaAttention::Impl& layer, const SlotDesc& desc)
    : RecordedSlot("mla", layer.config, shape_of(layer, desc), layer.parameters.device(),
                   layer.scratch, desc.name),
      layer_(layer), c_(layer.config), act_(layer.parameters.activation()), tokens_(desc.tokens),
      seq_(desc.seq), t_(desc.tensors) {
    norm_ = rows("norm");
    inv_rms_ = tensor("inverse rms");
    if (layer_.low_rank_queries()) {
        q_latent_ = tensor("query latent");
        q_norm_ = rows("query norm");
        q_inv_rms_ = tensor("query inverse rms");
    }
    kv_ = tensor("key-value latent");
    kv_norm_ = rows("key-value norm");
    kv_inv_rms_ = tensor("key-value inverse rms");
    if (!fp8()) {
        q_ = tensor("queries");
        kv_up_ = tensor("keys and values");
    }
    o_ = tensor("attention");
    lse_ = tensor("attention log-sum");

    record("ATTN(F)", [&](Recording& r, Frame& scratch) { forward(r, scratch); });
    if (!t_.training())
        return;
    d_norm_ = tensor("norm gradient");
    if (layer_.low_rank_queries()) {
        d_q_latent_ = tensor("query latent gradient");
        d_q_norm_ = tensor("query norm gradient");
    }
    d_kv_ = tensor("key-value latent gradient");
    d_kv_norm_ = tensor("key-value norm gradient");
    if (fp8()) {
        d_q_.columns = codes("query gradient");
        d_kv_up_.columns = codes("key and value gradient");
    } else {
        d_q_ = flat(q_);
        d_kv_up_ = flat(kv_up_);
    }
    record("ATTN(B)", [&](Recording& r, Frame& scratch) { input_gradient(r, scratch); });
    record("ATTN(W)", [&](Recording& r, Frame& scratch) { weight_gradient(r, scratch); });
}

/// The queries, keys and values of a node where they are not kept.
void MlaSlot::place_heads(Frame& scratch) {
    if (!fp8())
        return;
    q_ = scratch.tensor(act_, {tokens_, c_.heads, c_.qk_head_dim()});
    kv_up_ = scratch.tensor(act_, {tokens_, c_.heads, c_.qk_nope_head_dim + c_.v_head_dim});
}

void MlaSlot::forward(Recording& r, Frame& scratch) {
    place_heads(scratch);
    normalise(r, t_.x, layer_.parameter("input_layernorm.weight").weight, norm_, inv_rms_, eps());
    queries(r, scratch);
    keys_and_values(r, scratch);
    // Gathered for the kernel and again in ATTN(B): a copy is cheaper than to keep them till then.
    const TensorView keys = scratch.tensor(act_, {tokens_, c_.heads, c_.qk_head_dim()});
    ops::mla_keys_forward(r, kv_up_, key_rope(kv_), keys);
    ops::attention_forward(r, q_, keys, values(), o_, lse_, attention_options());
    ops::copy(r, t_.x, t_.y);
    layer_.linear("o_proj").forward(r, scratch, flat(o_), t_.y, true);
}

void MlaSlot::queries(Recording& r, Frame& scratch) const {
    if (layer_.low_rank_queries()) {
        layer_.linear("q_a_proj").forward(r, scratch, norm_, q_latent_);
        normalise(r, q_latent_, layer_.projection("q_a_layernorm").weight, q_norm_, q_inv_rms_,
                  latent_eps());
    }
    up_queries(r, scratch);
}

void MlaSlot::up_queries(Recording& r, Frame& scratch) const {
    if (layer_.low_rank_queries())
        layer_.linear("q_b_proj").forward(r, scratch, q_norm_, flat(q_));
    else
        layer_.linear("q_proj").forward(r, scratch, norm_, flat(q_));
    ops::rope_forward(r, rope(q_), layer_.positions, rope(q_), seq_);
}

void MlaSlot::keys_and_values(Recording& r, Frame& scratch) const {
    layer_.linear("kv_a_proj_with_mqa").forward(r, scratch, norm_, kv_);
    ops::rope_forward(r, key_rope(kv_), layer_.positions, key_rope(kv_), seq_);
    normalise(r, latent(kv_), layer_.projection("kv_a_layernorm").weight, kv_norm_, kv_inv_rms_,
              latent_eps());
    up_keys_and_values(r, scratch);
}

void MlaSlot::up_keys_and_values(Recording& r, Frame& scratch) const {
    layer_.linear("kv_b_proj").forward(r, scratch, kv_norm_, flat(kv_up_));
}

void MlaSlot::input_gradient(Recording& r, Frame& scratch) {
    place_heads(scratch);
    if (fp8()) {
        up_queries(r, scratch);
        up_keys_and_values(r, scratch);
    }
    attention_gradient(r, scratch);
    if (fp8()) {
        d_q_ = quantise_gradient(r, scratch, flat(q_), *d_q_.columns->quantized);
        d_kv_up_ = quantise_gradient(r, scratch, flat(kv_up_), *d_kv_up_.columns->quantized);
    }
    queries_gradient(r, scratch);
    keys_and_values_gradient(r, scratch);
    ops::copy(r, t_.dy, t_.dx);
    ops::rmsnorm_dgrad(r, d_norm_, t_.x, layer_.parameter("input_layernorm.weight").weight,
                       inv_rms_, t_.dx, true);
}

/// Leaves the gradients of q_ and kv_up_ in their places, that of the rotated key part in d_kv_.
void MlaSlot::attention_gradient(Recording& r, Frame& scratch) const {
    const std::uint64_t qk = c_.qk_head_dim();
    const TensorView d_o = scratch.tensor(act_, {tokens_, c_.heads, c_.v_head_dim});
    const TensorView keys = scratch.tensor(act_, {tokens_, c_.heads, qk});
    const ops::AttentionGradients d{.dq = scratch.tensor(act_, {tokens_, c_.heads, qk}),
                                    .dk = scratch.tensor(act_, {tokens_, c_.heads, qk}),
                                    .dv = scratch.tensor(act_, {tokens_, c_.heads, c_.v_head_dim})};
    layer_.linear("o_proj").input_gradient(r, scratch, t_.dy, flat(d_o));
    ops::mla_keys_forward(r, kv_up_, key_rope(kv_), keys);
    ops::attention_dgrad(r, d_o, q_, keys, values(), o_, lse_, d, attention_options(),
                         scratch.bytes(ops::attention_dgrad_workspace_bytes(tokens_, c_.heads)));
    ops::copy(r, nope(d.dq), nope(q_));
    ops::rope_dgrad(r, rope(d.dq), layer_.positions, rope(q_), seq_);
    ops::copy(r, d.dv, values());
    ops::mla_keys_dgrad(r, d.dk, kv_up_, key_rope(d_kv_));
    ops::rope_dgrad(r, key_rope(d_kv_), layer_.positions, key_rope(d_kv_), seq_);
}

void MlaSlot::queries_gradient(Recording& r, Frame& scratch) const {
    if (!layer_.low_rank_queries()) {
        layer_.linear("q_proj").input_gradient(r, scratch, d_q_, d_norm_);
        return;
    }
    layer_.linear("q_b_proj").input_gradient(r, scratch, d_q_, d_q_norm_);
    ops::rmsnorm_dgrad(r, d_q_norm_, q_latent_, layer_.projection("q_a_layernorm").weight,
                       q_inv_rms_, d_q_latent_, false);
    layer_.linear("q_a_proj").input_gradient(r, scratch, d_q_latent_, d_norm_);
}

void MlaSlot::keys_and_values_gradient(Recording& r, Frame& scratch) const {
    layer_.linear("kv_b_proj").input_gradient(r, scratch, d_kv_up_, d_kv_norm_);
    ops::rmsnorm_dgrad(r, d_kv_norm_, latent(kv_), layer_.projection("kv_a_layernorm").weight,
                       kv_inv_rms_, latent(d_kv_), false);
    layer_.linear("kv_a_proj_with_mqa").input_gradient(r, scratch, d_kv_, d_norm_, true);
}

void MlaSlot::weight_gradient(Recording& r, Frame& scratch) const {
    const LinearRows norm = // of both latents' weights
        with_columns(r, scratch, norm_, layer_.parameters.products());
    layer_.linear("o_proj").weight_gradient(r, scratch, t_.dy, flat(o_));
    layer_.linear("kv_b_proj").weight_gradient(r, scratch, d_kv_up_, kv_norm_);
    layer_.linear("kv_a_proj_with_mqa").weight_gradient(r, scratch, d_kv_, norm);
    gain_gradient(r, scratch, d_kv_norm_, latent(kv_), kv_inv_rms_,
                  layer_.projection("kv_a_layernorm"));
    if (layer_.low_rank_queries()) {
        layer_.linear("q_b_proj").weight_gradient(r, scratch, d_q_, q_norm_);
        layer_.linear("q_a_proj").weight_gradient(r, scratch, d_q_latent_, norm);
        gain_gradient(r, scratch, d_q_norm_, q_latent_, q_inv_rms_,
                      layer_.projection("q_a_layernorm"));
    } else {
        layer_.linear("q_proj").weight_gradient(r, scratch, d_q_, norm);
    }
    gain_gradient(r, scratch, d_norm_, t_.x, inv_rms_, layer_.parameter("input_layernorm.weight"));
}

} // namespace

MlaAttention::MlaAttention(const ModelConfig& config, std::uint64_t layer,
                           ParameterStore& parameters, const RopeTable& positions,
                           LayerScratch& scratch)
    : impl_(new Impl(config, layer, parameters, positions, scratch)) {
}

MlaAttention::~MlaAttention() = default;

std::unique_ptr<LayerSlot> MlaAttention::create_slot(const SlotDesc& desc) {
    return std::make_unique<MlaSlot>(*impl_, desc);
}

} // namespace bellows
