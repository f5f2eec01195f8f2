// SPDX-License-Identifier: MIT
// Answers with drafts of a module of multi-token prediction: with `exact` the same as without, else
// drawn alike; drafts are those of the f64 reference.
#include "serve/some_requests.hpp"
#include "support/hf_reference.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"
#include "verify/reference/model.hpp"

#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/serve/engine.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace bellows {
namespace {

using testing::Finished;
using testing::hf_model;
using testing::run_all;
using testing::small;
using testing::some_requests;

const char* const kModel = "v3-mtp";

EngineOptions drafting(EngineOptions options) {
    options.draft = DraftKind::Mtp;
    return options;
}

TEST(Drafts, LeaveAnswersAsTheyAre) {
    for (const Precision precision : {Precision::F32, Precision::BF16, Precision::FP8}) {
        SCOPED_TRACE(static_cast<int>(precision));
        Engine plain(testing::test_options(), hf_model(kModel), small(precision));
        std::vector<Request> requests = some_requests(plain.model().vocabulary);
        for (Request& request : requests)
            request.max_tokens *= 4;
        const std::vector<Finished> expected = run_all(plain, requests);
        EXPECT_EQ(plain.counters().drafted, 0u);

        Engine engine(testing::test_options(), hf_model(kModel), drafting(small(precision)));
        EXPECT_EQ(run_all(engine, requests), expected);
        const EngineCounters counters = engine.counters();
        EXPECT_GT(counters.accepted, 0u);
        EXPECT_LT(counters.accepted, counters.drafted);
        EXPECT_LT(counters.steps, plain.counters().steps);

        // Other chunks, too few blocks for all, and beginnings from the cache.
        EngineOptions options = drafting(small(precision));
        options.token_budget = 40;
        options.prefill_chunk = 17;
        options.cache_tokens = 256;
        Engine crowded(testing::test_options(), hf_model(kModel), options);
        for (int round = 0; round < 2; ++round)
            EXPECT_EQ(run_all(crowded, requests), expected);
        EXPECT_GT(crowded.counters().blocks.hits, 0u);
    }
}

/// The model and its weights, and what it and its first module find likeliest behind each position.
struct Likeliest {
    std::vector<std::uint32_t> next, draft;
};

Likeliest likeliest(const std::vector<std::uint32_t>& text) {
    const HfFolder folder(hf_model(kModel));
    const ModelConfig& model = folder.config().model;
    reference::Parameters parameters;
    for (const ParameterInfo& info : bellows::parameters(model)) {
        std::vector<float> values(info.size());
        folder.read(info, 0, values);
        parameters[info.name].assign(values.begin(), values.end());
    }
    reference::Batch batch{.batch = 1, .seq = text.size() - 1, .tokens = {}, .targets = {}};
    batch.tokens.assign(text.begin(), text.end() - 1);
    batch.targets.assign(text.begin() + 1, text.end());
    const auto forward = reference::model_forward(model, parameters, batch);
    const auto best = [&](const reference::Vector& logits) {
        std::vector<std::uint32_t> ids;
        for (auto row = logits.begin(); row != logits.end();
             row += static_cast<std::ptrdiff_t>(model.vocabulary))
            ids.push_back(static_cast<std::uint32_t>(
                std::max_element(row, row + static_cast<std::ptrdiff_t>(model.vocabulary)) - row));
        return ids;
    };
    return {best(forward.logits), best(forward.modules.front().logits)};
}

TEST(Drafts, AreThoseOfTheReference) {
    const auto tokens = testing::HfReference(kModel).values<std::uint32_t>("tokens");
    Request request;
    request.prompt.assign(tokens.begin(), tokens.begin() + 12);
    request.max_tokens = 100;
    Engine engine(testing::test_options(), hf_model(kModel), drafting(small(Precision::F32)));
    const Finished written = run_all(engine, {request}).front();
    std::vector<std::uint32_t> text = request.prompt;
    text.insert(text.end(), written.tokens.begin(), written.tokens.end());
    const Likeliest expected = likeliest(text);
    // The first token follows the prompt; each step checks the draft of the token behind the last.
    std::uint64_t drafted = 0, accepted = 0;
    std::size_t last = request.prompt.size();
    while (last + 1 < text.size()) {
        ASSERT_EQ(text[last + 1], expected.next[last]);
        const bool room = text.size() - last > 2; // for two tokens
        const bool right = room && expected.draft[last - 1] == text[last + 1];
        drafted += room;
        accepted += right;
        last += right ? 2 : 1;
    }
    EXPECT_EQ(written.usage.drafted, drafted);
    EXPECT_EQ(written.usage.accepted, accepted);
    EXPECT_EQ(engine.counters().accepted, accepted);
    EXPECT_GT(accepted, 0u);
}

/// Without `exact` a row's bits may depend on the rows beside it, so tokens may differ; they are
/// drawn from the same distribution.
TEST(Drafts, DrawAlikeWhereBitsMayDiffer) {
    constexpr std::uint64_t kDraws = 400;
    std::vector<Request> requests;
    for (std::uint64_t seed = 0; seed < kDraws; ++seed) {
        Request request;
        request.prompt = {5, 9, 2, 33, 17};
        request.max_tokens = 6;
        request.sampling.temperature = 0.8;
        request.sampling.seed = seed;
        requests.push_back(request);
    }
    EngineOptions options = small(Precision::BF16);
    options.exact = false;
    const auto draws = [&](const EngineOptions& of) {
        Engine engine(testing::test_options(), hf_model(kModel), of);
        std::vector<std::map<std::uint32_t, double>> shares(6);
        for (const Finished& one : run_all(engine, requests))
            for (std::size_t i = 0; i < 6; ++i)
                shares[i][one.tokens.at(i)] += 1.0 / kDraws;
        return shares;
    };
    const auto without = draws(options), with = draws(drafting(options));
    for (std::size_t i = 0; i < 6; ++i) {
        double distance = 0;
        for (std::uint32_t token = 0; token < 64; ++token) {
            const auto share = [&](const auto& of) {
                const auto found = of[i].find(token);
                return found == of[i].end() ? 0 : found->second;
            };
            distance += std::abs(share(without) - share(with)) / 2;
        }
        EXPECT_LT(distance, 0.1) << "at token " << i;
    }
}

TEST(Drafts, AreForcedForMeasurements) {
    EngineOptions options = drafting(small(Precision::F32));
    options.forced_acceptance = 0.8;
    Engine engine(testing::test_options(), hf_model(kModel), options);
    Request request;
    request.prompt = {1, 2, 3};
    request.max_tokens = 200;
    request.sampling.temperature = 1;
    EXPECT_EQ(run_all(engine, {request}).front().tokens.size(), 200u);
    const EngineCounters counters = engine.counters();
    EXPECT_NEAR(static_cast<double>(counters.accepted) / static_cast<double>(counters.drafted), 0.8,
                0.08);
}

TEST(Drafts, NeedAModule) {
    EXPECT_BELLOWS_ERROR(
        Engine(testing::test_options(), hf_model("moonlight"), drafting(small(Precision::F32))),
        InvalidArgument, "drafts need a model with a module of multi-token prediction");
}

} // namespace
} // namespace bellows
