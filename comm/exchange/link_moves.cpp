// SPDX-License-Identifier: MIT
#include "link_moves.hpp"

#include "transport/trace_transfer.hpp"

#include <bellows/base/error.hpp>

#include <string>
#include <utility>

namespace bellows {

using Clock = std::chrono::steady_clock;

/// Beside the streams of the counts and the records.
Tag LinkMoves::tag() const noexcept {
    return {sequence_, 2};
}

void LinkMoves::begin_out(const RecordRuns& runs, const std::shared_ptr<LinkBlock>& memory,
                          std::vector<Transfer>& sends) {
    sends_ = &sends;
    for (std::uint64_t at = 0; at < runs.size(); ++at)
        if (exchange_.linked(at) && total_bytes(runs[at]) > 0 && !without_(at))
            begin_out(at, runs[at], memory);
}

void LinkMoves::begin_out(std::uint64_t at, const std::vector<MemoryRun>& runs,
                          const std::shared_ptr<LinkBlock>& memory) {
    try {
        sends_->push_back(post_link_send(exchange_.transport, rank_of(at), tag(), memory, runs));
    } catch (const Error&) {
        if (without_(at))
            return;
        throw;
    }
    out_.push_back({at, sends_->size() - 1});
    exchange_.peers[at].bytes_sent += total_bytes(runs);
    ++exchange_.peers[at].messages_sent;
}

void LinkMoves::begin_in(const RecordRuns& runs, const std::shared_ptr<LinkBlock>& memory,
                         std::vector<Transfer>& receives) {
    receives_ = &receives;
    for (std::uint64_t at = 0; at < runs.size(); ++at) {
        const std::uint64_t bytes = total_bytes(runs[at]);
        if (!exchange_.linked(at) || bytes == 0 || without_(at))
            continue;
        In& in = *in_.emplace_back(std::make_unique<In>());
        in.at = at;
        in.bytes = bytes;
        in.transfer = receives.size();
        const auto on_copy = [this, &in] {
            in.began = Clock::now();
            if (first_copy_ == Clock::time_point{})
                first_copy_ = in.began;
        };
        receives.push_back(post_link_recv(exchange_.transport, rank_of(at), tag(), memory, runs[at],
                                          exchange_.opened, on_copy));
        exchange_.peers[at].bytes_received += bytes;
    }
}

/// The copy, from when it was handed to the driver.
void LinkMoves::trace(const In& in) const {
    if (!exchange_.device.options().trace)
        return;
    const auto ns = [](Clock::time_point time) {
        return time.time_since_epoch() / std::chrono::nanoseconds(1);
    };
    const std::string& owner = exchange_.config.name;
    exchange_.device.add_to_trace({owner + " link from " + std::to_string(rank_of(in.at)),
                                   "copy " + std::to_string(in.bytes) + " bytes", owner,
                                   ns(in.began), ns(Clock::now())});
}

/// A member that is lost meanwhile is seen to at the next step.
bool LinkMoves::arrived(In& in) {
    try {
        return (*receives_)[in.transfer].test();
    } catch (const Error&) {
        if (!without_(in.at))
            throw;
        (*receives_)[in.transfer].cancel(); // its memory went with it
        return in.began != Clock::time_point{};
    }
}

/// Whether nothing is left to do for this member.
bool LinkMoves::step_in(In& in, bool& changed) {
    if (in.done)
        return true;
    const Clock::time_point before = in.began;
    // A copy that has begun ends by itself, for which a lane does not stand still.
    if (before == Clock::time_point{} && without_(in.at)) {
        (*receives_)[in.transfer].cancel();
        return changed = in.done = true;
    }
    if (!arrived(in)) {
        changed |= in.began != before;
        return false;
    }
    trace(in);
    came_(in.at);
    return changed = in.done = true;
}

bool LinkMoves::step_out(const Out& out) {
    Transfer& transfer = (*sends_)[out.transfer];
    try {
        if (without_(out.at))
            transfer.cancel();
        return test_and_trace(exchange_.device, exchange_.config.name, transfer);
    } catch (const Error&) {
        if (without_(out.at))
            return false;
        throw;
    }
}

Progress LinkMoves::step() {
    bool done = true, changed = false;
    for (const auto& in : in_)
        done &= step_in(*in, changed);
    here_ = done;
    for (const Out& out : out_)
        done &= step_out(out);
    return done ? Progress::Done : changed ? Progress::Moved : Progress::Again;
}

} // namespace bellows
