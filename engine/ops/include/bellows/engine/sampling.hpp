// SPDX-License-Identifier: MIT
#pragma once

// Choosing the next token of many sequences from their logits, on the device. The order of the
// steps is: mask of allowed tokens, repetition penalty, frequency and presence penalties, bias,
// temperature, min-p, top-k, top-p, draw. A draw is keyed by the request's seed and the position of
// the token, so it does not depend on what else is in the batch; a row's bits depend on its own
// logits and settings alone. Every threshold keeps all tokens whose logits equal that of the last
// one it keeps, and at least the likeliest. Probabilities are relative to what the step before
// left; they are summed in fixed point (2^-40 of the greatest), so no order of summation shows in a
// threshold. Devices agree but for what the last bit of a division makes of penalties and the
// temperature: a token that stands that near to a threshold may be kept by one and cut by another.
// The contract that all ops share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows::ops {

/// How a row's token is chosen, as it stands on the device. Nothing checks the values there: they
/// are finite, temperature, top_p and min_p at least 0, repetition_penalty above 0.
struct SampleSettings {
    float temperature = 1; ///< 0 (or below 1e-5): the likeliest token, the lowest id among equals
    float top_p = 1;       ///< the fewest likeliest tokens whose probabilities sum to this; 1: all
    float min_p = 0;       ///< tokens of at least so much of the greatest probability; 0: all
    std::uint32_t top_k = 0; ///< the likeliest so many, with all equals of the last; 0: all
    /// Logits of tokens that the prompt or the answer has: above 0 divided by this, else
    /// multiplied.
    float repetition_penalty = 1;
    float frequency_penalty = 0; ///< subtracted once for each time that the answer has the token
    float presence_penalty = 0;  ///< subtracted if the answer has it at all
    std::uint32_t position = 0;  ///< of the token that is drawn
    std::uint32_t seed_low = 0, seed_high = 0;
    /// The row's entries of SampleBatch::history and SampleBatch::biases.
    std::uint32_t history_first = 0, history_count = 0;
    std::uint32_t bias_first = 0, bias_count = 0;
    std::uint32_t spare[2] = {0, 0};
};
static_assert(sizeof(SampleSettings) == 64);

/// A token that the prompt or the answer has; a row has each token once.
struct SampleHistory {
    std::uint32_t token = 0;
    std::uint32_t count = 0; ///< times in the answer; 0: in the prompt alone
};
/// What is added to a token's logit; −inf forbids it. A row has each token once.
struct SampleBias {
    std::uint32_t token = 0;
    float bias = 0;
};

struct SampleBatch {
    TensorView logits;   ///< [rows, vocabulary] f32, strided; only read
    TensorView settings; ///< [rows, 16] u32: SampleSettings
    /// [capacity, 2] u32: SampleHistory and SampleBias. Optional; entries beyond the capacity and
    /// of tokens beyond the vocabulary change nothing.
    TensorView history{}, biases{};
    /// [words] u32, a bit for each token, lowest bits first: 0 forbids it for all rows. Optional.
    TensorView allowed{};
    TensorView tokens; ///< out: [rows] u32
    /// out: [rows] f32, natural log of the token's probability by the logits as they came (before
    /// penalties, bias and temperature; forbidden tokens count). NaN with kNoToken.
    TensorView log_probs;
    /// out, optional: [rows, n] u32 and f32: the n likeliest tokens by the logits as they came, in
    /// descending order, equals by ascending id; n is at most kMostTopLogProbs and the vocabulary.
    /// kNoToken and NaN where the logits have a NaN, +inf or nothing above −inf, or where penalties
    /// or biases make NaN or +inf of one.
    TensorView top_tokens{}, top_log_probs{};
};
inline constexpr std::uint64_t kMostTopLogProbs = 20;

/// Some 39 KiB a row and 4 bytes a logit.
std::uint64_t sample_workspace_bytes(std::uint64_t rows, std::uint64_t vocabulary);
/// A row whose logits have a NaN or +inf, as they came or as they were changed, or whose tokens are
/// all forbidden, gets kNoToken. Rows and vocabulary are of any size; logits begin at any element.
void sample(Recording& recording, const SampleBatch& batch, BufferView workspace);
inline constexpr std::uint32_t kNoToken = 0xFFFFFFFF;

/// Names the first of the tokens that the step before has drawn; kDrawnBefore + j the j-th.
inline constexpr std::uint32_t kDrawnBefore = 0x80000000;
/// Puts drawn[tokens[t] - kDrawnBefore] in the place of each such name in `tokens`, [count] u32, so
/// that a step may be recorded and submitted before the host knows what the one before has drawn.
/// All other tokens stay. drawn: [most] u32; names beyond it stay as well.
void take_drawn(Recording& recording, const TensorView& drawn, const TensorView& tokens);

} // namespace bellows::ops
