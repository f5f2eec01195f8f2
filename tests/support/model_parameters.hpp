// SPDX-License-Identifier: MIT
#pragma once

// Parameter values for tests of whole models, by name, exact in f32.

#include "support/compare.hpp"
#include "verify/reference/model.hpp"

#include <bellows/shape/parameters.hpp>

namespace bellows::test {

/// The values that training starts from.
inline reference::Parameters initial_parameters(const ModelConfig& config, std::uint64_t seed) {
    reference::Parameters out;
    for (const ParameterInfo& info : parameters(config))
        out[info.name] = to_double(initial_values(info, seed));
    return out;
}

/// Values at which every part of the model matters: matrices uniform within ±scale / sqrt(inputs),
/// gains within 1 ± 0.3, router biases within ±0.1.
inline reference::Parameters random_parameters(const ModelConfig& config, std::uint64_t seed,
                                               double scale = 2) {
    reference::Parameters out;
    for (const ParameterInfo& info : parameters(config)) {
        const bool table = info.kind == ParameterKind::Embedding;
        const double reach = info.kind == ParameterKind::Norm         ? 0.3
                             : info.kind == ParameterKind::RouterBias ? 0.1
                             : table                                  ? scale
                                     : scale / std::sqrt(static_cast<double>(info.shape.back()));
        out[info.name] = to_double(random_f32(static_cast<std::size_t>(info.size()), ++seed,
                                              info.init_mean - reach, info.init_mean + reach));
    }
    return out;
}

/// Uniform tokens; each token's target is its successor, the last one of a sequence has none.
inline reference::Batch random_batch(const ModelConfig& config, std::size_t batch, std::size_t seq,
                                     std::uint64_t seed) {
    reference::Batch out{batch, seq, random_indices(batch * seq, seed, config.vocabulary), {}};
    for (std::size_t row = 0; row < out.tokens.size(); ++row)
        out.targets.push_back((row + 1) % seq == 0 ? -1 : out.tokens[row + 1]);
    return out;
}

} // namespace bellows::test
