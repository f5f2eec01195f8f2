// SPDX-License-Identifier: MIT
#pragma once

// What the scheduler's sources share: a request in its books.

#include <bellows/serve/scheduler.hpp>

#include <bellows/base/error.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

struct Scheduler::Sequence {
    RequestId id = 0;
    Request request;
    std::uint64_t arrival = 0;
    std::vector<std::uint32_t> tokens; ///< prompt and answer
    RequestUsage usage;
    bool ended = false;  ///< while a step computes it
    bool faulty = false; ///< a step of it failed: nothing that it computes is taken over

    // While it runs:
    bool running = false;
    std::uint32_t slot = 0;
    std::uint64_t computed = 0; ///< of tokens, those whose entries stand in the blocks
    // Of the steps that compute it and are not finished:
    std::uint64_t in_steps = 0;         ///< their number
    std::uint64_t in_flight = 0;        ///< tokens that they compute, behind the computed ones
    std::uint64_t drawn = 0;            ///< tokens that they draw, which are not among `tokens` yet
    std::optional<std::uint32_t> draft; ///< of the token behind `tokens`
    std::uint32_t draw = 0;             ///< the last of these is the so-manyth that its step draws

    std::vector<std::uint32_t> blocks;
    std::uint64_t published = 0;                ///< blocks whose text the pool knows
    BlockContent content = BlockContent::Start; ///< of the published blocks

    /// The position of the first token that no step computes.
    std::uint64_t position() const noexcept { return computed + in_flight; }
    /// Tokens that no step computes, with those that are being drawn.
    std::uint64_t missing() const noexcept { return tokens.size() + drawn - position(); }
};

namespace books {

inline std::uint64_t blocks_of(std::uint64_t tokens) noexcept {
    return tokens / kBlockTokens + (tokens % kBlockTokens != 0);
}

[[noreturn]] inline void refuse(const std::string& message) {
    throw Error(ErrorCode::InvalidArgument, message);
}

inline void require_consistent(bool holds, const char* what) {
    if (!holds) {
        throw Error(ErrorCode::Internal, std::string("scheduler: ") + what);
    }
}

} // namespace books

} // namespace bellows
