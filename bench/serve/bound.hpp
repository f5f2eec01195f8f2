// SPDX-License-Identifier: MIT
#pragma once

// How many bytes a step of generation must read: the floor beside which its time is shown. Pure.

#include <bellows/base/dtype.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>

namespace bellows::bench {

/// Weights that `sequences` tokens meet, those of routed experts as if each token chose at random,
/// and the cache's entries of `context` tokens of each sequence.
double bytes_of_step(const ModelConfig& model, Precision precision, DType cache,
                     std::uint64_t sequences, std::uint64_t context);

} // namespace bellows::bench
