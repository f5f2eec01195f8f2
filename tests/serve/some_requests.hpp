// SPDX-License-Identifier: MIT
#pragma once

// Requests of many kinds, and what has come of an answer, for tests of the engine on one rank and
// on several.

#include <bellows/serve/engine.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace bellows::testing {

struct Finished {
    std::vector<std::uint32_t> tokens;
    std::vector<float> log_probs;
    FinishReason reason = FinishReason::None;
    RequestUsage usage;

    void add(const AnswerPart& part) {
        tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
        for (const auto& of : part.log_probs)
            log_probs.push_back(of.front().log_prob);
        reason = part.reason;
        usage = part.usage;
    }
    bool operator==(const Finished& other) const {
        return tokens == other.tokens && log_probs == other.log_probs && reason == other.reason;
    }
};

/// An engine that answers some short requests at once, with the same bits in any company.
inline EngineOptions small(Precision precision) {
    EngineOptions options;
    options.precision = precision;
    options.max_context = 256;
    options.max_sequences = 8;
    options.token_budget = 64;
    options.exact = true;
    return options;
}

/// Prompts of several lengths, some with a common beginning, and settings of all kinds.
inline std::vector<Request> some_requests(std::uint64_t vocabulary) {
    std::mt19937 random(7);
    const auto text = [&](std::size_t count) {
        std::vector<std::uint32_t> tokens(count);
        for (std::uint32_t& token : tokens)
            token = static_cast<std::uint32_t>(random() % vocabulary);
        return tokens;
    };
    const std::vector<std::uint32_t> common = text(130);
    std::vector<Request> all;
    for (const std::size_t length : {1, 63, 64, 65, 100, 7}) {
        Request request;
        request.prompt = all.size() % 2 == 1 ? common : text(length);
        if (all.size() % 2 == 1)
            for (const std::uint32_t token : text(length % 30))
                request.prompt.push_back(token);
        request.max_tokens = 3 + length % 9;
        request.log_probs = true;
        request.sampling.seed = length;
        request.sampling.temperature = length % 3 == 0 ? 0 : 1.5;
        request.sampling.top_k = length % 2 == 0 ? 5 : 0;
        request.sampling.top_p = length == 65 ? 0.7 : 1;
        request.sampling.frequency_penalty = length == 63 ? 0.5 : 0;
        all.push_back(request);
    }
    return all;
}

/// Steps until all have ended.
inline std::vector<Finished> run_all(Engine& engine, const std::vector<Request>& requests) {
    std::vector<RequestId> ids;
    for (const Request& request : requests)
        ids.push_back(engine.submit(request));
    std::vector<Finished> all(ids.size());
    std::size_t left = ids.size();
    for (int step = 0; left > 0; ++step) {
        EXPECT_LT(step, 10000);
        EXPECT_TRUE(engine.step());
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (all[i].reason != FinishReason::None)
                continue;
            all[i].add(engine.poll(ids[i]));
            left -= all[i].reason != FinishReason::None ? 1 : 0;
        }
    }
    EXPECT_FALSE(engine.step());
    EXPECT_EQ(engine.counters().blocks.used, 0u);
    return all;
}

} // namespace bellows::testing
