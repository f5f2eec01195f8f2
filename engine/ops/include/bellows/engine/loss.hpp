// SPDX-License-Identifier: MIT
#pragma once

// Softmax cross-entropy. The contract that all ops share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows::ops {

/// Softmax cross-entropy and its gradient in one. logits: [rows, vocab] act, strided (the row
/// stride, not vocab, is a multiple of 4); targets: [rows] u32, kIgnoreTarget: no loss, gradient 0;
/// loss: [rows] f32; d_logits (optional): as logits, may be logits; d = scale * (softmax - onehot).
/// factor (optional): [1] f32, which the scale is multiplied with when the kernel runs.
/// Any other target outside the vocabulary gives NaN.
inline constexpr std::uint32_t kIgnoreTarget = 0xFFFFFFFFu;
void cross_entropy(Recording& recording, const TensorView& logits, const TensorView& targets,
                   const TensorView& loss, const TensorView& d_logits, float scale,
                   const TensorView& factor = {});

} // namespace bellows::ops
