// SPDX-License-Identifier: MIT
#include "parts.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/latent_values.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>

namespace bellows::cached {

namespace {

/// heads [tokens, heads, size] as a batch of matrices [heads, tokens, size].
TensorView by_head(TensorView heads) {
    std::swap(heads.extent[0], heads.extent[1]);
    std::swap(heads.stride[0], heads.stride[1]);
    return heads;
}

/// Most rows whose values are made of attention's parts at once.
constexpr std::uint64_t kMostTogether = 256;

class Mla final : public CachedLayer {
public:
    Mla(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
        const RopeTable& positions, const ops::PagedCache& cache);

    void record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                const TensorView& stream) const override;

private:
    void decode_weights();
    std::uint64_t most_few_rows() const;
    void record_few_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                         const TensorView& stream) const;
    TensorView attend(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                      const TensorView& q) const;
    LinearRows values(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                      const TensorView& q) const;
    void attend_few(Recording& r, Arena::Frame& scratch, const StepRows& rows, const TensorView& q,
                    const TensorView& o) const;
    TensorView queries(Recording& r, Arena::Frame& scratch, const LinearRows& norm) const;
    TensorView absorbed(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                        const TensorView& q) const;
    TensorView keys(Recording& r, Arena::Frame& scratch, const LinearRows& norm) const;
    void append(Recording& r, const StepRows& rows, const TensorView& kv) const;

    const ModelConfig c_;
    LayerParameters p_;
    TensorView table_;
    ops::PagedCache cache_;
    Buffer decoded_;         ///< kv_b_proj's values where the store has codes alone
    TensorView kv_up_;       ///< [heads, nope + value, latent] act
    std::uint64_t few_rows_; ///< the most that go by few_rows.hpp
};

Mla::Mla(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
         const RopeTable& positions, const ops::PagedCache& cache)
    : c_(config), p_(parameters, layer), table_(positions.view()), cache_(cache) {
    const Parameter& kv_b = p_.at("self_attn.kv_b_proj.weight");
    if (kv_b.quantized)
        decode_weights();
    else
        kv_up_ = kv_b.compute;
    kv_up_ = kv_up_.reshaped({c_.heads, c_.qk_nope_head_dim + c_.v_head_dim, c_.kv_lora_rank});
    few_rows_ = most_few_rows();
}

std::uint64_t Mla::most_few_rows() const {
    if (!fp8::takes_few_rows(kv_up_, p_.store().activation()))
        return 0;
    const std::uint64_t queries =
        c_.q_lora_rank == 0 ? p_.most_few_rows({"self_attn.q_proj"})
                            : p_.most_few_rows({"self_attn.q_a_proj", "self_attn.q_b_proj"});
    return std::min(queries,
                    p_.most_few_rows({"self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"}));
}

void Mla::decode_weights() {
    Device& device = p_.store().device();
    const DType act = p_.store().activation();
    const std::uint64_t out = c_.heads * (c_.qk_nope_head_dim + c_.v_head_dim);
    decoded_ = Buffer(device, {.name = "keys' and values' weights",
                               .bytes = out * c_.kv_lora_rank * size_of(act),
                               .category = MemoryCategory::Weights});
    kv_up_ = decoded_.tensor(act, {out, c_.kv_lora_rank});
    Recording r(device, QueueRole::Compute, "decode weights");
    fp8::dequantize(r, *p_.at("self_attn.kv_b_proj.weight").quantized, kv_up_);
    device.submit(r).wait();
}

TensorView Mla::queries(Recording& r, Arena::Frame& scratch, const LinearRows& norm) const {
    const std::uint64_t rows = (norm.codes ? norm.codes->codes : norm.values).extent[0];
    const DType act = p_.store().activation();
    const TensorView q = scratch.tensor(act, {rows, c_.heads * c_.qk_head_dim()});
    if (c_.q_lora_rank == 0) {
        p_.linear("self_attn.q_proj").forward(r, scratch, norm, q);
    } else {
        const TensorView latent = scratch.tensor(act, {rows, c_.q_lora_rank});
        p_.linear("self_attn.q_a_proj").forward(r, scratch, norm, latent);
        p_.linear("self_attn.q_b_proj")
            .forward(r, scratch,
                     normalised(r, scratch, p_.store(), latent,
                                p_.at("self_attn.q_a_layernorm.weight"), c_.latent_eps()),
                     q);
    }
    return q.reshaped({rows, c_.heads, c_.qk_head_dim()});
}

/// [rows, heads, latent + rope]: what is multiplied with the cache's latents and key parts.
TensorView Mla::absorbed(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                         const TensorView& q) const {
    const std::uint64_t nope = c_.qk_nope_head_dim, rope = c_.qk_rope_head_dim,
                        latent = c_.kv_lora_rank;
    const TensorView result = scratch.tensor(q.dtype, {rows.rows, c_.heads, latent + rope});
    ops::rope_at(r, ops::slice(q, 2, nope, rope), table_, rows.positions,
                 ops::slice(result, 2, latent, rope));
    ops::gemm_nn(r, by_head(ops::slice(q, 2, 0, nope)), ops::slice(kv_up_, 1, 0, nope),
                 by_head(ops::slice(result, 2, 0, latent)));
    return result;
}

/// [rows, latent + rope], as they are projected.
TensorView Mla::keys(Recording& r, Arena::Frame& scratch, const LinearRows& norm) const {
    const std::uint64_t rows = (norm.codes ? norm.codes->codes : norm.values).extent[0];
    const TensorView kv =
        scratch.tensor(p_.store().activation(), {rows, c_.kv_lora_rank + c_.qk_rope_head_dim});
    p_.linear("self_attn.kv_a_proj_with_mqa").forward(r, scratch, norm, kv);
    return kv;
}

void Mla::append(Recording& r, const StepRows& rows, const TensorView& kv) const {
    ops::cache_append_normalised_latent(
        r, cache_, kv, p_.at("self_attn.kv_a_layernorm.weight").weight,
        static_cast<float>(c_.latent_eps()), table_, rows.positions, rows.places);
}

/// [rows, heads, latent]: the cache's latents, weighted for absorbed queries.
TensorView Mla::attend(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                       const TensorView& q) const {
    const std::uint64_t latent = c_.kv_lora_rank;
    const TensorView sums = scratch.tensor(q.dtype, {rows.rows, c_.heads, latent});
    const std::uint64_t bytes =
        ops::paged_attention_workspace_bytes(rows.work.capacity, c_.heads, latent);
    ops::paged_attention(r, q, cache_, rows.work, sums, {},
                         static_cast<float>(c_.attention_scale()), scratch.bytes(bytes));
    return sums;
}

/// [rows, heads * value]: attention's results times W_UV. Where the device has code for that, codes
/// come of it at once, but not of exact steps: it has other bits.
LinearRows Mla::values(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                       const TensorView& q) const {
    const std::uint64_t v = c_.v_head_dim, latent = c_.kv_lora_rank;
    const TensorView weights = ops::slice(kv_up_, 1, c_.qk_nope_head_dim, v);
    if (p_.store().linear_precision() == LinearPrecision::Fp8 && !rows.exact() &&
        rows.rows <= kMostTogether) {
        const TensorView sums = scratch.tensor(q.dtype, {rows.rows, c_.heads, latent});
        LinearRows codes;
        codes.codes = rows_in(scratch, rows.rows, c_.heads * v);
        if (fp8::why_not_latent_values(r.device(), sums, weights, *codes.codes).empty()) {
            const ops::PagedParts parts = ops::paged_attention_parts(
                r, q, cache_, rows.work, sums, static_cast<float>(c_.attention_scale()),
                scratch.bytes(
                    ops::paged_attention_workspace_bytes(rows.work.capacity, c_.heads, latent)));
            fp8::latent_values(r, parts, sums, weights, *codes.codes);
            return codes;
        }
    }
    const TensorView sums = attend(r, scratch, rows, q),
                     o = scratch.tensor(q.dtype, {rows.rows, c_.heads, v});
    ops::gemm_nt(r, by_head(sums), weights, by_head(o));
    return o.reshaped({rows.rows, c_.heads * v});
}

/// o: [rows, heads, value], attention's results times W_UV, which puts their parts together.
void Mla::attend_few(Recording& r, Arena::Frame& scratch, const StepRows& rows, const TensorView& q,
                     const TensorView& o) const {
    const std::uint64_t latent = c_.kv_lora_rank;
    const TensorView weights = ops::slice(kv_up_, 1, c_.qk_nope_head_dim, c_.v_head_dim);
    if (!fp8::few_rows_combine(r.device(), rows.rows, latent)) {
        fp8::few_rows_nt(r, by_head(attend(r, scratch, rows, q)), weights, by_head(o));
        return;
    }
    const TensorView sums = scratch.tensor(q.dtype, {rows.rows, c_.heads, latent});
    fp8::FewRowsForm form;
    const std::uint64_t bytes =
        ops::paged_attention_workspace_bytes(rows.work.capacity, c_.heads, latent);
    form.parts =
        ops::paged_attention_parts(r, q, cache_, rows.work, sums,
                                   static_cast<float>(c_.attention_scale()), scratch.bytes(bytes));
    fp8::few_rows_nt(r, by_head(sums), weights, by_head(o), form);
}

void Mla::record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                 const TensorView& stream) const {
    if (has_few_rows(rows, few_rows_)) {
        record_few_rows(r, scratch, rows, stream);
        return;
    }
    const LinearRows norm =
        normalised(r, scratch, p_.store(), stream, p_.at("input_layernorm.weight"), c_.norm_eps);
    // What depends on nothing new stands together, so that a device does it side by side.
    const TensorView kv = keys(r, scratch, norm), projected = queries(r, scratch, norm);
    append(r, rows, kv);
    p_.linear("self_attn.o_proj")
        .forward(r, scratch, values(r, scratch, rows, absorbed(r, scratch, rows, projected)),
                 stream, true);
}

/// Projections come first, as they do not wait for each other.
void Mla::record_few_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                          const TensorView& stream) const {
    const DType act = stream.dtype;
    const std::uint64_t nope = c_.qk_nope_head_dim, v = c_.v_head_dim;
    const fp8::FewRowsForm norm = behind_norm(p_.at("input_layernorm.weight"), c_.norm_eps);
    const TensorView q = scratch.tensor(act, {rows.rows, c_.heads * c_.qk_head_dim()}),
                     kv = scratch.tensor(act, {rows.rows, c_.kv_lora_rank + c_.qk_rope_head_dim});
    if (c_.q_lora_rank == 0) {
        p_.few_rows(r, "self_attn.q_proj", stream, q, norm);
        p_.few_rows(r, "self_attn.kv_a_proj_with_mqa", stream, kv, norm);
    } else {
        const TensorView latent = scratch.tensor(act, {rows.rows, c_.q_lora_rank});
        p_.few_rows(r, "self_attn.q_a_proj", stream, latent, norm);
        p_.few_rows(r, "self_attn.kv_a_proj_with_mqa", stream, kv, norm);
        p_.few_rows(r, "self_attn.q_b_proj", latent, q,
                    behind_norm(p_.at("self_attn.q_a_layernorm.weight"), c_.latent_eps()));
    }
    append(r, rows, kv);
    const TensorView absorbed =
        scratch.tensor(act, {rows.rows, c_.heads, c_.kv_lora_rank + c_.qk_rope_head_dim});
    ops::mla_queries(r, q.reshaped({rows.rows, c_.heads, c_.qk_head_dim()}),
                     ops::slice(kv_up_, 1, 0, nope), table_, rows.positions, absorbed);
    const TensorView o = scratch.tensor(act, {rows.rows, c_.heads, v});
    attend_few(r, scratch, rows, absorbed, o);
    p_.few_rows(r, "self_attn.o_proj", o.reshaped({rows.rows, c_.heads * v}), stream,
                {.result = fp8::FewRowsForm::Result::Add});
}

} // namespace

std::unique_ptr<CachedLayer> mla(const ModelConfig& config, std::uint64_t layer,
                                 ParameterStore& parameters, const RopeTable& positions,
                                 const ops::PagedCache& cache) {
    return std::make_unique<Mla>(config, layer, parameters, positions, cache);
}

} // namespace bellows::cached
