// SPDX-License-Identifier: MIT
#pragma once

// RMSNorm and its gradients. The contract that all ops share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows::ops {

/// y = x * inv_rms * gain, inv_rms = 1 / sqrt(mean(x^2) + eps). x, y: [rows, columns] act, strided;
/// gain: [columns] f32, or bf16 where act is; inv_rms (out, for the gradients): [rows] f32.
void rmsnorm_forward(Recording& recording, const TensorView& x, const TensorView& gain,
                     const TensorView& y, const TensorView& inv_rms, float eps);

/// dx: [rows, columns] act, strided; may be dy.
void rmsnorm_dgrad(Recording& recording, const TensorView& dy, const TensorView& x,
                   const TensorView& gain, const TensorView& inv_rms, const TensorView& dx,
                   bool accumulate);

/// d_gain: [columns] f32. Rows are added in a fixed order.
void rmsnorm_wgrad(Recording& recording, const TensorView& dy, const TensorView& x,
                   const TensorView& inv_rms, const TensorView& d_gain, bool accumulate,
                   BufferView workspace);

} // namespace bellows::ops
