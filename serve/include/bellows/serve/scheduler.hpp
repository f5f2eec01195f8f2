// SPDX-License-Identifier: MIT
#pragma once

// Decides which tokens of which requests a step of the model computes. Requests are served in the
// order in which they arrived: those that run first, then those that wait, within a budget of
// tokens. Long prompts are computed in chunks. When the cache has no block left, the request that
// arrived last is preempted: it gives up its blocks, waits at the head of the queue and is computed
// again later, with what it has generated. Full blocks of a known text are taken over from the
// cache. Host only, one thread at a time; no call blocks.
//
// A step goes: next(), compute, finish() or fail(). Every request that runs gets at least one token
// of each step unless it is preempted, and the one that arrived first never is. While a step is
// computed, ahead() may make the one behind it: it names tokens that are not known yet by their
// place among those that the first step draws.

#include <bellows/serve/block_pool.hpp>
#include <bellows/serve/request.hpp>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

namespace bellows {

struct SchedulerConfig {
    std::uint64_t blocks = 0; ///< of the cache; together at least max_context tokens
    /// The most tokens of a request, prompt and answer; at least 2.
    std::uint64_t max_context = 4096;
    std::uint64_t token_budget = 2048; ///< tokens of a step; at least 1
    std::uint64_t max_sequences = 64;  ///< requests that run at the same time
    std::uint64_t prefill_chunk = 0;   ///< tokens of one request in a step; 0: the budget
    /// Tokens of all prompts in a step that has tokens of answers, too, which then come sooner; 0:
    /// the budget.
    std::uint64_t prefill_beside = 0;
    bool prefix_reuse = true;
    /// For measurements: whether a draft is accepted does not depend on what is drawn in its place,
    /// but on its position alone, and this share of them is.
    std::optional<double> forced_acceptance{};
};

/// One request in a step.
struct StepSequence {
    RequestId id = 0;
    /// 0 .. max_sequences − 1: the request's row of the block tables, the same while it runs.
    std::uint32_t slot = 0;
    std::uint64_t position = 0; ///< of the first of `tokens`
    /// To compute, at least one. Of a step that ahead() made, ops::kDrawnBefore + j is the token
    /// that the step before draws for the j-th of its sequences that sample.
    std::span<const std::uint32_t> tokens;
    /// The request's blocks: position p stands in blocks[p / 64] at offset p % 64. They cover all
    /// of `tokens` and what came before them.
    std::span<const std::uint32_t> blocks;
    /// Entries of positions below this stand in the cache, in blocks that others may share: they
    /// are not written again. The last token of a text that the cache has whole is one of them.
    std::uint64_t written = 0;
    /// Whether the next token is drawn from the last row's logits. Its position is
    /// position + tokens.size().
    bool samples = false;
    /// So many of the last `tokens` are drafts, guesses of what will be drawn: where there are any,
    /// a token is drawn from the logits of each of them, too, and of the row before the first.
    std::uint64_t drafts = 0;
    /// Of one that does not sample: the token behind the last of `tokens`.
    std::uint32_t next = 0;

    /// Rows, the last ones, whose next tokens are drawn.
    std::uint64_t num_sampled() const noexcept { return samples ? 1 + drafts : 0; }
};

/// What one step computes. Owns all that its sequences show, so it stays as it is while the
/// scheduler goes on.
class Step {
public:
    Step() = default;
    Step(Step&&) noexcept = default;
    Step& operator=(Step&&) noexcept = default;

    /// In the order of the rows: those of one token first, then the others, each kind in order of
    /// arrival.
    const std::vector<StepSequence>& sequences() const noexcept { return sequences_; }
    std::uint64_t num_tokens() const noexcept { return tokens_.size(); } ///< rows
    std::uint64_t num_single() const noexcept { return num_single_; }    ///< sequences of one token
    std::uint64_t num_sampling() const noexcept { return num_sampling_; } ///< tokens to be drawn
    bool empty() const noexcept { return sequences_.empty(); }
    /// All tokens, [num_tokens()], in the order of the rows.
    std::span<const std::uint32_t> tokens() const noexcept { return tokens_; }
    /// Requests that lost their blocks and slots when this step was made.
    const std::vector<RequestId>& preempted() const noexcept { return preempted_; }
    std::uint64_t number() const noexcept { return number_; } ///< 1 for the first that is not empty

private:
    friend class Scheduler;
    std::vector<StepSequence> sequences_;
    std::vector<std::uint32_t> tokens_, blocks_;
    std::vector<RequestId> preempted_;
    std::uint64_t num_single_ = 0, num_sampling_ = 0, number_ = 0;
};

/// What a request has taken so far.
struct RequestUsage {
    std::uint64_t prompt = 0;      ///< tokens
    std::uint64_t cached = 0;      ///< tokens of the prompt that the cache had when it began to run
    std::uint64_t answer = 0;      ///< tokens, an end token included
    std::uint64_t preemptions = 0; ///< how often it was computed anew
    std::uint64_t drafted = 0;     ///< drafts that were checked
    std::uint64_t accepted = 0;    ///< of them, those that are part of the answer
};

/// A token that a step gave a request.
struct DrawnToken {
    RequestId id = 0;
    std::uint32_t token = 0; ///< the next of its answer; of Failed ops::kNoToken
    std::size_t draw = 0;    ///< it is the so-manyth that the step has drawn
    /// Not None: the scheduler has forgotten the request.
    FinishReason reason = FinishReason::None;
    RequestUsage usage;
};

class Scheduler {
public:
    /// Throws Error{InvalidArgument} that names the field, its value and what is accepted.
    explicit Scheduler(const SchedulerConfig& config);
    ~Scheduler();
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    /// Puts a request at the end of the queue. Throws Error{InvalidArgument} for an id that is in
    /// use, an empty prompt, a prompt that leaves no room for an answer in max_context, and
    /// max_tokens of 0; see also validate(), which the caller asks. Nothing is changed then.
    void submit(RequestId id, Request request);
    /// Ends a request: the user has gone, a stop string is complete. What it has taken; nothing if
    /// there is no such request (any more). Its blocks are free at once, or, if steps have been
    /// made with it that are not finished, when finish() or fail() of the last one comes; they do
    /// not report it.
    std::optional<RequestUsage> end(RequestId id);
    std::optional<RequestUsage> cancel(RequestId id) { return end(id); }

    /// The next step. Empty if no request runs or waits. Throws Error{InvalidArgument} if the step
    /// before is neither finished nor failed.
    Step next();
    /// The step behind the one that is being computed, which must be the only one. It has a row of
    /// each request that goes on, unless it is sure to end with the token that is being drawn; of a
    /// request that ends for what that token is, the row is computed in vain. Preempts nobody.
    /// Empty if there is nothing to do, blocks lack, or a request's draw depends on the token that
    /// is not known yet (penalties). Throws Error{InvalidArgument} if not one step is being
    /// computed, or if requests have drafts.
    Step ahead();
    /// The step is computed. sampled: the tokens that were drawn, in the order of the rows;
    /// ops::kNoToken fails its request. drafts: for each of them a guess of the token behind it, or
    /// none at all; those behind the last accepted tokens are checked by the next step. A draft is
    /// accepted where it is the token that was drawn in its place; what was drawn behind one that
    /// is not is forgotten. Gives a result for each token that an answer gets, of requests that
    /// were not ended in the meantime. Throws Error{InvalidArgument} if this is not the first of
    /// the steps that are being computed, or sampled or drafts have another length.
    std::vector<DrawnToken> finish(const Step& step, std::span<const std::uint32_t> sampled,
                                   std::span<const std::uint32_t> drafts = {});
    /// The step could not be computed: its requests end as Failed, and nothing of it is reused. A
    /// step that ahead() made behind it cannot be right either: fail that one, too.
    std::vector<DrawnToken> fail(const Step& step);

    /// From now on requests share no blocks, found or new: what is computed is not what it should
    /// be.
    void stop_reuse() noexcept { config_.prefix_reuse = false; }

    /// Of a request that was submitted and has not ended; the references hold until it ends, those
    /// of tokens() until finish(). Throws Error{InvalidArgument} for others.
    const Request& request(RequestId id) const;
    std::span<const std::uint32_t> tokens(RequestId id) const; ///< prompt and answer
    RequestUsage usage(RequestId id) const;
    bool has(RequestId id) const;

    std::uint64_t num_running() const noexcept; ///< without those that have ended
    std::uint64_t num_waiting() const noexcept { return waiting_.size(); }
    /// No request has blocks or waits.
    bool idle() const noexcept { return running_.empty() && waiting_.empty(); }
    /// As given, with the prefill_chunk that counts.
    const SchedulerConfig& config() const noexcept { return config_; }
    BlockPoolCounters counters() const { return pool_.counters(); }
    /// Counts everything again; throws Error{Internal} that says what does not agree. For tests.
    void check() const;

private:
    struct Sequence;
    struct Room;
    /// Of a step: so many tokens of a sequence.
    struct Part {
        Sequence* sequence;
        std::uint64_t tokens;
        std::uint64_t drafts = 0; ///< behind them
    };

    Sequence& known(RequestId id) const;
    bool goes_on(const Sequence& sequence) const;
    Room room_of_step() const;
    Step plan();
    bool grow(Sequence& sequence, std::uint64_t tokens);
    bool admit_first(std::uint64_t promised);
    void preempt_last(Step& step);
    void stop_running(Sequence& sequence);
    std::uint64_t drafts_of(const Sequence& sequence, std::uint64_t most) const;
    static void lay_out(Step& step, std::vector<Part>& parts);
    bool accepts(const StepSequence& part, std::uint64_t draft, std::uint32_t drawn) const;
    std::uint64_t take_drawn(const StepSequence& part, Sequence& sequence,
                             std::span<const std::uint32_t> drawn, std::size_t first,
                             std::vector<DrawnToken>& results);
    Sequence& leave(const StepSequence& part);
    void require_current(const Step& step) const;
    void advance(Sequence& sequence, std::uint64_t tokens);
    FinishReason append(Sequence& sequence, std::uint32_t token);
    void remove_ended();

    SchedulerConfig config_;
    BlockPool pool_;
    std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences_;
    std::vector<Sequence*> running_; ///< in order of arrival, all before those that wait
    std::deque<Sequence*> waiting_;
    std::set<std::uint32_t> free_slots_;
    std::uint64_t arrivals_ = 0;
    std::uint64_t steps_ = 0;    ///< that were made
    std::uint64_t finished_ = 0; ///< of them, or failed; at most two fewer
};

} // namespace bellows
