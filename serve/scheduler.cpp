// SPDX-License-Identifier: MIT
#include <bellows/serve/scheduler.hpp>

#include "scheduler_books.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

using namespace books;

namespace {

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
    if (config.prefill_beside == 0 || config.prefill_beside > config.token_budget) {
        config.prefill_beside = config.token_budget;
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
    } else if (sequence.in_steps > 0) {
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

std::uint64_t Scheduler::num_running() const noexcept {
    return static_cast<std::uint64_t>(
        std::ranges::count_if(running_, [](const Sequence* it) { return !it->ended; }));
}

void Scheduler::check() const {
    std::vector<std::span<const std::uint32_t>> tables;
    std::set<std::uint32_t> slots = free_slots_;
    const Sequence* before = nullptr;
    for (const Sequence* sequence : running_) {
        require_consistent(sequence->running, "a request that waits is said to run");
        require_consistent(slots.insert(sequence->slot).second, "a slot is used twice");
        require_consistent(sequence->ended || sequence->tokens.size() > sequence->computed,
                           "a running request has nothing to compute");
        require_consistent(!sequence->ended || sequence->in_steps > 0,
                           "a request has ended, but runs in no step");
        require_consistent(sequence->in_steps <= steps_ - finished_ &&
                               (sequence->in_steps > 0) == (sequence->in_flight > 0) &&
                               sequence->drawn <= sequence->in_steps,
                           "a running request is in steps that there are not");
        require_consistent(sequence->blocks.size() >= blocks_of(sequence->position()),
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
