// SPDX-License-Identifier: MIT
#include "parts.hpp"

namespace bellows::cached {

namespace {

class Dense final : public CachedLayer {
public:
    Dense(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters)
        : c_(config), p_(parameters, layer),
          few_rows_(p_.most_few_rows({"mlp.gate_up_proj", "mlp.down_proj"})) {}

    void record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                const TensorView& stream) const override {
        if (has_few_rows(rows, few_rows_)) {
            record_few_rows(r, scratch, rows, stream);
            return;
        }
        const LinearRows norm = normalised(r, scratch, p_.store(), stream,
                                           p_.at("post_attention_layernorm.weight"), c_.norm_eps);
        const TensorView gate_up = scratch.tensor(stream.dtype, {rows.rows, 2 * c_.dense_ffn});
        p_.linear("mlp.gate_up_proj").forward(r, scratch, norm, gate_up);
        p_.linear("mlp.down_proj")
            .forward(r, scratch, swiglu(r, scratch, p_.store(), gate_up), stream, true);
    }

private:
    void record_few_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                         const TensorView& stream) const {
        using Result = fp8::FewRowsForm::Result;
        const TensorView hidden = scratch.tensor(stream.dtype, {rows.rows, c_.dense_ffn});
        p_.few_rows(
            r, "mlp.gate_up_proj", stream, hidden,
            behind_norm(p_.at("post_attention_layernorm.weight"), c_.norm_eps, Result::Swiglu));
        p_.few_rows(r, "mlp.down_proj", hidden, stream, {.result = Result::Add});
    }

    const ModelConfig c_;
    LayerParameters p_;
    std::uint64_t few_rows_; ///< the most that go by few_rows.hpp
};

} // namespace

std::unique_ptr<CachedLayer> dense(const ModelConfig& config, std::uint64_t layer,
                                   ParameterStore& parameters) {
    return std::make_unique<Dense>(config, layer, parameters);
}

} // namespace bellows::cached
