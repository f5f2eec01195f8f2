// SPDX-License-Identifier: MIT
// Many requests at once: the tokens of transformers, and with `exact` the same bits alone, beside
// others, in chunks, after a preemption and with blocks from the cache.
#include "serve/some_requests.hpp"
#include "support/hf_reference.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/serve/engine.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace bellows {
namespace {

using testing::Finished;
using testing::hf_model;
using testing::HfReference;
using testing::small;
using testing::some_requests;

std::vector<Finished> run(Engine& engine, const std::vector<Request>& requests) {
    return testing::run_all(engine, requests);
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
    std::vector<std::uint32_t> ends(engine.model().vocabulary / 20);
    std::iota(ends.begin(), ends.end(), 0);
    for (int round = 0; round < 200; ++round) {
        if (running.size() < 12 && random() % 3 != 0) {
            Request request = requests[random() % requests.size()];
            request.max_tokens = 1 + random() % 60;
            if (random() % 2 == 0)
                request.end_tokens = ends;
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
    EXPECT_GT(engine.counters().overlapped, 20u);
    while (engine.step()) {
    }
    EXPECT_EQ(engine.counters().blocks.used, 0u);
}

TEST(Engine, GivesTheSameBitsWhereStepsOverlap) {
    EngineOptions options = small(Precision::BF16);
    options.overlap_steps = false;
    Engine one_by_one(testing::test_options(), hf_model("v3"), options);
    const std::vector<Request> penalised = some_requests(one_by_one.model().vocabulary);
    std::vector<Request> requests = penalised;
    for (Request& request : requests) {
        request.sampling.frequency_penalty = 0; // with it a draw waits for the token before
        request.max_tokens += 10;
        request.end_tokens.resize(one_by_one.model().vocabulary / 9);
        std::iota(request.end_tokens.begin(), request.end_tokens.end(), 40);
    }
    const std::vector<Finished> expected_penalised = run(one_by_one, penalised),
                                expected = run(one_by_one, requests);
    EXPECT_EQ(one_by_one.counters().overlapped, 0u);
    for (const FinishReason reason : {FinishReason::EndToken, FinishReason::Length})
        EXPECT_GT(std::ranges::count(expected, reason, &Finished::reason), 0);

    options.overlap_steps = true;
    for (const SyncMode sync : {SyncMode::Serial, SyncMode::Overlap, SyncMode::Shuffle}) {
        SCOPED_TRACE(static_cast<int>(sync));
        DeviceOptions device = testing::test_options();
        device.sync = sync;
        Engine overlapping(device, hf_model("v3"), options);
        EXPECT_EQ(run(overlapping, penalised), expected_penalised);
        const EngineCounters before = overlapping.counters();
        EXPECT_EQ(run(overlapping, requests), expected);
        const EngineCounters after = overlapping.counters();
        EXPECT_GT(after.overlapped - before.overlapped, (after.steps - before.steps) / 2);
    }
}

/// A text that goes on for as long as it is asked to.
Request long_text(std::uint64_t tokens) {
    Request request;
    request.prompt = {1, 2, 3};
    request.max_tokens = tokens;
    return request;
}

TEST(Engine, ComputesNoRowBehindTheLastToken) {
    Engine engine(testing::test_options(), hf_model("v3"), small(Precision::F32));
    EXPECT_EQ(run(engine, {long_text(9)}).front().tokens.size(), 9u);
    EXPECT_EQ(engine.counters().computed_tokens, 3u + 8u);
    EXPECT_EQ(engine.counters().vain_tokens, 0u);
    EXPECT_EQ(engine.counters().overlapped, 8u);
}

TEST(Engine, FindsAnEndTokenWhileTheNextStepRuns) {
    Engine engine(testing::test_options(), hf_model("v3"), small(Precision::F32));
    const Finished whole = run(engine, {long_text(12)}).front();
    std::size_t end = 4; // the first occurrence of a token
    while (std::ranges::count(whole.tokens.begin(), whole.tokens.begin() + end, whole.tokens[end]) >
           0)
        ++end;
    ASSERT_LT(end + 1, whole.tokens.size());
    Request ending = long_text(12), other = long_text(12);
    ending.end_tokens = {whole.tokens[end]};
    other.prompt = {5, 6};
    const Finished alone = run(engine, {other}).front();
    const std::uint64_t before = engine.counters().computed_tokens;
    EXPECT_EQ(engine.counters().vain_tokens, 0u);
    const std::vector<Finished> both = run(engine, {ending, other});
    EXPECT_EQ(both[0].reason, FinishReason::EndToken);
    EXPECT_EQ(both[0].tokens,
              std::vector<std::uint32_t>(whole.tokens.begin(), whole.tokens.begin() + end + 1));
    EXPECT_EQ(both[1].tokens, alone.tokens);
    EXPECT_EQ(engine.counters().computed_tokens - before, 3 + end + 2 + 11);
    EXPECT_EQ(engine.counters().vain_tokens, 1u);
    EXPECT_EQ(run(engine, {ending}).front().tokens, both[0].tokens); // nothing runs on behind it
}

TEST(Engine, CancelsWhatRuns) {
    Engine engine(testing::test_options(), hf_model("v3"), small(Precision::F32));
    Request other = long_text(12);
    other.prompt = {5, 6};
    const Finished alone = run(engine, {other}).front();
    const RequestId cancelled = engine.submit(long_text(50)), goes_on = engine.submit(other);
    for (int step = 0; step < 4; ++step)
        ASSERT_TRUE(engine.step());
    EXPECT_EQ(engine.poll(cancelled).tokens.size(), 4u);
    engine.cancel(cancelled); // a step that has it runs
    const AnswerPart last = engine.poll(cancelled);
    EXPECT_EQ(last.reason, FinishReason::Cancelled);
    EXPECT_TRUE(last.tokens.empty());
    EXPECT_EQ(last.usage.answer, 4u);
    EXPECT_EQ(engine.counters().running, 1u);
    while (engine.step()) {
    }
    EXPECT_EQ(engine.poll(goes_on).tokens, alone.tokens);
    EXPECT_EQ(engine.counters().blocks.used, 0u);
    engine.cancel(engine.submit(long_text(5)));
    EXPECT_FALSE(engine.step());

    const RequestId only = engine.submit(long_text(50));
    ASSERT_TRUE(engine.step());
    engine.cancel(only);
    EXPECT_EQ(engine.counters().blocks.used, 1u) << "the step that runs still writes there";
    EXPECT_FALSE(engine.step()) << "nobody wants what it gives";
    EXPECT_EQ(engine.counters().blocks.used, 0u);
}

/// Whose device is lost at its so-manyth submission; null where it is before all is loaded.
std::unique_ptr<Engine> engine_that_loses(std::int64_t at) {
    DeviceOptions device = testing::test_options();
    device.faults.lose_device = at;
    try {
        return std::make_unique<Engine>(device, hf_model("v3"), small(Precision::F32));
    } catch (const Error&) {
        return nullptr;
    }
}

TEST(Engine, FailsAllThatRunsWithALostDevice) {
    std::int64_t loading = 0; // submissions
    for (std::int64_t bit = 1 << 12; bit > 0; bit /= 2)
        loading += engine_that_loses(loading + bit - 1) ? 0 : bit;
    std::uint64_t finished = 0;
    for (std::int64_t step = 0; step < 6; ++step) {
        SCOPED_TRACE(step);
        const auto engine = engine_that_loses(loading + step);
        ASSERT_TRUE(engine);
        const std::vector<RequestId> ids = {engine->submit(long_text(3)),
                                            engine->submit(long_text(50))};
        std::vector<Finished> all(ids.size());
        for (bool lost = false; !lost;) {
            try {
                ASSERT_TRUE(engine->step());
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), ErrorCode::DeviceLost);
                lost = true;
            }
            for (std::size_t i = 0; i < ids.size(); ++i)
                if (all[i].reason == FinishReason::None)
                    all[i].add(engine->poll(ids[i]));
        }
        EXPECT_EQ(all[1].reason, FinishReason::Failed);
        EXPECT_TRUE(all[0].reason == FinishReason::Failed || all[0].tokens.size() == 3);
        finished += all[0].reason == FinishReason::Length;
        EXPECT_EQ(engine->counters().blocks.used, 0u);
        EXPECT_EQ(engine->counters().running + engine->counters().waiting, 0u);
        EXPECT_FALSE(engine->step());
    }
    EXPECT_GT(finished, 0u);
}

TEST(Engine, TakesWhatRanBeforeAnError) {
    DeviceOptions device = testing::test_options();
    device.sync = SyncMode::Overlap; // shuffled, the third step may not have been submitted
    Engine engine(device, hf_model("v3"), small(Precision::F32));
    const RequestId id = engine.submit(long_text(50));
    ASSERT_TRUE(engine.step());
    ASSERT_TRUE(engine.step());
    engine.device().abort(Error(ErrorCode::PeerLost, "for a test"));
    EXPECT_TRUE(engine.step()) << "the third step runs already";
    EXPECT_EQ(engine.poll(id).tokens.size(), 3u);
    EXPECT_BELLOWS_ERROR(engine.step(), PeerLost, "for a test");
    EXPECT_EQ(engine.poll(id).reason, FinishReason::Failed);
    EXPECT_FALSE(engine.step());
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
