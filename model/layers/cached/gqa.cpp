// SPDX-License-Identifier: MIT
#include "parts.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::cached {

namespace {

class Gqa final : public CachedLayer {
public:
    Gqa(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
        const RopeTable& positions, const ops::PagedCache& cache)
        : c_(config), p_(parameters, layer), table_(positions.view()), cache_(cache),
          few_rows_(p_.most_few_rows(
              {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"})) {}

    void record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                const TensorView& stream) const override;

private:
    /// Of the norm's rows; without them, of the residual stream's few, and the norm ahead.
    TensorView project(Recording& r, Arena::Frame& scratch, const TensorView& stream,
                       const LinearRows* norm, const char* projection, std::uint64_t heads) const;
    TensorView normalised_heads(Recording& r, Arena::Frame& scratch, const TensorView& heads,
                                const char* norm) const;

    const ModelConfig c_;
    LayerParameters p_;
    TensorView table_;
    ops::PagedCache cache_;
    std::uint64_t few_rows_; ///< the most that go by few_rows.hpp
};

TensorView Gqa::project(Recording& r, Arena::Frame& scratch, const TensorView& stream,
                        const LinearRows* norm, const char* projection, std::uint64_t heads) const {
    const std::uint64_t rows = stream.extent[0];
    const TensorView y = scratch.tensor(stream.dtype, {rows, heads * c_.head_dim});
    const std::string name = "self_attn." + std::string(projection);
    if (norm == nullptr)
        p_.few_rows(r, name, stream, y, behind_norm(p_.at("input_layernorm.weight"), c_.norm_eps));
    else
        p_.linear(name).forward(r, scratch, *norm, y);
    return y.reshaped({rows, heads, c_.head_dim});
}

/// Each head's RMSNorm where the model has that, else the heads themselves.
TensorView Gqa::normalised_heads(Recording& r, Arena::Frame& scratch, const TensorView& heads,
                                 const char* norm) const {
    if (!c_.qk_norm)
        return heads;
    return normalised_values(r, scratch,
                             heads.reshaped({heads.extent[0] * heads.extent[1], c_.head_dim}),
                             p_.at("self_attn." + std::string(norm) + ".weight"), c_.norm_eps)
        .reshaped({heads.extent[0], heads.extent[1], c_.head_dim});
}

void Gqa::record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                 const TensorView& stream) const {
    const bool few = has_few_rows(rows, few_rows_);
    LinearRows rows_of_norm;
    if (!few)
        rows_of_norm = normalised(r, scratch, p_.store(), stream, p_.at("input_layernorm.weight"),
                                  c_.norm_eps);
    const LinearRows* norm = few ? nullptr : &rows_of_norm;
    const TensorView k = project(r, scratch, stream, norm, "k_proj", c_.kv_heads),
                     v = project(r, scratch, stream, norm, "v_proj", c_.kv_heads),
                     projected = project(r, scratch, stream, norm, "q_proj", c_.heads);
    ops::cache_append_rotated_heads(r, cache_, normalised_heads(r, scratch, k, "k_norm"), v, table_,
                                    rows.positions, rows.places);
    const TensorView q = normalised_heads(r, scratch, projected, "q_norm");
    ops::rope_at(r, q, table_, rows.positions, q);
    const TensorView o = scratch.tensor(stream.dtype, {rows.rows, c_.heads, c_.head_dim});
    const std::uint64_t bytes =
        ops::paged_attention_workspace_bytes(rows.work.capacity, c_.heads, c_.head_dim);
    ops::paged_attention(r, q, cache_, rows.work, o, {}, static_cast<float>(c_.attention_scale()),
                         scratch.bytes(bytes));
    const TensorView sums = o.reshaped({rows.rows, c_.heads * c_.head_dim});
    if (few)
        p_.few_rows(r, "self_attn.o_proj", sums, stream, {.result = fp8::FewRowsForm::Result::Add});
    else
        p_.linear("self_attn.o_proj").forward(r, scratch, sums, stream, true);
}

} // namespace

std::unique_ptr<CachedLayer> gqa(const ModelConfig& config, std::uint64_t layer,
                                 ParameterStore& parameters, const RopeTable& positions,
                                 const ops::PagedCache& cache) {
    return std::make_unique<Gqa>(config, layer, parameters, positions, cache);
}

} // namespace bellows::cached
