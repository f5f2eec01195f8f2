// SPDX-License-Identifier: MIT
#pragma once

// Choosing the next token from logits. A pure function, any thread; the same arguments give the
// same token on every machine.

#include <bellows/serve/request.hpp>

#include <cstdint>
#include <span>

namespace bellows {

/// logits: [vocabulary]. Of the parameters, temperature and seed count alone. `position` counts the
/// tokens drawn so far: with the seed it decides the draw. Throws Error{InvalidArgument} if there
/// are no logits, one is NaN or +inf, all are −inf, or the temperature is negative or not finite.
std::uint32_t sample_token(std::span<const float> logits, const SamplingParams& params,
                           std::uint64_t position);

} // namespace bellows
