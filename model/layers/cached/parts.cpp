// SPDX-License-Identifier: MIT
#include "parts.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/fused.hpp>

#include <algorithm>

namespace bellows {

namespace cached {

bool has_few_rows(const StepRows& rows, std::uint64_t most) {
    return rows.rows <= most && rows.expected_expert_rows == 0;
}

fp8::Operand few_rows_operand(const Parameter& weights) {
    return weights.quantized ? fp8::Operand(*weights.quantized) : fp8::Operand(weights.compute);
}

fp8::FewRowsForm behind_norm(const Parameter& gain, double eps, fp8::FewRowsForm::Result result) {
    return {.result = result, .gain = gain.weight, .eps = static_cast<float>(eps)};
}

void LayerParameters::few_rows(Recording& r, const std::string& name, const TensorView& x,
                               const TensorView& y, const fp8::FewRowsForm& form) const {
    fp8::few_rows_nt(r, x, few_rows_operand(at(name + ".weight")), y, form);
}

std::uint64_t LayerParameters::most_few_rows(std::initializer_list<const char*> names) const {
    std::uint64_t most = fp8::kMostFewRows;
    for (const char* name : names)
        most = std::min(most,
                        fp8::few_rows_that_pay(store_.device(),
                                               few_rows_operand(at(std::string(name) + ".weight")),
                                               store_.activation()));
    return most;
}

LinearRows normalised(Recording& r, Arena::Frame& scratch, const ParameterStore& parameters,
                      const TensorView& x, const Parameter& gain, double eps, bool with_values) {
    const std::uint64_t rows = x.extent[0], columns = x.extent[1];
    LinearRows y;
    const bool fp8 = parameters.linear_precision() == LinearPrecision::Fp8;
    if (!fp8 || with_values)
        y.values = scratch.tensor(x.dtype, {rows, columns});
    if (fp8)
        y.codes = rows_in(scratch, rows, columns);
    normalise(r, x, gain.weight, y, scratch.tensor(DType::F32, {rows}), static_cast<float>(eps));
    return y;
}

TensorView normalised_values(Recording& r, Arena::Frame& scratch, const TensorView& x,
                             const Parameter& gain, double eps) {
    const TensorView y = scratch.tensor(x.dtype, {x.extent[0], x.extent[1]});
    ops::rmsnorm_forward(r, x, gain.weight, y, scratch.tensor(DType::F32, {x.extent[0]}),
                         static_cast<float>(eps));
    return y;
}

LinearRows swiglu(Recording& r, Arena::Frame& scratch, const ParameterStore& parameters,
                  const TensorView& gate_up) {
    const std::uint64_t rows = gate_up.extent[0], ffn = gate_up.extent[1] / 2;
    if (parameters.linear_precision() == LinearPrecision::Fp8) {
        const fp8::Quantized hidden = rows_in(scratch, rows, ffn);
        fp8::swiglu(r, gate_up, {}, hidden);
        return hidden;
    }
    const TensorView hidden = scratch.tensor(gate_up.dtype, {rows, ffn});
    ops::swiglu_forward(r, gate_up, {}, hidden);
    return hidden;
}

} // namespace cached

ops::CacheShape cache_shape(const ModelConfig& c, DType stored) {
    const bool fp8 = stored == DType::F8E4M3;
    if (stored != DType::F32 && stored != DType::BF16 && !(fp8 && c.is_mla()))
        throw Error(ErrorCode::InvalidArgument,
                    "a cache of " + std::string(to_string(stored)) + " does not exist" +
                        (fp8 ? " for models without latent attention" : "") +
                        ": choose bf16 or f32" + (c.is_mla() ? " or fp8" : ""));
    if (fp8 && c.kv_lora_rank % 128 != 0)
        throw Error(ErrorCode::InvalidArgument,
                    "a cache in FP8 has a scale for each 128 values, but latents have " +
                        std::to_string(c.kv_lora_rank) + ": choose bf16");
    ops::CacheShape shape;
    shape.dtype = stored;
    if (c.is_mla()) {
        shape.form = ops::CacheShape::Form::Latent;
        shape.latent = c.kv_lora_rank;
        shape.rope = c.qk_rope_head_dim;
    } else {
        shape.form = ops::CacheShape::Form::Heads;
        shape.kv_heads = c.kv_heads;
        shape.qk_dim = shape.v_dim = c.head_dim;
    }
    return shape;
}

std::unique_ptr<CachedLayer> cached_attention(const ModelConfig& config, std::uint64_t layer,
                                              ParameterStore& parameters,
                                              const RopeTable& positions,
                                              const ops::PagedCache& cache) {
    return (config.is_mla() ? cached::mla : cached::gqa)(config, layer, parameters, positions,
                                                         cache);
}

std::unique_ptr<CachedLayer> cached_ffn(const ModelConfig& config, std::uint64_t layer,
                                        ParameterStore& parameters) {
    if (config.is_moe(layer))
        return cached::experts(config, layer, parameters);
    return cached::dense(config, layer, parameters);
}

std::unique_ptr<CachedExperts> cached_experts(const ModelConfig& config, std::uint64_t layer,
                                              ParameterStore& parameters) {
    return cached::experts(config, layer, parameters);
}

} // namespace bellows
