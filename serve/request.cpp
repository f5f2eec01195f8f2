// SPDX-License-Identifier: MIT
#include <bellows/serve/request.hpp>

#include <bellows/base/error.hpp>
#include <bellows/engine/sampling.hpp>

#include "text/bpe/utf8.hpp"

#include <cmath>
#include <limits>
#include <sstream>
#include <string_view>
#include <unordered_set>

namespace bellows {

namespace {

static_assert(kMostRequestLogProbs == ops::kMostTopLogProbs);

template <typename Value>
[[noreturn]] void refuse(std::string_view field, const Value& value, std::string_view accepted) {
    std::ostringstream message;
    message << field << " is " << value << "; accepted is " << accepted;
    throw Error(ErrorCode::InvalidArgument, message.str());
}

void require_range(std::string_view field, double value, double least, double most) {
    if (!(value >= least && value <= most)) {
        std::ostringstream accepted;
        accepted << "a number from " << least << " to " << most;
        refuse(field, value, accepted.str());
    }
}

void require_tokens(std::string_view field, const std::vector<std::uint32_t>& tokens,
                    std::uint64_t vocabulary) {
    for (const std::uint32_t token : tokens) {
        if (token >= vocabulary) {
            refuse("a token of " + std::string(field), token,
                   "a token of the vocabulary, below " + std::to_string(vocabulary));
        }
    }
}

} // namespace

bool has_penalties(const SamplingParams& sampling) noexcept {
    return sampling.repetition_penalty != 1 || sampling.frequency_penalty != 0 ||
           sampling.presence_penalty != 0;
}

void validate(const SamplingParams& sampling, std::uint64_t vocabulary) {
    require_range("temperature", sampling.temperature, 0, 1000);
    // The device computes in f32, where smaller numbers are 0.
    if (!(static_cast<float>(sampling.top_p) > 0 && sampling.top_p <= 1)) {
        refuse("top_p", sampling.top_p, "a number above 0, at most 1 (1: all tokens)");
    }
    require_range("min_p", sampling.min_p, 0, 1);
    require_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100);
    require_range("frequency_penalty", sampling.frequency_penalty, -2, 2);
    require_range("presence_penalty", sampling.presence_penalty, -2, 2);
    std::unordered_set<std::uint32_t> biased;
    for (const LogitBias& bias : sampling.logit_bias) {
        const std::string field = "logit_bias of token " + std::to_string(bias.token);
        require_tokens("logit_bias", {bias.token}, vocabulary);
        if (bias.bias != -std::numeric_limits<double>::infinity()) {
            require_range(field, bias.bias, -100, 100);
        }
        if (!biased.insert(bias.token).second) {
            refuse(field, "given twice", "one bias for each token");
        }
    }
}

void validate(const Request& request, std::uint64_t vocabulary) {
    if (request.prompt.empty()) {
        refuse("prompt", "empty", "at least one token");
    }
    require_tokens("prompt", request.prompt, vocabulary);
    require_tokens("end_tokens", request.end_tokens, vocabulary);
    if (request.max_tokens == 0) {
        refuse("max_tokens", 0, "at least 1");
    }
    if (request.stop.size() > kMostStopStrings) {
        refuse("stop", std::to_string(request.stop.size()) + " strings",
               "at most " + std::to_string(kMostStopStrings));
    }
    for (const std::string& stop : request.stop) {
        if (stop.empty() || stop.size() > kMostStopStringBytes) {
            refuse("a string of stop", std::to_string(stop.size()) + " bytes long",
                   "1 to " + std::to_string(kMostStopStringBytes) + " bytes");
        }
        if (!text::is_utf8(stop)) {
            refuse("a string of stop", in_quotes(stop), "UTF-8");
        }
    }
    if (request.top_log_probs > kMostRequestLogProbs) {
        refuse("top_log_probs", request.top_log_probs,
               "at most " + std::to_string(kMostRequestLogProbs));
    }
    if (request.top_log_probs > 0 && !request.log_probs) {
        refuse("top_log_probs", request.top_log_probs, "0 where log_probs is off");
    }
    validate(request.sampling, vocabulary);
}

const char* to_string(FinishReason reason) noexcept {
    switch (reason) {
    case FinishReason::None:
        return "none";
    case FinishReason::EndToken:
        return "end token";
    case FinishReason::StopString:
        return "stop string";
    case FinishReason::Length:
        return "length";
    case FinishReason::Context:
        return "context";
    case FinishReason::Cancelled:
        return "cancelled";
    case FinishReason::Failed:
        return "failed";
    }
    return "unknown";
}

} // namespace bellows
