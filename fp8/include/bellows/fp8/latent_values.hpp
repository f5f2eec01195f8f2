// SPDX-License-Identifier: MIT
#pragma once

// One dispatch stands between attention over latents and the projection of its results, for few
// rows: it puts the parts together and makes each head's values and their codes, by a device's own
// code. The thread that owns the recording calls it; errors are Error{InvalidArgument} with all
// shapes, and nothing is recorded then.

#include <bellows/engine/paged_attention.hpp>
#include <bellows/fp8/quantize.hpp>

#include <string>

namespace bellows::fp8 {

/// "" when the device takes such operands, else what is against it.
std::string why_not_latent_values(const Device& device, const TensorView& sums,
                                  const TensorView& weights, const Quantized& codes);

/// codes (out): [rows, heads * 128] in 1x128 blocks, of the attention's sums times
/// transpose(weights) of each head, rounded to bf16. sums: [rows, heads, latent] bf16 and parts: as
/// ops::paged_attention_parts() leaves them; weights: [heads, 128, latent] bf16, strided.
void latent_values(Recording& recording, const ops::PagedParts& parts, const TensorView& sums,
                   const TensorView& weights, const Quantized& codes);

} // namespace bellows::fp8
