// SPDX-License-Identifier: MIT
// Each rule of the scheduler on a small case.
#include "support/temporary_folder.hpp"

#include <bellows/engine/sampling.hpp>
#include <bellows/serve/scheduler.hpp>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

using namespace bellows;

namespace {

using Tokens = std::vector<std::uint32_t>;

Request request(std::uint64_t prompt, std::uint64_t max_tokens, std::uint32_t first = 0) {
    Request it;
    it.prompt.resize(prompt);
    std::iota(it.prompt.begin(), it.prompt.end(), first * 10'000);
    it.max_tokens = max_tokens;
    return it;
}

const SchedulerConfig kSmall = {
    .blocks = 8, .max_context = 256, .token_budget = 128, .max_sequences = 4};

/// "7:0+5* 8:64+3": request 7 from position 0 on 5 tokens, and samples; and so on.
std::string describe(const Step& step) {
    std::ostringstream text;
    for (const StepSequence& it : step.sequences()) {
        text << (&it == step.sequences().data() ? "" : " ") << it.id << ":" << it.position << "+"
             << it.tokens.size() << (it.samples ? "*" : "");
    }
    return text.str();
}

std::vector<DrawnToken> finish(Scheduler& scheduler, const Step& step, std::uint32_t token = 42) {
    const auto results = scheduler.finish(step, Tokens(step.num_sampling(), token));
    scheduler.check();
    return results;
}

/// One step; what it was.
std::string run(Scheduler& scheduler, std::uint32_t token = 42) {
    const Step step = scheduler.next();
    finish(scheduler, step, token);
    return describe(step);
}

} // namespace

TEST(Scheduler, RefusesConfigurationsByField) {
    const auto with = [](auto change) {
        SchedulerConfig config = kSmall;
        change(config);
        return config;
    };
    EXPECT_BELLOWS_ERROR(Scheduler(with([](auto& c) { c.blocks = 3; })), InvalidArgument,
                         "blocks is 3; a request of max_context, 256 tokens, needs 4 blocks");
    EXPECT_BELLOWS_ERROR(Scheduler(with([](auto& c) { c.max_context = 1; })), InvalidArgument,
                         "max_context is 1");
    EXPECT_BELLOWS_ERROR(Scheduler(with([](auto& c) { c.max_sequences = 0; })), InvalidArgument,
                         "max_sequences is 0");
    EXPECT_BELLOWS_ERROR(Scheduler(with([](auto& c) { c.token_budget = 0; })), InvalidArgument,
                         "token_budget is 0; at least 1");
}

TEST(Scheduler, RefusesRequestsAndStaysAsItIs) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(5, 1));
    EXPECT_BELLOWS_ERROR(scheduler.submit(1, request(5, 1)), InvalidArgument, "exists already");
    EXPECT_BELLOWS_ERROR(scheduler.submit(2, request(0, 1)), InvalidArgument, "prompt is empty");
    EXPECT_BELLOWS_ERROR(scheduler.submit(2, request(256, 1)), InvalidArgument,
                         "256 tokens; the context of 256 tokens takes at most 255");
    EXPECT_BELLOWS_ERROR(scheduler.submit(2, request(5, 0)), InvalidArgument, "max_tokens is 0");
    EXPECT_BELLOWS_ERROR(scheduler.request(2), InvalidArgument, "no request 2");
    EXPECT_EQ(scheduler.num_waiting(), 1u);
    scheduler.check();
    scheduler.submit(2, request(255, 9));
    EXPECT_EQ(scheduler.num_waiting(), 2u);
}

TEST(Scheduler, OneRequestFromPromptToEnd) {
    Scheduler scheduler(kSmall);
    EXPECT_TRUE(scheduler.next().empty());
    EXPECT_TRUE(scheduler.finish(Step(), {}).empty());
    Request asked = request(5, 3);
    asked.sampling.seed = 9;
    scheduler.submit(7, asked);
    const Step first = scheduler.next();
    ASSERT_EQ(describe(first), "7:0+5*");
    EXPECT_EQ(first.number(), 1u);
    EXPECT_EQ(first.num_single(), 0u);
    const StepSequence& row = first.sequences()[0];
    EXPECT_TRUE(std::ranges::equal(row.tokens, asked.prompt));
    EXPECT_EQ(row.blocks.size(), 1u);
    EXPECT_EQ(row.slot, 0u);
    const auto results = finish(scheduler, first, 11);
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].token, 11u);
    EXPECT_EQ(results[0].reason, FinishReason::None);
    EXPECT_EQ(scheduler.tokens(7).back(), 11u);
    EXPECT_EQ(scheduler.request(7).sampling.seed, 9u);

    const Step second = scheduler.next();
    ASSERT_EQ(describe(second), "7:5+1*");
    EXPECT_EQ(second.sequences()[0].tokens[0], 11u);
    EXPECT_EQ(second.num_single(), 1u);
    finish(scheduler, second, 12);
    const auto last = finish(scheduler, scheduler.next(), 13);
    EXPECT_EQ(last.at(0).reason, FinishReason::Length);
    EXPECT_EQ(last[0].usage.prompt, 5u);
    EXPECT_EQ(last[0].usage.answer, 3u);
    EXPECT_TRUE(scheduler.idle());
    EXPECT_FALSE(scheduler.has(7));
    EXPECT_EQ(scheduler.counters().used, 0u);
}

TEST(Scheduler, EndsByEndTokenContextAndLength) {
    Request ends = request(4, 100);
    ends.end_tokens = {2, 3};
    Request ignores = ends;
    ignores.ignore_end = true;
    ignores.max_tokens = 1;
    Scheduler scheduler(kSmall);
    scheduler.submit(1, ends);
    scheduler.submit(2, ignores);
    scheduler.submit(3, request(255, 100));
    Step step = scheduler.next();
    ASSERT_EQ(describe(step), "1:0+4* 2:0+4* 3:0+120");
    auto results = finish(scheduler, step, 3);
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results[0].reason, FinishReason::EndToken);
    EXPECT_EQ(results[0].token, 3u);
    EXPECT_EQ(results[1].reason, FinishReason::Length);
    run(scheduler);
    step = scheduler.next();
    ASSERT_EQ(describe(step), "3:248+7*");
    EXPECT_EQ(finish(scheduler, step).at(0).reason, FinishReason::Context);
    EXPECT_TRUE(scheduler.idle());
}

TEST(Scheduler, RunningFirstThenWaitingWithinBudgetAndSequences) {
    SchedulerConfig config = kSmall;
    config.max_sequences = 3;
    config.token_budget = 20;
    config.blocks = 64;
    Scheduler scheduler(config);
    scheduler.submit(1, request(6, 50, 1));
    scheduler.submit(2, request(6, 50, 2));
    EXPECT_EQ(run(scheduler), "1:0+6* 2:0+6*");
    scheduler.submit(3, request(40, 50, 3));
    scheduler.submit(4, request(2, 50, 4));
    EXPECT_EQ(run(scheduler), "1:6+1* 2:6+1* 3:0+18") << "the budget; three run at most";
    EXPECT_EQ(run(scheduler), "1:7+1* 2:7+1* 3:18+18");
    EXPECT_EQ(scheduler.num_waiting(), 1u);
    scheduler.cancel(1);
    const Step step = scheduler.next();
    EXPECT_EQ(describe(step), "2:8+1* 3:36+4* 4:0+2*");
    EXPECT_EQ(step.sequences()[0].slot, 1u);
    EXPECT_EQ(step.sequences()[1].slot, 2u);
    EXPECT_EQ(step.sequences()[2].slot, 0u) << "that of the cancelled request";
    finish(scheduler, step);
}

TEST(Scheduler, ChunksOfPromptsLeaveEachRunningRequestAToken) {
    SchedulerConfig config = kSmall;
    config.token_budget = 10;
    config.prefill_chunk = 8;
    Scheduler scheduler(config);
    scheduler.submit(1, request(30, 50, 1));
    scheduler.submit(2, request(30, 50, 2));
    EXPECT_EQ(run(scheduler), "1:0+8 2:0+2");
    scheduler.submit(3, request(1, 50, 3));
    EXPECT_EQ(run(scheduler), "1:8+8 2:2+2");
    EXPECT_EQ(run(scheduler), "1:16+8 2:4+2");
    EXPECT_EQ(run(scheduler), "1:24+6* 2:6+4");
    const Step step = scheduler.next();
    EXPECT_EQ(describe(step), "1:30+1* 3:0+1* 2:10+8") << "rows of one token first";
    EXPECT_EQ(step.num_single(), 2u);
    EXPECT_EQ(step.num_tokens(), 10u);
    finish(scheduler, step);

    config.prefill_chunk = 0;
    Scheduler whole(config);
    whole.submit(1, request(30, 50, 1));
    EXPECT_EQ(run(whole), "1:0+10");
    whole.submit(2, request(3, 50, 2));
    EXPECT_EQ(run(whole), "1:10+10");
    EXPECT_EQ(run(whole), "1:20+10*");
    EXPECT_EQ(run(whole), "1:30+1* 2:0+3*");
}

TEST(Scheduler, PreemptsTheLastAndRecomputesWhatItGenerated) {
    SchedulerConfig config = kSmall;
    config.blocks = 4;
    config.prefix_reuse = false;
    Scheduler scheduler(config);
    for (RequestId id = 1; id <= 4; ++id) {
        scheduler.submit(id, request(id == 3 ? 60 : 63, 50, static_cast<std::uint32_t>(id)));
    }
    scheduler.cancel(4);
    scheduler.submit(5, request(64, 50, 5));
    EXPECT_EQ(run(scheduler, 100), "1:0+63* 2:0+63* 3:0+2");
    EXPECT_EQ(run(scheduler, 101), "1:63+1* 2:63+1* 3:2+58* 5:0+64*");
    // Four blocks are full but for the third request's; the first needs a fifth.
    const Step step = scheduler.next();
    EXPECT_EQ(step.preempted(), (std::vector<RequestId>{5, 3}));
    EXPECT_EQ(describe(step), "1:64+1* 2:64+1*") << "nobody new in this step";
    EXPECT_EQ(scheduler.num_waiting(), 2u);
    EXPECT_EQ(scheduler.usage(5).preemptions, 1u);
    finish(scheduler, step, 102);
    EXPECT_EQ(run(scheduler, 103), "1:65+1* 2:65+1*") << "no block is free";
    scheduler.cancel(1);
    const Step again = scheduler.next();
    EXPECT_EQ(describe(again), "2:66+1* 3:0+61*") << "the head of the queue, with its answer";
    EXPECT_EQ(again.sequences()[1].tokens.back(), 101u);
    finish(scheduler, again, 104);
    EXPECT_EQ(scheduler.tokens(3).size(), 62u);
    scheduler.cancel(2);
    scheduler.cancel(3);
    EXPECT_EQ(run(scheduler), "5:0+65*");
}

TEST(Scheduler, AdmitsOnlyWhatHasBlocksForAllItsTokens) {
    SchedulerConfig config = kSmall;
    config.blocks = 5;
    config.token_budget = 80;
    config.prefill_chunk = 64;
    Scheduler scheduler(config);
    scheduler.submit(1, request(200, 50, 1));
    scheduler.submit(2, request(100, 50, 2));
    scheduler.submit(3, request(10, 50, 3));
    // The first needs four blocks, the last one of them much later.
    EXPECT_EQ(run(scheduler), "1:0+64");
    EXPECT_EQ(run(scheduler), "1:64+64");
    EXPECT_EQ(run(scheduler), "1:128+64");
    EXPECT_EQ(run(scheduler), "1:192+8*") << "nobody overtakes the second";
    scheduler.cancel(1);
    EXPECT_EQ(run(scheduler), "2:0+64 3:0+10*");
}

TEST(Scheduler, BesideAnswersPromptsHaveTheirShareOfTheBudget) {
    SchedulerConfig config = kSmall;
    config.prefill_beside = 48;
    config.prefix_reuse = false;
    Scheduler scheduler(config);
    scheduler.submit(1, request(10, 3));
    scheduler.submit(2, request(100, 1));
    scheduler.submit(3, request(60, 1));
    EXPECT_EQ(run(scheduler), "1:0+10* 2:0+100* 3:0+18") << "nobody is written to yet";
    scheduler.submit(4, request(20, 1));
    EXPECT_EQ(run(scheduler), "1:10+1* 3:18+42* 4:0+6");
    EXPECT_EQ(run(scheduler), "1:11+1* 4:6+14*");
    // One that finds no room waits for a later step.
    Scheduler other(config);
    other.submit(1, request(10, 4));
    other.submit(2, request(128, 1));
    other.submit(3, request(90, 1));
    EXPECT_EQ(run(other), "1:0+10* 2:0+118");
    EXPECT_EQ(run(other), "1:10+1* 2:118+10* 3:0+38");
    EXPECT_EQ(run(other), "1:11+1* 3:38+48");
    EXPECT_EQ(run(other), "1:12+1* 3:86+4*");
}

TEST(Scheduler, TakesKnownBeginningsFromTheCache) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(128, 1));
    EXPECT_EQ(run(scheduler), "1:0+128*");
    EXPECT_EQ(scheduler.counters().cached, 2u);
    scheduler.submit(2, request(128, 2)); // the same; one token at least is computed
    const Step step = scheduler.next();
    EXPECT_EQ(describe(step), "2:127+1*");
    EXPECT_EQ(step.sequences()[0].written, 128u) << "its entry is not written again";
    EXPECT_EQ(scheduler.usage(2).cached, 127u);
    finish(scheduler, step);
    scheduler.submit(3, request(200, 2));
    scheduler.submit(4, request(100, 2, 1));
    const Step shared = scheduler.next();
    EXPECT_EQ(describe(shared), "2:128+1* 3:128+72* 4:0+55");
    EXPECT_EQ(shared.sequences()[0].blocks[0], shared.sequences()[1].blocks[0]);
    EXPECT_EQ(shared.sequences()[0].written, 128u);
    EXPECT_EQ(scheduler.counters().hits, 4u);
    finish(scheduler, shared);

    SchedulerConfig config = kSmall;
    config.prefix_reuse = false;
    Scheduler without(config);
    without.submit(1, request(128, 1));
    run(without);
    without.submit(2, request(128, 1));
    EXPECT_EQ(run(without), "2:0+128*");
    EXPECT_EQ(without.counters().cached, 0u);
}

TEST(Scheduler, AnswersAreReusedLikePrompts) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(60, 10));
    for (std::uint32_t i = 0; i < 10; ++i) {
        run(scheduler, 500 + i);
    }
    EXPECT_TRUE(scheduler.idle());
    Request next = request(60, 1);
    for (std::uint32_t i = 0; i < 10; ++i) {
        next.prompt.push_back(500 + i);
    }
    scheduler.submit(2, next);
    EXPECT_EQ(run(scheduler), "2:64+6*");
}

TEST(Scheduler, EndsRequestsAtAnyTime) {
    Scheduler scheduler(kSmall);
    EXPECT_EQ(scheduler.cancel(1), std::nullopt);
    scheduler.submit(1, request(10, 50, 1));
    scheduler.submit(2, request(10, 50, 2));
    scheduler.submit(3, request(10, 50, 3));
    EXPECT_EQ(scheduler.cancel(3)->prompt, 10u); // waiting
    scheduler.check();
    const Step step = scheduler.next();
    EXPECT_EQ(describe(step), "1:0+10* 2:0+10*");
    EXPECT_TRUE(scheduler.end(1).has_value()); // between next() and finish()
    EXPECT_EQ(scheduler.end(1), std::nullopt);
    EXPECT_FALSE(scheduler.has(1));
    EXPECT_EQ(scheduler.counters().used, 2u) << "the step still writes there";
    scheduler.submit(4, request(10, 50, 4)); // the step stays as it is
    EXPECT_TRUE(std::ranges::equal(step.sequences()[0].tokens, request(10, 50, 1).prompt));
    const auto results = finish(scheduler, step);
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].id, 2u);
    EXPECT_EQ(scheduler.counters().used, 1u);
    EXPECT_EQ(scheduler.end(2)->answer, 1u); // running
    scheduler.check();
    EXPECT_EQ(run(scheduler), "4:0+10*");
    scheduler.end(4);
    EXPECT_TRUE(scheduler.idle());
    EXPECT_EQ(scheduler.counters().used, 0u);
}

TEST(Scheduler, AFaultEndsItsRequestsAndIsNotReused) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(70, 50, 1));
    scheduler.submit(2, request(10, 50, 2));
    Step step = scheduler.next();
    auto results = scheduler.finish(step, Tokens{ops::kNoToken, 5});
    scheduler.check();
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results[0].reason, FinishReason::Failed);
    EXPECT_EQ(results[0].usage.answer, 0u);
    EXPECT_EQ(results[1].reason, FinishReason::None);
    EXPECT_EQ(scheduler.counters().cached, 0u);

    scheduler.submit(3, request(70, 50, 1));
    scheduler.submit(4, request(70, 50, 4));
    step = scheduler.next();
    EXPECT_EQ(describe(step), "2:10+1* 3:0+70* 4:0+57");
    scheduler.end(3);
    results = scheduler.fail(step);
    scheduler.check();
    ASSERT_EQ(results.size(), 2u) << "those that were ended are not told again";
    EXPECT_EQ(results[0].id, 2u);
    EXPECT_EQ(results[0].usage.answer, 1u);
    EXPECT_EQ(results[1].id, 4u);
    EXPECT_EQ(results[1].reason, FinishReason::Failed);
    EXPECT_TRUE(scheduler.idle());
    EXPECT_EQ(scheduler.counters().used, 0u);
    EXPECT_EQ(scheduler.counters().cached, 0u);
}

TEST(Scheduler, MakesStepsAhead) {
    Scheduler scheduler(kSmall);
    EXPECT_BELLOWS_ERROR(scheduler.ahead(), InvalidArgument, "0 steps are being computed");
    scheduler.submit(1, request(10, 2, 1));
    scheduler.submit(2, request(200, 50, 2));
    scheduler.submit(3, request(5, 50, 3));
    const Step first = scheduler.next();
    ASSERT_EQ(describe(first), "1:0+10* 2:0+118");
    const Step second = scheduler.ahead();
    ASSERT_EQ(describe(second), "1:10+1* 2:118+82* 3:0+5*");
    EXPECT_EQ(second.sequences()[0].tokens[0], ops::kDrawnBefore);
    EXPECT_EQ(second.sequences()[1].tokens[0], request(200, 50, 2).prompt[118]);
    EXPECT_BELLOWS_ERROR(scheduler.ahead(), InvalidArgument, "2 steps are being computed");
    EXPECT_BELLOWS_ERROR(scheduler.next(), InvalidArgument, "step 1 is neither finished");
    EXPECT_BELLOWS_ERROR(finish(scheduler, second), InvalidArgument, "step 2 is not the one");
    scheduler.check();
    EXPECT_EQ(finish(scheduler, first, 11).at(0).token, 11u);
    EXPECT_BELLOWS_ERROR(finish(scheduler, first), InvalidArgument, "step 1 is not the one");

    // Request 1 has its two tokens with the step that runs: no row of it is computed in vain.
    const Step third = scheduler.ahead();
    ASSERT_EQ(describe(third), "2:200+1* 3:5+1*");
    EXPECT_EQ(third.sequences()[0].tokens[0], ops::kDrawnBefore + 1);
    EXPECT_EQ(third.sequences()[1].tokens[0], ops::kDrawnBefore + 2);
    EXPECT_EQ(finish(scheduler, second).at(0).reason, FinishReason::Length);
    finish(scheduler, third);
    EXPECT_EQ(run(scheduler), "2:201+1* 3:6+1*");
}

TEST(Scheduler, ARequestThatEndsKeepsItsBlocksWhileAStepHasThem) {
    Scheduler scheduler(kSmall);
    Request ending = request(63, 50, 1);
    ending.end_tokens = {9};
    scheduler.submit(1, ending);
    scheduler.submit(2, request(63, 50, 2));
    Step first = scheduler.next(), second = scheduler.ahead();
    const auto results = scheduler.finish(first, Tokens{9, 5});
    scheduler.check();
    EXPECT_EQ(results.at(0).reason, FinishReason::EndToken);
    EXPECT_EQ(results.at(1).reason, FinishReason::None);
    EXPECT_EQ(scheduler.num_running(), 1u);
    EXPECT_EQ(scheduler.counters().used, 2u) << "the step behind writes there";
    EXPECT_EQ(scheduler.end(1), std::nullopt);
    first = std::move(second);
    second = scheduler.ahead();
    EXPECT_EQ(describe(first), "1:63+1* 2:63+1*");
    EXPECT_EQ(describe(second), "2:64+1*");
    EXPECT_EQ(second.sequences()[0].tokens[0], ops::kDrawnBefore + 1);
    ASSERT_TRUE(scheduler.end(2).has_value()); // while two steps have it
    EXPECT_TRUE(finish(scheduler, first).empty());
    EXPECT_EQ(scheduler.counters().used, 2u) << "of request 2 alone";
    // What the rows computed of known tokens is right, though nobody wanted one of them.
    EXPECT_EQ(scheduler.counters().cached, 2u);
    EXPECT_FALSE(scheduler.idle());
    EXPECT_TRUE(finish(scheduler, second).empty());
    EXPECT_TRUE(scheduler.idle());
    EXPECT_EQ(scheduler.counters().used, 0u);
}

TEST(Scheduler, NothingIsReusedOfWhatAStepAheadMadeOfAFaultOrOfNoToken) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(62, 50, 1));
    run(scheduler);
    run(scheduler);
    const Step first = scheduler.next(), second = scheduler.ahead();
    ASSERT_EQ(describe(first), "1:63+1*") << "it fills a block";
    const auto results = scheduler.finish(first, Tokens{ops::kNoToken});
    EXPECT_EQ(results.at(0).reason, FinishReason::Failed);
    EXPECT_TRUE(finish(scheduler, second).empty());
    EXPECT_EQ(scheduler.counters().cached, 0u);
    EXPECT_TRUE(scheduler.idle());

    scheduler.submit(2, request(63, 50, 2));
    const Step third = scheduler.next(), fourth = scheduler.ahead();
    EXPECT_EQ(scheduler.fail(third).size(), 1u);
    EXPECT_EQ(scheduler.counters().used, 1u);
    EXPECT_TRUE(scheduler.fail(fourth).empty());
    EXPECT_EQ(scheduler.counters().cached, 0u);

    scheduler.submit(3, request(63, 50, 3));
    const Step fifth = scheduler.next(), sixth = scheduler.ahead();
    EXPECT_TRUE(scheduler.end(3).has_value()); // before the token of the sixth step is known
    EXPECT_TRUE(finish(scheduler, fifth).empty());
    EXPECT_TRUE(finish(scheduler, sixth).empty());
    EXPECT_EQ(scheduler.counters().cached, 0u) << "nobody knows what fills the block";
    EXPECT_TRUE(scheduler.idle());
}

TEST(Scheduler, MakesNoStepAheadThatNeedsATokenOrBlocksThatThereAreNot) {
    SchedulerConfig config = kSmall;
    config.blocks = 4;
    config.token_budget = 300;
    Scheduler scheduler(config);
    Request asked = request(10, 50, 1);
    asked.sampling.presence_penalty = 1;
    scheduler.submit(1, asked);
    Step step = scheduler.next();
    EXPECT_TRUE(scheduler.ahead().empty()) << "the next draw depends on the token";
    finish(scheduler, step);
    scheduler.end(1);

    scheduler.submit(2, request(127, 50, 2));
    scheduler.submit(3, request(126, 50, 3));
    step = scheduler.next();
    ASSERT_EQ(describe(step), "2:0+127* 3:0+126*");
    Step behind = scheduler.ahead();
    ASSERT_EQ(describe(behind), "2:127+1* 3:126+1*") << "within the blocks that they have";
    finish(scheduler, step);
    EXPECT_TRUE(scheduler.ahead().empty()) << "nobody is preempted ahead";
    scheduler.check();
    finish(scheduler, behind);
    step = scheduler.next();
    EXPECT_EQ(describe(step), "2:128+1*");
    EXPECT_EQ(step.preempted(), std::vector<RequestId>{3});
    finish(scheduler, step);
}

TEST(Scheduler, ChecksDraftsBehindTheLastToken) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(10, 5));
    Step step = scheduler.next();
    EXPECT_EQ(describe(step), "1:0+10*");
    (void)scheduler.finish(step, Tokens{20}, Tokens{21});

    step = scheduler.next();
    EXPECT_EQ(describe(step), "1:10+2*");
    EXPECT_EQ(step.sequences()[0].drafts, 1u);
    EXPECT_EQ(step.num_sampling(), 2u);
    EXPECT_EQ(Tokens(step.tokens().begin(), step.tokens().end()), (Tokens{20, 21}));
    EXPECT_BELLOWS_ERROR(scheduler.finish(step, Tokens{21, 22}, Tokens{1}), InvalidArgument,
                         "2 tokens, and 1 drafts came");
    auto results = scheduler.finish(step, Tokens{21, 22}, Tokens{90, 23}); // accepted
    scheduler.check();
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results[0].token, 21u);
    EXPECT_EQ(results[1].token, 22u);
    EXPECT_EQ(results[1].draw, 1u);
    EXPECT_EQ(results[1].usage.accepted, 1u);

    step = scheduler.next();
    EXPECT_EQ(describe(step), "1:12+2*");
    EXPECT_EQ(step.tokens()[1], 23u) << "the draft of the last row that counts";
    results = scheduler.finish(step, Tokens{33, 34}, Tokens{91, 92}); // not accepted
    scheduler.check();
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].token, 33u);
    EXPECT_EQ(results[0].usage.drafted, 2u);

    step = scheduler.next(); // the fifth token is the last: there is no room for two
    EXPECT_EQ(describe(step), "1:13+1*") << "what was computed of the draft is written again";
    results = scheduler.finish(step, Tokens{35}, Tokens{93});
    EXPECT_EQ(results.at(0).reason, FinishReason::Length);
    EXPECT_TRUE(scheduler.idle());
}

TEST(Scheduler, DraftsEndWithTheAnswerAndGiveWayToOthers) {
    Scheduler scheduler(kSmall);
    Request asked = request(63, 50);
    asked.end_tokens = {7};
    scheduler.submit(1, asked);
    (void)scheduler.finish(scheduler.next(), Tokens{1}, Tokens{2});
    EXPECT_BELLOWS_ERROR(
        [&] {
            const Step step = scheduler.next();
            EXPECT_EQ(describe(step), "1:63+2*");
            try {
                (void)scheduler.ahead();
            } catch (...) {
                (void)scheduler.finish(step, Tokens{2, 3}, Tokens{4, 7});
                throw;
            }
        }(),
        InvalidArgument, "depends on which drafts are accepted");
    const auto results = scheduler.finish(scheduler.next(), Tokens{7, 5}, Tokens{8, 9});
    ASSERT_EQ(results.size(), 1u) << "nothing comes behind an end token";
    EXPECT_EQ(results[0].reason, FinishReason::EndToken);

    SchedulerConfig narrow = kSmall;
    narrow.token_budget = 3;
    Scheduler two(narrow);
    two.submit(1, request(1, 9));
    two.submit(2, request(1, 9));
    (void)two.finish(two.next(), Tokens{1, 1}, Tokens{2, 2});
    const Step step = two.next();
    EXPECT_EQ(describe(step), "1:1+2* 2:1+1*") << "a budget of three tokens has no room for two";
    (void)two.finish(step, Tokens{2, 3, 4}, Tokens{5, 6, 7});
    two.check();
}

TEST(Scheduler, StepsComeInTurn) {
    Scheduler scheduler(kSmall);
    scheduler.submit(1, request(10, 50));
    const Step first = scheduler.next();
    EXPECT_BELLOWS_ERROR(scheduler.next(), InvalidArgument, "step 1 is neither finished");
    EXPECT_BELLOWS_ERROR(scheduler.finish(first, {}), InvalidArgument,
                         "1 tokens to draw, and 0 tokens came");
    finish(scheduler, first);
    EXPECT_BELLOWS_ERROR(finish(scheduler, first), InvalidArgument, "step 1 is not the one");
    EXPECT_BELLOWS_ERROR(scheduler.fail(first), InvalidArgument, "step 1 is not the one");
    Step second = scheduler.next();
    EXPECT_BELLOWS_ERROR(finish(scheduler, first), InvalidArgument, "step 1 is not the one");
    const Step moved = std::move(second);
    EXPECT_EQ(describe(moved), "1:10+1*");
    finish(scheduler, moved);
}
