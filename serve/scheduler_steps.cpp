// SPDX-License-Identifier: MIT
// Makes steps, and takes their results in.
#include "scheduler_books.hpp"

#include <bellows/engine/sampling.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

using namespace books;

// --- The next step -------------------------------------------------------------------------------

/// Blocks for the sequence's first `tokens` tokens, or none at all.
bool Scheduler::grow(Sequence& sequence, std::uint64_t tokens) {
    const std::uint64_t wanted = blocks_of(tokens);
    if (wanted > sequence.blocks.size() + pool_.num_free()) {
        return false;
    }
    while (sequence.blocks.size() < wanted) {
        sequence.blocks.push_back(*pool_.allocate());
    }
    return true;
}

void Scheduler::stop_running(Sequence& sequence) {
    pool_.release(sequence.blocks);
    free_slots_.insert(sequence.slot);
    sequence.running = false;
    sequence.blocks.clear();
    sequence.computed = 0;
    sequence.published = 0;
    sequence.content = BlockContent::Start;
    sequence.draft.reset();
}

void Scheduler::preempt_last(Step& step) {
    Sequence& last = *running_.back();
    stop_running(last);
    ++last.usage.preemptions;
    running_.pop_back();
    waiting_.push_front(&last);
    step.preempted_.push_back(last.id);
}

/// Lets the first that waits run, unless blocks lack for all of its tokens beside those that the
/// running requests still need for theirs.
bool Scheduler::admit_first(std::uint64_t promised) {
    Sequence& sequence = *waiting_.front();
    std::vector<std::uint32_t> found;
    if (config_.prefix_reuse)
        found = pool_.find_prefix(sequence.tokens, sequence.tokens.size() / kBlockTokens);
    const auto held = static_cast<std::uint64_t>(
        std::ranges::count_if(found, [&](std::uint32_t block) { return pool_.held(block); }));
    if (blocks_of(sequence.tokens.size()) - held + promised > pool_.num_free()) {
        return false;
    }
    pool_.take(found);
    sequence.running = true;
    sequence.slot = *free_slots_.begin();
    free_slots_.erase(free_slots_.begin());
    // At least one token is left to compute, as the next one is drawn from its logits.
    sequence.computed =
        std::min<std::uint64_t>(found.size() * kBlockTokens, sequence.tokens.size() - 1);
    sequence.published = found.size();
    sequence.content = found.empty() ? BlockContent::Start : pool_.content(found.back());
    sequence.blocks = std::move(found);
    if (sequence.usage.preemptions == 0) {
        sequence.usage.cached = sequence.computed;
    }
    waiting_.pop_front();
    running_.push_back(&sequence);
    return true;
}

/// Whether a further token of it is to be computed, as far as that is known: the tokens that are
/// being drawn may end it, but do not fill it.
bool Scheduler::goes_on(const Sequence& sequence) const {
    return !sequence.ended &&
           sequence.usage.answer + sequence.drawn < sequence.request.max_tokens &&
           sequence.tokens.size() + sequence.drawn < config_.max_context;
}

/// What a step still has room for.
struct Scheduler::Room {
    std::uint64_t left, prompts; ///< tokens, and of them those of prompts
    std::uint64_t chunk;

    /// How many of the missing tokens of a sequence it takes.
    std::uint64_t take(std::uint64_t missing) {
        const std::uint64_t count = missing == 1 ? std::min<std::uint64_t>(left, 1)
                                                 : std::min({missing, chunk, left, prompts});
        left -= count;
        if (missing > 1)
            prompts -= count;
        return count;
    }
};

Scheduler::Room Scheduler::room_of_step() const {
    const bool writes = std::ranges::any_of(running_, [&](const Sequence* sequence) {
        return goes_on(*sequence) && sequence->missing() == 1;
    });
    const std::uint64_t all = config_.token_budget;
    return {all, writes ? config_.prefill_beside : all, config_.prefill_chunk};
}

/// How many drafts of a sequence a step checks behind its last token: none that could not become
/// part of the answer with a token behind it.
std::uint64_t Scheduler::drafts_of(const Sequence& sequence, std::uint64_t most) const {
    const bool room = sequence.usage.answer + 2 <= sequence.request.max_tokens &&
                      sequence.tokens.size() + 2 <= config_.max_context;
    return sequence.draft && room ? std::min<std::uint64_t>(most, 1) : 0;
}

Step Scheduler::next() {
    if (finished_ < steps_) {
        refuse("step " + std::to_string(finished_ + 1) + " is neither finished nor failed");
    }
    return plan();
}

Step Scheduler::ahead() {
    if (steps_ - finished_ != 1) {
        refuse(std::to_string(steps_ - finished_) +
               " steps are being computed; a step is made ahead behind one");
    }
    Room room = room_of_step();
    std::uint64_t wanted = 0;
    if (std::ranges::any_of(running_, [](const Sequence* it) { return it->draft.has_value(); }))
        refuse(
            "a step is made ahead, but which tokens it has depends on which drafts are accepted");
    for (const Sequence* sequence : running_) {
        if (!goes_on(*sequence)) {
            continue;
        }
        if (sequence->drawn > 0 && has_penalties(sequence->request.sampling)) {
            return {};
        }
        if (const std::uint64_t count = room.take(sequence->missing()); count > 0) {
            wanted += blocks_of(sequence->position() + count) - sequence->blocks.size();
        }
    }
    return wanted > pool_.num_free() ? Step() : plan();
}

Step Scheduler::plan() {
    Step step;
    std::vector<Part> parts;
    Room room = room_of_step();
    for (std::size_t i = 0; i < running_.size(); ++i) {
        Sequence& sequence = *running_[i];
        const std::uint64_t count = goes_on(sequence) ? room.take(sequence.missing()) : 0;
        if (count == 0)
            continue; // others' prompts have taken all: a later step computes it
        std::uint64_t drafts =
            count == sequence.missing() ? drafts_of(sequence, room.left) : std::uint64_t{0};
        if (drafts > 0 && !grow(sequence, sequence.position() + count + drafts))
            drafts = 0; // nobody loses blocks for a guess
        room.left -= drafts;
        while (i < running_.size() && !grow(sequence, sequence.position() + count + drafts)) {
            preempt_last(step); // itself, if it is the last
        }
        if (i < running_.size())
            parts.push_back({&sequence, count, drafts});
    }
    const auto lacking = [](const Sequence& sequence) {
        return blocks_of(sequence.tokens.size() + sequence.drawn) - sequence.blocks.size();
    };
    std::uint64_t promised = 0;
    for (const Sequence* sequence : running_) {
        promised += goes_on(*sequence) ? lacking(*sequence) : 0;
    }
    while (step.preempted_.empty() && !waiting_.empty() && room.left > 0 && room.prompts > 0 &&
           running_.size() < config_.max_sequences && admit_first(promised)) {
        Sequence& sequence = *running_.back();
        const std::uint64_t count = room.take(sequence.missing());
        require_consistent(grow(sequence, sequence.position() + count),
                           "an admitted request lacks blocks");
        promised += lacking(sequence);
        parts.push_back({&sequence, count, 0});
    }
    if (!parts.empty()) {
        step.number_ = ++steps_;
        lay_out(step, parts);
    }
    return step;
}

void Scheduler::lay_out(Step& step, std::vector<Part>& parts) {
    const auto others =
        std::ranges::stable_partition(parts, [](const Part& part) { return part.tokens == 1; });
    step.num_single_ = parts.size() - others.size();
    std::uint64_t num_tokens = 0, num_blocks = 0;
    for (const Part& part : parts) {
        num_tokens += part.tokens + part.drafts;
        num_blocks += part.sequence->blocks.size();
    }
    // The spans stay valid: there is room for all.
    step.tokens_.reserve(num_tokens);
    step.blocks_.reserve(num_blocks);
    for (const auto& [sequence, count, drafts] : parts) {
        const std::uint64_t position = sequence->position();
        const std::size_t token = step.tokens_.size();
        const std::size_t block = step.blocks_.size();
        if (position == sequence->tokens.size()) {
            step.tokens_.push_back(ops::kDrawnBefore + sequence->draw); // the only one
        } else {
            const auto first = sequence->tokens.begin() + static_cast<std::ptrdiff_t>(position);
            step.tokens_.insert(step.tokens_.end(), first,
                                first + static_cast<std::ptrdiff_t>(count));
        }
        step.blocks_.insert(step.blocks_.end(), sequence->blocks.begin(), sequence->blocks.end());
        const bool samples = count == sequence->missing();
        if (drafts > 0)
            step.tokens_.push_back(*sequence->draft);
        ++sequence->in_steps;
        sequence->in_flight += count + drafts;
        if (samples) {
            ++sequence->drawn;
            sequence->draw = static_cast<std::uint32_t>(step.num_sampling_);
            step.num_sampling_ += 1 + drafts;
        }
        step.sequences_.push_back(
            {.id = sequence->id,
             .slot = sequence->slot,
             .position = position,
             .tokens = std::span(step.tokens_).subspan(token, count + drafts),
             .blocks = std::span(step.blocks_).subspan(block, sequence->blocks.size()),
             .written = sequence->published * kBlockTokens,
             .samples = samples,
             .drafts = drafts,
             .next = samples ? 0 : sequence->tokens[position + count]});
    }
}

// --- The end of a step ---------------------------------------------------------------------------

void Scheduler::require_current(const Step& step) const {
    if (finished_ == steps_ || step.number_ != finished_ + 1) {
        refuse("step " + std::to_string(step.number_) + " is not the one that is being computed");
    }
}

/// The step that has this part of a sequence is over.
Scheduler::Sequence& Scheduler::leave(const StepSequence& part) {
    Sequence& sequence = *sequences_.at(part.id);
    --sequence.in_steps;
    sequence.in_flight -= part.tokens.size();
    sequence.drawn -= part.samples;
    return sequence;
}

/// The tokens' entries stand in the cache.
void Scheduler::advance(Sequence& sequence, std::uint64_t tokens) {
    if (sequence.computed + tokens > sequence.tokens.size()) {
        return; // it had ended before its token came
    }
    sequence.computed += tokens;
    while (config_.prefix_reuse && (sequence.published + 1) * kBlockTokens <= sequence.computed) {
        const auto text =
            std::span(sequence.tokens).subspan(sequence.published * kBlockTokens, kBlockTokens);
        sequence.content =
            pool_.publish(sequence.blocks[sequence.published], sequence.content, text);
        ++sequence.published;
    }
}

FinishReason Scheduler::append(Sequence& sequence, std::uint32_t token) {
    sequence.tokens.push_back(token);
    ++sequence.usage.answer;
    const Request& request = sequence.request;
    if (!request.ignore_end && std::ranges::count(request.end_tokens, token) > 0) {
        return FinishReason::EndToken;
    }
    if (sequence.usage.answer >= request.max_tokens) {
        return FinishReason::Length;
    }
    return sequence.tokens.size() >= config_.max_context ? FinishReason::Context
                                                         : FinishReason::None;
}

/// Forgets the running requests that have ended and that no further step computes, at the end of a
/// step.
void Scheduler::remove_ended() {
    ++finished_;
    std::erase_if(running_, [&](Sequence* sequence) {
        if (!sequence->ended || sequence->in_steps > 0) {
            return false;
        }
        stop_running(*sequence);
        sequences_.erase(sequence->id);
        return true;
    });
}

bool Scheduler::accepts(const StepSequence& part, std::uint64_t draft, std::uint32_t drawn) const {
    const std::size_t at = part.tokens.size() - part.drafts + draft;
    if (!config_.forced_acceptance)
        return part.tokens[at] == drawn;
    constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15; // spreads numbers evenly
    const std::uint64_t spread = (part.position + at) * kGolden;
    return static_cast<double>(spread >> 11) * 0x1p-53 < *config_.forced_acceptance;
}

/// Appends what was drawn from the rows of a sequence, up to the first draft that is not accepted
/// or the end of the answer. Returns how many drafts were accepted.
std::uint64_t Scheduler::take_drawn(const StepSequence& part, Sequence& sequence,
                                    std::span<const std::uint32_t> drawn, std::size_t first,
                                    std::vector<DrawnToken>& results) {
    std::uint64_t accepted = 0;
    sequence.draft.reset();
    sequence.usage.drafted += part.drafts;
    for (std::uint64_t i = 0; i < part.num_sampled(); ++i) {
        const std::uint32_t token = drawn[first + i];
        const bool more = i < part.drafts && token != ops::kNoToken && accepts(part, i, token);
        accepted += more;
        sequence.usage.accepted += more;
        const FinishReason reason =
            token == ops::kNoToken ? FinishReason::Failed : append(sequence, token);
        sequence.ended = reason != FinishReason::None;
        results.push_back({part.id, token, first + i, reason, sequence.usage});
        if (sequence.ended || !more)
            break;
    }
    return accepted;
}

std::vector<DrawnToken> Scheduler::finish(const Step& step, std::span<const std::uint32_t> sampled,
                                          std::span<const std::uint32_t> drafts) {
    if (sampled.size() != step.num_sampling()) {
        refuse("step " + std::to_string(step.number_) + " has " +
               std::to_string(step.num_sampling()) + " tokens to draw, and " +
               std::to_string(sampled.size()) + " tokens came");
    }
    if (!drafts.empty() && drafts.size() != sampled.size()) {
        refuse("step " + std::to_string(step.number_) + " has drawn " +
               std::to_string(sampled.size()) + " tokens, and " + std::to_string(drafts.size()) +
               " drafts came");
    }
    std::vector<DrawnToken> results;
    if (step.empty()) {
        return results;
    }
    require_current(step);
    std::size_t next = 0;
    for (const StepSequence& part : step.sequences()) {
        Sequence& sequence = leave(part);
        const std::size_t first = next;
        next += part.num_sampled();
        const auto of_part = sampled.subspan(first, part.num_sampled());
        if (std::ranges::count(of_part, ops::kNoToken) > 0) {
            // The fault may stand in the cache: nobody shall take it over.
            pool_.forget(sequence.blocks);
            sequence.faulty = true;
        } else if (!sequence.faulty && !part.samples) {
            advance(sequence, part.tokens.size());
        }
        if (!part.samples) {
            continue;
        }
        const bool had_ended = sequence.ended;
        std::uint64_t accepted = 0;
        if (!had_ended) {
            const std::size_t before = results.size();
            accepted = take_drawn(part, sequence, sampled, first, results);
            if (!drafts.empty() && !sequence.ended)
                sequence.draft = drafts[first + results.size() - before - 1];
        }
        if (!sequence.faulty) // what stands behind rejected drafts is written again
            advance(sequence, part.tokens.size() - part.drafts + accepted);
    }
    remove_ended();
    return results;
}

std::vector<DrawnToken> Scheduler::fail(const Step& step) {
    std::vector<DrawnToken> results;
    if (step.empty()) {
        return results;
    }
    require_current(step);
    for (const StepSequence& part : step.sequences()) {
        Sequence& sequence = leave(part);
        sequence.faulty = true;
        if (!std::exchange(sequence.ended, true)) {
            results.push_back({part.id, ops::kNoToken, 0, FinishReason::Failed, sequence.usage});
        }
    }
    remove_ended();
    return results;
}

} // namespace bellows
