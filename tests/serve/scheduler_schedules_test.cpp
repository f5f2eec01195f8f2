// SPDX-License-Identifier: MIT
// Random schedules of requests with common beginnings, cancels, faults and too few blocks, in steps
// of which many are made ahead. The model is a hash of all cache entries that a token sees, read
// through the block tables, so that a wrong entry anywhere gives another answer than the one
// computed without a scheduler.
#include "support/temporary_folder.hpp"

#include <bellows/base/mix.hpp>
#include <bellows/engine/sampling.hpp>
#include <bellows/serve/scheduler.hpp>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

using namespace bellows;

namespace {

using Tokens = std::vector<std::uint32_t>;
constexpr std::uint32_t kVocabulary = 50;
constexpr std::uint32_t kEnd = 7;

/// What the cache holds of a token: it depends on all tokens up to it.
std::uint64_t entry(std::uint64_t before, std::uint32_t token) {
    return mix(before ^ token);
}
std::uint64_t see(std::uint64_t sum, std::uint64_t entry) {
    return mix(sum + entry);
}
std::uint32_t choose(std::uint64_t sum) {
    return static_cast<std::uint32_t>(mix(sum) % kVocabulary);
}

struct Answer {
    Tokens tokens;
    FinishReason reason = FinishReason::None;
};

Answer answer_alone(const Request& request, std::uint64_t max_context) {
    Answer answer;
    std::uint64_t last = 0, sum = 0;
    const auto read = [&](std::uint32_t token) {
        last = entry(last, token);
        sum = see(sum, last);
    };
    std::ranges::for_each(request.prompt, read);
    while (answer.reason == FinishReason::None) {
        const std::uint32_t token = choose(sum);
        answer.tokens.push_back(token);
        read(token);
        if (!request.ignore_end && std::ranges::count(request.end_tokens, token) > 0) {
            answer.reason = FinishReason::EndToken;
        } else if (answer.tokens.size() == request.max_tokens) {
            answer.reason = FinishReason::Length;
        } else if (request.prompt.size() + answer.tokens.size() == max_context) {
            answer.reason = FinishReason::Context;
        }
    }
    return answer;
}

/// What all schedules together met.
struct Met {
    std::uint64_t steps = 0, preemptions = 0, hits = 0, evictions = 0, passed_over = 0;
    std::uint64_t ended_in_step = 0, ended_between = 0, faults = 0, failed_steps = 0, shared = 0;
    std::uint64_t ahead = 0, not_ahead = 0, in_vain = 0, failed_ahead = 0;
    std::map<FinishReason, std::uint64_t> reasons;
};

class Schedule {
public:
    Schedule(std::uint64_t seed, Met& met)
        : random_(seed), met_(met), config_(draw_config()), scheduler_(config_),
          cache_(config_.blocks * kBlockTokens, 0) {
        for (int i = 0; i < 3; ++i) {
            beginnings_.emplace_back();
            std::generate_n(std::back_inserter(beginnings_.back()), config_.max_context,
                            [&] { return below(kVocabulary); });
        }
    }

    void run() {
        constexpr std::uint64_t kRequests = 25;
        constexpr std::uint64_t kMostSteps = 50'000;
        std::uint64_t steps = 0;
        while (submitted_ < kRequests || !scheduler_.idle()) {
            ASSERT_LT(++steps, kMostSteps) << "the schedule does not end";
            for (auto count = below(3); count > 0 && submitted_ < kRequests; --count) {
                submit();
            }
            if (below(25) == 0) {
                end_some(met_.ended_between);
            }
            if (started_.empty()) {
                ASSERT_NO_FATAL_FAILURE(start(scheduler_.next(), false));
            }
            if (started_.empty()) {
                continue;
            }
            if (started_.size() == 1 && below(4) != 0) {
                ASSERT_NO_FATAL_FAILURE(start(scheduler_.ahead(), true));
            }
            if (below(20) == 0) {
                end_some(met_.ended_in_step);
            }
            ASSERT_NO_FATAL_FAILURE(finish_first());
        }
        EXPECT_TRUE(expected_.empty()) << "a request has no end";
        const BlockPoolCounters counters = scheduler_.counters();
        EXPECT_EQ(counters.used, 0u);
        EXPECT_EQ(counters.free, config_.blocks);
        met_.steps += steps;
        met_.hits += counters.hits;
        met_.evictions += counters.evictions;
    }

private:
    struct Started {
        Step step;
        Tokens sampled;
    };
    struct Expected {
        Answer answer;
        Tokens tokens; ///< that came
    };
    /// What the step before showed of a request that runs.
    struct Shown {
        std::uint32_t slot;
        std::vector<std::uint32_t> blocks;
        std::uint64_t computed;
    };

    std::uint32_t below(std::uint64_t count) {
        return static_cast<std::uint32_t>(random_() % count);
    }

    SchedulerConfig draw_config() {
        SchedulerConfig config;
        config.max_context = 2 + below(400);
        const std::uint64_t least = (config.max_context + kBlockTokens - 1) / kBlockTokens;
        config.blocks = least + below(2 * least + 2);
        config.max_sequences = 1 + below(8);
        config.token_budget = 1 + below(below(4) == 0 ? 12 : 300);
        config.prefill_chunk = below(3) == 0 ? 0 : 1 + below(150);
        config.prefill_beside = below(2) == 0 ? 0 : 1 + below(config.token_budget);
        config.prefix_reuse = below(5) != 0;
        return config;
    }

    void submit() {
        Request request;
        const Tokens& beginning = beginnings_[below(beginnings_.size())];
        const std::uint64_t length = 1 + below(config_.max_context - 1);
        const std::uint64_t common = below(2) == 0 ? length : below(length + 1);
        request.prompt.assign(beginning.begin(),
                              beginning.begin() + static_cast<std::ptrdiff_t>(common));
        while (request.prompt.size() < length) {
            request.prompt.push_back(below(kVocabulary));
        }
        request.max_tokens = 1 + below(150);
        if (below(2) == 0) {
            request.end_tokens = {kEnd, kVocabulary};
            request.ignore_end = below(4) == 0;
        }
        request.sampling.presence_penalty = below(12) == 0 ? 1 : 0;
        const RequestId id = 1000 + submitted_++;
        expected_[id].answer = answer_alone(request, config_.max_context);
        scheduler_.submit(id, request);
    }

    void end_some(std::uint64_t& met) {
        if (expected_.empty()) {
            return;
        }
        auto it = expected_.begin();
        std::advance(it, below(expected_.size()));
        const auto usage = scheduler_.end(it->first);
        ASSERT_TRUE(usage.has_value());
        EXPECT_EQ(usage->answer, it->second.tokens.size());
        EXPECT_FALSE(scheduler_.end(it->first).has_value());
        ++met;
        ended_.insert(it->first);
        running_.erase(it->first);
        expected_.erase(it);
    }

    void start(Step step, bool ahead) {
        if (step.empty() && ahead) {
            ++met_.not_ahead;
            scheduler_.check();
            return;
        }
        ASSERT_NO_FATAL_FAILURE(check_step(step, ahead));
        scheduler_.check();
        if (step.empty()) {
            return;
        }
        met_.ahead += ahead;
        Tokens sampled = compute(step);
        started_.push_back({std::move(step), std::move(sampled)});
    }

    void finish_first() {
        const bool fails = below(200) == 0;
        do {
            const Started first = std::move(started_.front());
            started_.pop_front();
            if (fails) {
                ++met_.failed_steps;
                met_.failed_ahead += !started_.empty();
                spoil(first.step);
            }
            for (const StepSequence& it : first.step.sequences()) {
                met_.in_vain += !scheduler_.has(it.id);
            }
            for (const DrawnToken& result : fails ? scheduler_.fail(first.step)
                                                  : scheduler_.finish(first.step, first.sampled)) {
                ASSERT_NO_FATAL_FAILURE(take(result));
            }
            scheduler_.check();
        } while (fails && !started_.empty()); // the one behind it is wrong, too
    }

    /// The token of a row that was made ahead; checks that it is the request's own.
    void check_name(const StepSequence& it) {
        ASSERT_EQ(it.tokens.size(), 1u);
        ASSERT_FALSE(has_penalties(scheduler_.request(it.id).sampling));
        std::size_t draw = it.tokens[0] - ops::kDrawnBefore;
        for (const StepSequence& before : started_.front().step.sequences()) {
            if (before.samples && draw-- == 0) {
                ASSERT_EQ(before.id, it.id);
                return;
            }
        }
        FAIL() << "the step before draws no such token";
    }

    /// Whether the token that is being drawn is sure to be its last one.
    bool ends(RequestId id) const {
        return expected_.at(id).tokens.size() + 1 == scheduler_.request(id).max_tokens ||
               scheduler_.tokens(id).size() + 1 == config_.max_context;
    }

    void check_step(const Step& step, bool ahead) {
        const auto drawn = [&](RequestId id) {
            return ahead && std::ranges::any_of(
                                started_.front().step.sequences(),
                                [&](const StepSequence& it) { return it.id == id && it.samples; });
        };
        std::uint64_t tokens = 0, sampling = 0;
        std::set<std::uint32_t> slots;
        std::set<std::uint64_t> written;
        std::map<RequestId, Shown> shown;
        std::map<std::uint32_t, const StepSequence*> holders;
        RequestId before = 0;
        for (std::size_t i = 0; i < step.sequences().size(); ++i) {
            const StepSequence& it = step.sequences()[i];
            ASSERT_TRUE(scheduler_.has(it.id));
            ASSERT_EQ(it.tokens.size() == 1, i < step.num_single());
            before = i == step.num_single() ? 0 : before;
            ASSERT_LT(before, it.id) << "order of arrival";
            before = it.id;
            ASSERT_GE(it.tokens.size(), 1u);
            ASSERT_LE(it.tokens.size(), scheduler_.config().prefill_chunk);
            ASSERT_LT(it.slot, config_.max_sequences);
            ASSERT_TRUE(slots.insert(it.slot).second);
            const auto known = scheduler_.tokens(it.id);
            if (drawn(it.id)) {
                ASSERT_EQ(it.position, known.size());
                ASSERT_FALSE(ends(it.id)) << "no token of it is wanted any more";
                ASSERT_NO_FATAL_FAILURE(check_name(it));
            } else {
                ASSERT_TRUE(
                    std::ranges::equal(it.tokens, known.subspan(it.position, it.tokens.size())));
            }
            ASSERT_EQ(it.samples, it.position + it.tokens.size() == known.size() + drawn(it.id));
            tokens += it.tokens.size();
            sampling += it.samples;
            const std::uint64_t end = it.position + it.tokens.size();
            ASSERT_EQ(it.blocks.size(), (end + kBlockTokens - 1) / kBlockTokens);
            const auto first_written = [](const StepSequence& of) {
                return std::max(of.position, of.written);
            };
            for (std::uint64_t p = first_written(it); p < end; ++p) {
                ASSERT_TRUE(written.insert(place(it, p)).second) << "a place is written twice";
            }
            for (std::uint64_t block = 0; block < it.blocks.size(); ++block) {
                const auto [other, added] = holders.try_emplace(it.blocks[block], &it);
                if (!added) {
                    const std::uint64_t text = (block + 1) * kBlockTokens;
                    ASSERT_TRUE(first_written(it) >= text && first_written(*other->second) >= text)
                        << "a shared block is full";
                    ASSERT_EQ(other->second->blocks[block], it.blocks[block]);
                    ++met_.shared;
                }
            }
            if (const auto last = running_.find(it.id); last != running_.end()) {
                ASSERT_EQ(it.slot, last->second.slot);
                ASSERT_EQ(it.position, last->second.computed);
                ASSERT_TRUE(std::ranges::equal(last->second.blocks,
                                               it.blocks.first(last->second.blocks.size())));
            } else {
                ASSERT_TRUE(step.preempted().empty()) << "admitted in a step that preempted";
                ASSERT_TRUE(it.position % kBlockTokens == 0 || it.position + 1 == it.written)
                    << "but for the last token of a text that the cache has whole";
                ASSERT_TRUE(config_.prefix_reuse || it.position == 0);
            }
            shown[it.id] = {it.slot, {it.blocks.begin(), it.blocks.end()}, end};
        }
        ASSERT_LE(tokens, config_.token_budget);
        ASSERT_EQ(tokens, step.num_tokens());
        ASSERT_EQ(sampling, step.num_sampling());

        for (const RequestId id : step.preempted()) { // the last of those that ran
            ASSERT_TRUE(running_.contains(id));
            ASSERT_EQ(id, running_.rbegin()->first);
            running_.erase(id);
            ++met_.preemptions;
        }
        for (const auto& [id, last] : running_) {
            if (shown.contains(id))
                continue;
            shown[id] = last;
            if (drawn(id) && ends(id))
                continue;
            // A prompt that found no room beside answers waits for a later step.
            ASSERT_TRUE(config_.prefill_beside > 0 && step.num_single() > 0 &&
                        scheduler_.tokens(id).size() - last.computed > 1)
                << "a running request gets no token";
            ++met_.passed_over;
        }
        ASSERT_EQ(shown.size(), scheduler_.num_running());
        running_ = std::move(shown);
        ASSERT_TRUE(ahead || step.empty() == scheduler_.idle())
            << "nothing is done for those that wait";
        ASSERT_TRUE(!ahead || step.preempted().empty());
    }

    static std::uint64_t place(const StepSequence& it, std::uint64_t position) {
        return it.blocks[position / kBlockTokens] * kBlockTokens + position % kBlockTokens;
    }

    /// All rows write their entries, then each that samples reads what it sees.
    Tokens compute(const Step& step) {
        Tokens sampled;
        for (const StepSequence& it : step.sequences()) {
            std::uint64_t last = it.position == 0 ? 0 : cache_[place(it, it.position - 1)];
            for (std::size_t i = 0; i < it.tokens.size(); ++i) {
                const std::uint32_t token = it.tokens[i];
                last = entry(last, token < ops::kDrawnBefore
                                       ? token
                                       : started_.back().sampled.at(token - ops::kDrawnBefore));
                cache_[place(it, it.position + i)] = last;
            }
        }
        for (const StepSequence& it : step.sequences()) {
            if (!it.samples) {
                continue;
            }
            std::uint64_t sum = 0;
            for (std::uint64_t p = 0; p < it.position + it.tokens.size(); ++p) {
                sum = see(sum, cache_[place(it, p)]);
            }
            const bool fault = below(400) == 0;
            sampled.push_back(fault ? ops::kNoToken : choose(sum));
            if (fault) { // of what this request alone wrote
                ++met_.faults;
                spoil(it);
            }
        }
        return sampled;
    }

    /// Nobody may read these places any more.
    void spoil(const StepSequence& it) {
        for (std::uint64_t p = it.position; p < it.position + it.tokens.size(); ++p) {
            cache_[place(it, p)] = random_();
        }
    }
    void spoil(const Step& step) {
        for (const StepSequence& it : step.sequences()) {
            spoil(it);
        }
    }

    void take(const DrawnToken& result) {
        ASSERT_FALSE(ended_.contains(result.id)) << "it was ended before";
        const auto it = expected_.find(result.id);
        ASSERT_NE(it, expected_.end());
        auto& [answer, tokens] = it->second;
        ++met_.reasons[result.reason];
        if (result.reason == FinishReason::Failed) {
            ASSERT_EQ(result.token, ops::kNoToken);
        } else {
            tokens.push_back(result.token);
            ASSERT_LE(tokens.size(), answer.tokens.size());
            ASSERT_EQ(tokens.back(), answer.tokens[tokens.size() - 1])
                << "request " << result.id << ", token " << tokens.size() - 1;
        }
        ASSERT_EQ(result.usage.answer, tokens.size());
        const bool last = tokens.size() == answer.tokens.size();
        ASSERT_EQ(scheduler_.has(result.id), result.reason == FinishReason::None);
        if (result.reason != FinishReason::Failed) {
            ASSERT_EQ(result.reason, last ? answer.reason : FinishReason::None);
        }
        if (result.reason != FinishReason::None) {
            expected_.erase(it);
            running_.erase(result.id);
        }
    }

    std::mt19937_64 random_;
    Met& met_;
    SchedulerConfig config_;
    Scheduler scheduler_;
    std::vector<std::uint64_t> cache_;
    std::vector<Tokens> beginnings_;
    std::uint64_t submitted_ = 0;
    std::map<RequestId, Expected> expected_;
    std::set<RequestId> ended_;
    std::map<RequestId, Shown> running_;
    std::deque<Started> started_; ///< steps that are not finished
};

} // namespace

TEST(Schedules, GiveTheAnswersOfEachRequestAlone) {
    Met met;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        ASSERT_NO_FATAL_FAILURE(Schedule(seed, met).run());
        ASSERT_FALSE(testing::Test::HasFailure());
    }
    // The schedules meet what they are for.
    EXPECT_GT(met.preemptions, 100u);
    EXPECT_GT(met.hits, 500u);
    EXPECT_GT(met.evictions, 1000u);
    EXPECT_GT(met.shared, 1000u);
    EXPECT_GT(met.passed_over, 50u);
    EXPECT_GT(met.ended_in_step, 100u);
    EXPECT_GT(met.ended_between, 100u);
    EXPECT_GT(met.faults, 50u);
    EXPECT_GT(met.failed_steps, 50u);
    EXPECT_GT(met.ahead, 10'000u);
    EXPECT_GT(met.not_ahead, 1000u);
    EXPECT_GT(met.in_vain, 1000u);
    EXPECT_GT(met.failed_ahead, 20u);
    for (const FinishReason reason :
         {FinishReason::None, FinishReason::EndToken, FinishReason::Length, FinishReason::Context,
          FinishReason::Failed}) {
        EXPECT_GT(met.reasons[reason], 50u) << to_string(reason);
    }
}
