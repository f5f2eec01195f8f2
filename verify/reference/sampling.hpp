// SPDX-License-Identifier: MIT
#pragma once

// The choice of the next token in f64: the steps of bellows::ops::sample, in its order and with its
// generator, on one row of logits.

#include "verify/reference/gemm.hpp"

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace bellows::reference {

/// What bellows::ops::SampleSettings and its batch say of a row.
struct SampleRow {
    double temperature = 1, top_p = 1, min_p = 0;
    std::uint32_t top_k = 0;
    double repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
    std::uint32_t position = 0;
    std::uint64_t seed = 0;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> history{}; ///< token, times in the answer
    std::vector<std::pair<std::uint32_t, double>> biases{};
    std::vector<bool> allowed{}; ///< by token; empty: all
};

struct Sample {
    Vector probabilities; ///< that a token is drawn; 0 outside the kept set, all 0 without a choice
    std::int64_t token = -1; ///< -1: none
    double log_prob = 0;     ///< by the logits as they came; NaN without a token
    /// The smallest relative change of a score or of a logit that penalties or bias changed that
    /// could change the token, min_p and top_p apart: tests leave rows whose margin is below their
    /// arithmetic's error out.
    double margin = 0;
};
Sample sample(View logits, const SampleRow& row);

/// The n likeliest tokens, equals by ascending id.
std::vector<std::uint32_t> likeliest(View logits, std::size_t n);
/// log softmax.
Vector log_probabilities(View logits);

/// Philox4x32-10.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key);

} // namespace bellows::reference
