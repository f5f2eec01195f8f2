// SPDX-License-Identifier: MIT
#pragma once

// What a user asks of a model that generates text, and how an answer ends. Plain values, any
// thread.

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

/// Chosen by the caller, who gives each one once.
using RequestId = std::uint64_t;

/// What is added to a token's logit; −inf forbids the token.
struct LogitBias {
    std::uint32_t token = 0;
    double bias = 0;

    bool operator==(const LogitBias&) const = default;
};

/// How tokens are chosen. The order of the steps is: repetition penalty, frequency and presence
/// penalties, bias, temperature, min-p, top-k, top-p, draw. The defaults leave every step but the
/// last out.
struct SamplingParams {
    double temperature = 0;  ///< 0: the likeliest token, the first of equals; at most 1000
    std::uint64_t seed = 1;  ///< with a token's position it decides the draw
    std::uint32_t top_k = 0; ///< the likeliest so many tokens; 0: all
    double top_p = 1; ///< (0, 1]: the fewest likeliest tokens whose probabilities sum to this
    double min_p = 0; ///< [0, 1]: tokens of at least so much of the greatest probability
    /// [0.01, 100]: logits of tokens that the prompt or the answer has are divided by this where
    /// they are above 0, and multiplied by it elsewhere.
    double repetition_penalty = 1;
    double frequency_penalty = 0; ///< [−2, 2]: subtracted each time that the answer has the token
    double presence_penalty = 0;  ///< [−2, 2]: subtracted once if the answer has the token
    std::vector<LogitBias> logit_bias{}; ///< each [−100, 100] or −inf; no token twice

    bool operator==(const SamplingParams&) const = default;
};

/// Whether a draw depends on the tokens before it.
bool has_penalties(const SamplingParams& sampling) noexcept;

/// Throws Error{InvalidArgument} that names the field, its value and what is accepted.
void validate(const SamplingParams& sampling, std::uint64_t vocabulary);

struct Request {
    std::vector<std::uint32_t> prompt; ///< at least one token
    std::uint64_t max_tokens = 256;    ///< of the answer, its end token included; at least 1
    SamplingParams sampling{};
    /// Tokens that end the answer. They are part of its tokens, not of its text.
    std::vector<std::uint32_t> end_tokens{};
    /// Texts that end the answer, which does not show them: at most kMostStopStrings, of
    /// kMostStopStringBytes bytes each, UTF-8, none empty.
    std::vector<std::string> stop{};
    bool log_probs = false;          ///< of the tokens of the answer
    std::uint32_t top_log_probs = 0; ///< with log_probs: of the likeliest so many, at most 20
    bool ignore_end = false;         ///< end tokens do not end the answer
};
inline constexpr std::uint64_t kMostStopStrings = 16;
inline constexpr std::uint64_t kMostStopStringBytes = 1024;
inline constexpr std::uint32_t kMostRequestLogProbs = 20;

/// Throws as validate() of the sampling does. Lengths against the context are the scheduler's to
/// check.
void validate(const Request& request, std::uint64_t vocabulary);

enum class FinishReason : std::uint8_t {
    None,       ///< the answer goes on
    EndToken,   ///< the model ended it
    StopString, ///< one of Request::stop is complete
    Length,     ///< max_tokens
    Context,    ///< the context of the model, or of the cache, is full
    Cancelled,
    Failed, ///< the model gave no distribution (NaN, all tokens forbidden), or a step failed
};

/// "none", "end token", "stop string", "length", "context", "cancelled", "failed".
const char* to_string(FinishReason reason) noexcept;

} // namespace bellows
