// SPDX-License-Identifier: MIT
#pragma once

// Rotary positions: how fast each pair of elements turns, with YaRN's or Llama-3's stretching for
// long texts. A head of d rotated elements has d / 2 pairs; at position p pair i turns by
// p * rope_frequencies(config)[i] radians, and its sine and cosine are multiplied with
// rope_amplitude(config).

#include <bellows/shape/config.hpp>

#include <vector>

namespace bellows {

/// Radians per position, config.rope_head_dim() / 2 values: theta^(-2i/d), stretched as
/// config.rope_scaling says.
std::vector<double> rope_frequencies(const ModelConfig& config);

/// 1 without YaRN. With it, m(rope_mscale) / m(rope_mscale_all_dim) where both are set, where
/// m(x) = 0.1 x ln(rope_factor) + 1; else rope_attention_factor where that is set; else m(1).
double rope_amplitude(const ModelConfig& config) noexcept;

/// What attention_scale() is multiplied with twice: m(rope_mscale_all_dim) with YaRN where that is
/// set; else 1.
double rope_scale_amplitude(const ModelConfig& config) noexcept;

} // namespace bellows
