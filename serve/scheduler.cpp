// SPDX-License-Identifier: MIT
#include <bellows/serve/scheduler.hpp>

#include <bellows/base/error.hpp>
#include <bellows/engine/sampling.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

struct Scheduler::Sequence {
    RequestId id = 0;
    Request request;
    std::uint64_t arrival = 0;
    std::vector<std::uint32_t> tokens; ///< prompt and answer
    RequestUsage usage;
    bool ended = false; ///< while a step computes it

    // While it runs:
    bool running = false;
    std::uint32_t slot = 0;
    std::uint64_t computed = 0; ///< of tokens, those whose entries stand in the blocks
    std::vector<std::uint32_t> blocks;
    std::uint64_t published = 0;                ///< blocks whose text the pool knows
    BlockContent content = BlockContent::Start; ///< of the published blocks

    std::uint64_t missing() const noexcept { return tokens.size() - computed; }
};

namespace {

std::uint64_t blocks_of(std::uint64_t tokens) noexcept {
    return tokens / kBlockTokens + (tokens % kBlockTokens != 0);
}

[[noreturn]] void refuse(const std::string& message) {
    throw Error(ErrorCode::InvalidArgument, message);
}

void require_consistent(bool holds, const char* what) {
    if (!holds) {
        throw Error(ErrorCode::Internal, std::string("scheduler: ") + what);
    }
}

SchedulerConfig checked(SchedulerConfig config) {
    const auto of = [](const char* field, std::uint64_t value) {
        return std::string(field) + " is " + std::to_string(value) + "; ";
    };
    if (config.max_context < 2) {
        refuse(of("max_context", config.max_context) + "at least 2 tokens are needed");
    }
    if (config.max_sequences == 0 || config.max_sequences > 1'000'000) {
        refuse(of("max_sequences", config.max_sequences) + "accepted is 1 to 1000000");
    }
    if (config.token_budget == 0) {
        refuse(of("token_budget", config.token_budget) + "at least 1 is needed");
    }
    if (config.blocks < blocks_of(config.max_context)) {
        refuse(of("blocks", config.blocks) + "a request of max_context, " +
               std::to_string(config.max_context) + " tokens, needs " +
               std::to_string(blocks_of(config.max_context)) +
               " blocks: give the cache more memory, or lower max_context");
    }
    if (config.prefill_chunk == 0 || config.prefill_chunk > config.token_budget) {
        config.prefill_chunk = config.token_budget;
    }
    return config;
}

} // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(checked(config)), pool_(config_.blocks) {
    for (std::uint32_t slot = 0; slot < config_.max_sequences; ++slot) {
        free_slots_.insert(slot);
    }
}

Scheduler::~Scheduler() = default;

// --- Requests ------------------------------------------------------------------------------------

void Scheduler::submit(RequestId id, Request request) {
    if (sequences_.contains(id)) {
        refuse("request " + std::to_string(id) + " exists already; every request needs its own id");
    }
    if (request.prompt.empty()) {
        refuse("the prompt is empty; at least one token is needed");
    }
    if (request.prompt.size() >= config_.max_context) {
        refuse("the prompt has " + std::to_string(request.prompt.size()) +
               " tokens; the context of " + std::to_string(config_.max_context) +
               " tokens takes at most " + std::to_string(config_.max_context - 1) +
               " and one of the answer");
    }
    if (request.max_tokens == 0) {
        refuse("max_tokens is 0; at least 1 is needed");
    }
    auto sequence = std::make_unique<Sequence>();
    sequence->id = id;
    sequence->arrival = arrivals_++;
    sequence->tokens = request.prompt;
    sequence->usage.prompt = request.prompt.size();
    sequence->request = std::move(request);
    waiting_.push_back(sequence.get());
    sequences_.emplace(id, std::move(sequence));
}

std::optional<RequestUsage> Scheduler::end(RequestId id) {
    if (!has(id)) {
        return std::nullopt;
    }
    Sequence& sequence = *sequences_.at(id);
    const RequestUsage usage = sequence.usage;
    if (!sequence.running) {
        std::erase(waiting_, &sequence);
    } else if (in_step_) {
        sequence.ended = true;
        return usage;
    } else {
        stop_running(sequence);
        std::erase(running_, &sequence);
    }
    sequences_.erase(id);
    return usage;
}

bool Scheduler::has(RequestId id) const {
    const auto it = sequences_.find(id);
    return it != sequences_.end() && !it->second->ended;
}

Scheduler::Sequence& Scheduler::known(RequestId id) const {
    if (!has(id)) {
        refuse("there is no request " + std::to_string(id) + ", or it has ended");
    }
    return *sequences_.at(id);
}

const Request& Scheduler::request(RequestId id) const {
    return known(id).request;
}

std::span<const std::uint32_t> Scheduler::tokens(RequestId id) const {
    return known(id).tokens;
}

RequestUsage Scheduler::usage(RequestId id) const {
    return known(id).usage;
}

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
    if (config_.prefix_reuse) { // at least one token is left to compute
        found = pool_.find_prefix(sequence.tokens, (sequence.tokens.size() - 1) / kBlockTokens);
    }
    const auto held = static_cast<std::uint64_t>(
        std::ranges::count_if(found, [&](std::uint32_t block) { return pool_.held(block); }));
    if (blocks_of(sequence.tokens.size()) - held + promised > pool_.num_free()) {
        return false;
    }
    pool_.take(found);
    sequence.running = true;
    sequence.slot = *free_slots_.begin();
    free_slots_.erase(free_slots_.begin());
    sequence.computed = found.size() * kBlockTokens;
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
    for (std::size_t i = 0; i < running_.size(); ++i) {
        Sequence& sequence = *running_[i];
        // Never 0: a request whose count the budget cut was the last of its step, and those before
        // it do not take more than they did then.
        const std::uint64_t count = std::min({sequence.missing(), config_.prefill_chunk, left});
        while (i < running_.size() && !grow(sequence, sequence.computed + count)) {
            preempt_last(step); // itself, if it is the last
        }
        if (i < running_.size()) {
            parts.push_back({&sequence, count});
            left -= count;
        }
    }
    std::uint64_t promised = 0;
    for (const Sequence* sequence : running_) {
        promised += blocks_of(sequence->tokens.size()) - sequence->blocks.size();
    }
    while (step.preempted_.empty() && !waiting_.empty() && left > 0 &&
           running_.size() < config_.max_sequences && admit_first(promised)) {
        Sequence& sequence = *running_.back();
        const std::uint64_t count = std::min({sequence.missing(), config_.prefill_chunk, left});
        require_consistent(grow(sequence, sequence.computed + count),
                           "an admitted request lacks blocks");
        promised += blocks_of(sequence.tokens.size()) - sequence.blocks.size();
        parts.push_back({&sequence, count});
        left -= count;
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

void Scheduler::check() const {
    std::vector<std::span<const std::uint32_t>> tables;
    std::set<std::uint32_t> slots = free_slots_;
    const Sequence* before = nullptr;
    for (const Sequence* sequence : running_) {
        require_consistent(sequence->running, "a request that waits is said to run");
        require_consistent(slots.insert(sequence->slot).second, "a slot is used twice");
        require_consistent(sequence->missing() > 0, "a running request has nothing to compute");
        require_consistent(sequence->blocks.size() >= blocks_of(sequence->computed),
                           "a running request lacks blocks");
        require_consistent(!before || before->arrival < sequence->arrival,
                           "requests do not run in order of arrival");
        before = sequence;
        tables.emplace_back(sequence->blocks);
    }
    for (const Sequence* sequence : waiting_) {
        require_consistent(!sequence->running && sequence->blocks.empty() &&
                               sequence->computed == 0,
                           "a request that waits has blocks");
        require_consistent(!before || before->arrival < sequence->arrival,
                           "requests do not wait in order of arrival");
        before = sequence;
    }
    require_consistent(slots.size() == config_.max_sequences, "a slot is lost");
    require_consistent(sequences_.size() == running_.size() + waiting_.size(),
                       "a request neither runs nor waits");
    pool_.check(tables);
}

} // namespace bellows
