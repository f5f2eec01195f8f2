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

Step Scheduler::next() {
    if (in_step_) {
        refuse("step " + std::to_string(steps_) + " is neither finished nor failed");
    }
    Step step;
    std::vector<Part> parts;
    std::uint64_t left = config_.token_budget;
    const bool writes = std::ranges::any_of(
        running_, [](const Sequence* sequence) { return sequence->missing() == 1; });
    std::uint64_t prompts = writes ? config_.prefill_beside : left;
    const auto count_of = [&](const Sequence& sequence) {
        const std::uint64_t missing = sequence.missing();
        return missing == 1 ? std::min<std::uint64_t>(left, 1)
                            : std::min({missing, config_.prefill_chunk, left, prompts});
    };
    const auto take = [&](Sequence& sequence, std::uint64_t count) {
        parts.push_back({&sequence, count});
        left -= count;
        if (sequence.missing() > 1)
            prompts -= count;
    };
    for (std::size_t i = 0; i < running_.size(); ++i) {
        Sequence& sequence = *running_[i];
        const std::uint64_t count = count_of(sequence);
        if (count == 0)
            continue; // others' prompts have taken all: a later step computes it
        while (i < running_.size() && !grow(sequence, sequence.computed + count)) {
            preempt_last(step); // itself, if it is the last
        }
        if (i < running_.size())
            take(sequence, count);
    }
    std::uint64_t promised = 0;
    for (const Sequence* sequence : running_) {
        promised += blocks_of(sequence->tokens.size()) - sequence->blocks.size();
    }
    while (step.preempted_.empty() && !waiting_.empty() && left > 0 && prompts > 0 &&
           running_.size() < config_.max_sequences && admit_first(promised)) {
        Sequence& sequence = *running_.back();
        const std::uint64_t count = count_of(sequence);
        require_consistent(grow(sequence, sequence.computed + count),
                           "an admitted request lacks blocks");
        promised += blocks_of(sequence.tokens.size()) - sequence.blocks.size();
        take(sequence, count);
    }
    if (!parts.empty()) {
        in_step_ = true;
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
        num_tokens += part.tokens;
        num_blocks += part.sequence->blocks.size();
    }
    // The spans stay valid: there is room for all.
    step.tokens_.reserve(num_tokens);
    step.blocks_.reserve(num_blocks);
    for (const auto& [sequence, count] : parts) {
        const auto first =
            sequence->tokens.begin() + static_cast<std::ptrdiff_t>(sequence->computed);
        const std::size_t token = step.tokens_.size();
        const std::size_t block = step.blocks_.size();
        step.tokens_.insert(step.tokens_.end(), first, first + static_cast<std::ptrdiff_t>(count));
        step.blocks_.insert(step.blocks_.end(), sequence->blocks.begin(), sequence->blocks.end());
        const bool samples = count == sequence->missing();
        step.num_sampling_ += samples;
        step.sequences_.push_back(
            {.id = sequence->id,
             .slot = sequence->slot,
             .position = sequence->computed,
             .tokens = std::span(step.tokens_).subspan(token, count),
             .blocks = std::span(step.blocks_).subspan(block, sequence->blocks.size()),
             .written = sequence->published * kBlockTokens,
             .samples = samples});
    }
}

// --- The end of a step ---------------------------------------------------------------------------

void Scheduler::require_current(const Step& step) const {
    if (!in_step_ || step.number_ != steps_) {
        refuse("step " + std::to_string(step.number_) + " is not the one that is being computed");
    }
}

/// The tokens' entries stand in the cache.
void Scheduler::advance(Sequence& sequence, std::uint64_t tokens) {
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

/// Forgets the running requests that have ended, at the end of a step.
void Scheduler::remove_ended() {
    in_step_ = false;
    std::erase_if(running_, [&](Sequence* sequence) {
        if (!sequence->ended) {
            return false;
        }
        stop_running(*sequence);
        sequences_.erase(sequence->id);
        return true;
    });
}

std::vector<StepResult> Scheduler::finish(const Step& step,
                                          std::span<const std::uint32_t> sampled) {
    if (sampled.size() != step.num_sampling()) {
        refuse("step " + std::to_string(step.number_) + " has " +
               std::to_string(step.num_sampling()) + " sequences that sample, and " +
               std::to_string(sampled.size()) + " tokens came");
    }
    std::vector<StepResult> results;
    if (step.empty()) {
        return results;
    }
    require_current(step);
    std::size_t next = 0;
    for (const StepSequence& part : step.sequences()) {
        Sequence& sequence = *sequences_.at(part.id);
        const std::uint32_t token = part.samples ? sampled[next++] : 0;
        if (part.samples && token == ops::kNoToken) {
            // The fault may stand in the cache: nobody shall take it over.
            pool_.forget(sequence.blocks);
        } else {
            advance(sequence, part.tokens.size());
        }
        if (!part.samples || sequence.ended) {
            continue;
        }
        const FinishReason reason =
            token == ops::kNoToken ? FinishReason::Failed : append(sequence, token);
        sequence.ended = reason != FinishReason::None;
        results.push_back({part.id, token, reason, sequence.usage});
    }
    remove_ended();
    return results;
}

std::vector<StepResult> Scheduler::fail(const Step& step) {
    std::vector<StepResult> results;
    if (step.empty()) {
        return results;
    }
    require_current(step);
    for (const StepSequence& part : step.sequences()) {
        Sequence& sequence = *sequences_.at(part.id);
        if (!std::exchange(sequence.ended, true)) {
            results.push_back({part.id, ops::kNoToken, FinishReason::Failed, sequence.usage});
        }
    }
    remove_ended();
    return results;
}

} // namespace bellows
