// SPDX-License-Identifier: MIT
#include "kept_swiglu.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/quantize.hpp>

namespace bellows {

TensorView KeptSwiglu::input(Arena::Frame& scratch) const {
    if (!codes_)
        return gate_up_;
    const TensorView& codes = codes_->codes;
    return scratch.tensor(input_, {codes.extent[0], codes.extent[1]})
        .with_row_count(codes.row_count);
}

fp8::Quantized KeptSwiglu::hidden_rows(Arena::Frame& scratch) const {
    return rows_in(scratch, codes_->codes.extent[0], codes_->codes.extent[1] / 2);
}

LinearRows KeptSwiglu::forward(Recording& r, Arena::Frame& scratch, const TensorView& input,
                               const TensorView& row_weight) const {
    if (!codes_) {
        ops::swiglu_forward(r, input, row_weight, hidden_);
        return hidden_;
    }
    fp8::quantize(r, input, *codes_);
    const fp8::Quantized hidden = hidden_rows(scratch);
    fp8::swiglu(r, input, row_weight, hidden);
    return hidden;
}

LinearRows KeptSwiglu::input_gradient(Recording& r, Arena::Frame& scratch,
                                      const TensorView& d_hidden, const TensorView& row_weight,
                                      const TensorView& d_row_weight) const {
    if (!codes_) {
        ops::swiglu_dgrad(r, d_hidden, gate_up_, row_weight, gate_up_, d_row_weight);
        return gate_up_;
    }
    const TensorView d_gate_up = input(scratch);
    fp8::swiglu_dgrad(r, d_hidden, *codes_, row_weight,
                      {.stored = d_gate_up, .d_row_weight = d_row_weight});
    return quantise_gradient(r, scratch, d_gate_up, *gradient_);
}

LinearRows KeptSwiglu::output_again(Recording& r, Arena::Frame& scratch,
                                    const TensorView& row_weight) const {
    if (!codes_)
        return hidden_;
    const fp8::Quantized hidden = hidden_rows(scratch);
    fp8::swiglu(r, *codes_, row_weight, hidden);
    return hidden;
}

LinearRows KeptSwiglu::gradient_again() const {
    if (!codes_)
        return gate_up_;
    LinearRows gradient;
    gradient.columns = gradient_;
    return gradient;
}

} // namespace bellows
