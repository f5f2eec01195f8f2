// SPDX-License-Identifier: MIT
#pragma once

// The SwiGLU between two linear layers and what it keeps for the backward pass. In f32 and bf16
// that is its input, whose place its gradient takes, and its output. In FP8, as DeepSeek-V3 does,
// it is the input as FP8 rows, from which the backward pass computes the output again, and then the
// input's gradient in 128 x 1 blocks for the weight gradient. Used by the layers' own .cpp files;
// the tensors belong to the slot.

#include "linear.hpp"

namespace bellows {

class KeptSwiglu {
public:
    KeptSwiglu() = default;
    /// gate_up: [rows, 2 * ffn] f32 or bf16, hidden: [rows, ffn] alike.
    KeptSwiglu(const TensorView& gate_up, const TensorView& hidden)
        : gate_up_(gate_up), hidden_(hidden) {}
    /// gate_up: [rows, 2 * ffn] in 1 x 128 blocks, with the rows' count if they have one; of type
    /// `input` while it is computed.
    KeptSwiglu(DType input, const fp8::Quantized& gate_up) : codes_(gate_up), input_(input) {}
    /// d_gate_up: in 128 x 1 blocks. FP8 with a backward pass only.
    void keep_gradient(const fp8::Quantized& d_gate_up) { gradient_ = d_gate_up; }

    /// Where the first linear layer writes in the forward pass.
    TensorView input(Arena::Frame& scratch) const;
    /// What enters the second layer, of that input.
    LinearRows forward(Recording& recording, Arena::Frame& scratch, const TensorView& input,
                       const TensorView& row_weight) const;
    /// The gradient of the input, which the first layer's gradients read, now and later (again()).
    LinearRows input_gradient(Recording& recording, Arena::Frame& scratch,
                              const TensorView& d_hidden, const TensorView& row_weight,
                              const TensorView& d_row_weight) const;
    /// For weight gradients: forward()'s result, and input_gradient()'s.
    LinearRows output_again(Recording& recording, Arena::Frame& scratch,
                            const TensorView& row_weight) const;
    LinearRows gradient_again() const;

private:
    fp8::Quantized hidden_rows(Arena::Frame& scratch) const;

    TensorView gate_up_, hidden_;
    std::optional<fp8::Quantized> codes_, gradient_;
    DType input_ = DType::F32;
};

} // namespace bellows
