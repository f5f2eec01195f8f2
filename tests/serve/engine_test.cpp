// SPDX-License-Identifier: MIT
// Many requests at once: the tokens of transformers, and with `exact` the same bits alone, beside
// others, in chunks, after a preemption and with blocks from the cache.
#include "serve/some_requests.hpp"
#include "support/hf_reference.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/serve/engine.hpp>

#include <cmath>
#include <random>
#include <vector>

namespace bellows {
namespace {

using testing::Finished;
using testing::hf_model;
using testing::HfReference;
using testing::small;
using testing::some_requests;

/// Steps until all have ended.
std::vector<Finished> run(Engine& engine, const std::vector<Request>& requests) {
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

class EngineOf : public ::testing::TestWithParam<std::string> {};

TEST_P(EngineOf, WritesTheTokensOfTransformers) {
    Engine engine(testing::test_options(), hf_model(GetParam()), small(Precision::F32));
    const HfReference reference(GetParam());
    const auto tokens = reference.values<std::uint32_t>("tokens");
    const auto logits = reference.values<float>("logits");
    const auto greedy = reference.values<std::uint32_t>("greedy");
    const std::uint64_t vocabulary = logits.size() / 24;
    Request request;
    request.prompt.assign(tokens.begin(), tokens.begin() + 12);
    request.max_tokens = greedy.size();
    request.log_probs = true;
    const Finished written = run(engine, {request}).front();
    EXPECT_EQ(written.tokens, std::vector<std::uint32_t>(greedy.begin(), greedy.end()));
    EXPECT_EQ(written.reason, FinishReason::Length);
    // The first token follows the whole prompt.
    const float* const row = logits.data() + 11 * vocabulary;
    double sum = 0;
    for (std::uint64_t i = 0; i < vocabulary; ++i)
        sum += std::exp(row[i]);
    EXPECT_NEAR(written.log_probs.front(), row[greedy[0]] - std::log(sum), 1e-3);
}

TEST_P(EngineOf, GivesTheSameBitsAloneAndInAnyCompany) {
    for (const Precision precision : {Precision::F32, Precision::BF16, Precision::FP8}) {
        SCOPED_TRACE(static_cast<int>(precision));
        EngineOptions options = small(precision);
        options.prefix_reuse = false;
        Engine alone(testing::test_options(), hf_model(GetParam()), options);
        const std::vector<Request> requests = some_requests(alone.model().vocabulary);
        std::vector<Finished> expected;
        for (const Request& request : requests)
            expected.push_back(run(alone, {request}).front());
        EXPECT_EQ(run(alone, requests), expected);
        EXPECT_EQ(alone.counters().blocks.hits, 0u);

        // Chunks of other sizes, too few blocks for all, and beginnings from the cache.
        options.prefix_reuse = true;
        options.token_budget = 40;
        options.prefill_chunk = 17;
        options.cache_tokens = 256;
        Engine crowded(testing::test_options(), hf_model(GetParam()), options);
        for (int round = 0; round < 2; ++round)
            EXPECT_EQ(run(crowded, requests), expected);
        EXPECT_GT(crowded.counters().blocks.hits, 0u);
    }
}

INSTANTIATE_TEST_SUITE_P(All, EngineOf, ::testing::ValuesIn(testing::hf_models()),
                         testing::hf_model_name);

TEST(Engine, LeavesNoBlockBehind) {
    EngineOptions options = small(Precision::F32);
    options.cache_tokens = 512;
    options.max_context = 200;
    Engine engine(testing::test_options(), hf_model("v3"), options);
    const std::vector<Request> requests = some_requests(engine.model().vocabulary);
    std::mt19937 random(3);
    std::vector<RequestId> running;
    std::uint64_t cancelled = 0;
    for (int round = 0; round < 200; ++round) {
        if (running.size() < 12 && random() % 3 != 0) {
            Request request = requests[random() % requests.size()];
            request.max_tokens = 1 + random() % 60;
            running.push_back(engine.submit(request));
        }
        if (!running.empty() && random() % 7 == 0) {
            engine.cancel(running[random() % running.size()]);
            ++cancelled;
        }
        (void)engine.step();
        std::erase_if(running,
                      [&](RequestId id) { return engine.poll(id).reason != FinishReason::None; });
    }
    EXPECT_GT(cancelled, 10u);
    EXPECT_GT(engine.counters().preemptions, 0u);
    EXPECT_GT(engine.counters().blocks.hits, 0u);
    while (engine.step()) {
    }
    EXPECT_EQ(engine.counters().blocks.used, 0u);
}

TEST(Engine, SaysWhatIsWrong) {
    Engine engine(testing::test_options(), hf_model("v3"), small(Precision::F32));
    Request request;
    request.prompt = {1, 2, 3};
    request.stop = {"x"};
    EXPECT_BELLOWS_ERROR(engine.submit(request), InvalidArgument, "need a tokenizer");
    request.stop = {};
    request.prompt = {std::uint32_t(engine.model().vocabulary)};
    EXPECT_BELLOWS_ERROR(engine.submit(request), InvalidArgument, "prompt");
    EXPECT_BELLOWS_ERROR(engine.poll(99), InvalidArgument, "no request 99");
    EngineOptions options = small(Precision::F32);
    options.max_context = 1 << 30;
    EXPECT_BELLOWS_ERROR(Engine(testing::test_options(), hf_model("v3"), options), InvalidArgument,
                         "more than the model has");
    options = small(Precision::F32);
    options.cache_type = DType::F8E4M3;
    EXPECT_BELLOWS_ERROR(Engine(testing::test_options(), hf_model("llama"), options),
                         InvalidArgument, "without latent attention");
}

TEST(Engine, GivesTheLikeliestTokensAsWell) {
    Engine engine(testing::test_options(), hf_model("v3"), small(Precision::F32));
    Request request;
    request.prompt = {1, 2, 3};
    request.max_tokens = 4;
    request.log_probs = true;
    request.top_log_probs = 3;
    const RequestId id = engine.submit(request);
    AnswerPart part;
    while (engine.step()) {
        part = engine.poll(id);
        ASSERT_EQ(part.log_probs.size(), 1u);
        const auto& of = part.log_probs.front();
        ASSERT_EQ(of.size(), 4u);
        EXPECT_EQ(of[0].token, of[1].token) << "temperature 0 takes the likeliest";
        EXPECT_EQ(of[0].log_prob, of[1].log_prob);
        EXPECT_GE(of[1].log_prob, of[2].log_prob);
        EXPECT_GE(of[2].log_prob, of[3].log_prob);
    }
    EXPECT_EQ(part.reason, FinishReason::Length);
}

} // namespace
} // namespace bellows
