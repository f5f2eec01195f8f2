// SPDX-License-Identifier: MIT
#include "link_moves.hpp"

#include "seal.hpp"
#include "trace_transfer.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

namespace {

/// Streams of the leg's sequence number, beside those of the counts and the records.
constexpr std::uint32_t kWhereStream = 2;
constexpr std::uint32_t kTakenStream = 3;

} // namespace

void LinkMoves::begin_out(const RecordRuns& runs, const std::shared_ptr<LinkBlock>& memory,
                          std::vector<Transfer>& sends) {
    sends_ = &sends;
    from_ = memory;
    for (std::uint64_t at = 0; at < runs.size(); ++at)
        if (exchange_.linked(at) && total_bytes(runs[at]) > 0 && !without_(at))
            begin_out(at, runs[at]);
}

void LinkMoves::begin_out(std::uint64_t at, const std::vector<RecordRun>& runs) {
    const int rank = exchange_.config.ranks[at];
    const std::uint64_t bytes = total_bytes(runs);
    try {
        exchange_.link->pass(rank, *from_);
    } catch (const Error&) {
        if (without_(at))
            return;
        throw;
    }
    Out& out = *out_.emplace_back(std::make_unique<Out>());
    out.at = at;
    out.told = {from_->id(), from_->bytes(), bytes};
    for (const RecordRun& run : runs)
        out.told.push_back(run.offset);
    seal(out.told, sequence_, exchange_.world.rank());
    out.first_transfer = sends_->size();
    sends_->push_back(exchange_.transport.post_send(rank, {sequence_, kWhereStream},
                                                    std::as_bytes(std::span(out.told))));
    sends_->push_back(exchange_.transport.post_recv(
        rank, {sequence_, kTakenStream}, std::as_writable_bytes(std::span(&out.taken, 1))));
    exchange_.peers[at].bytes_sent += bytes;
    ++exchange_.peers[at].messages_sent;
}

void LinkMoves::begin_in(const RecordRuns& runs, const std::shared_ptr<LinkBlock>& memory,
                         std::vector<Transfer>& receives) {
    receives_ = &receives;
    to_ = memory;
    for (std::uint64_t at = 0; at < runs.size(); ++at) {
        const std::uint64_t bytes = total_bytes(runs[at]);
        if (!exchange_.linked(at) || bytes == 0 || without_(at))
            continue;
        In& in = *in_.emplace_back(std::make_unique<In>());
        in.rank = exchange_.config.ranks[at];
        in.at = at;
        in.runs = runs[at];
        in.told.resize(kOffsets + in.runs.size() + 1);
        in.transfer = receives.size();
        receives.push_back(exchange_.transport.post_recv(
            in.rank, {sequence_, kWhereStream}, std::as_writable_bytes(std::span(in.told))));
        exchange_.peers[at].bytes_received += bytes;
    }
}

/// A member that is lost meanwhile is seen to at the next step.
bool LinkMoves::test(Transfer& transfer, std::uint64_t at) const {
    try {
        return test_and_trace(exchange_.device, exchange_.config.name, transfer);
    } catch (const Error&) {
        if (without_(at))
            return false;
        throw;
    }
}

void LinkMoves::begin_copy(In& in) {
    const std::uint64_t bytes = total_bytes(in.runs);
    std::vector<LinkRange> ranges;
    bool good = in.told[kBytes] == bytes;
    for (std::size_t i = 0; good && i < in.runs.size(); ++i) {
        const std::uint64_t offset = in.told[kOffsets + i];
        good = in.runs[i].bytes <= in.source->bytes() &&
               offset <= in.source->bytes() - in.runs[i].bytes;
        ranges.push_back(
            {to_->address() + in.runs[i].offset, in.source->address() + offset, in.runs[i].bytes});
    }
    if (!good)
        throw Error(ErrorCode::Corrupt,
                    "rank " + std::to_string(exchange_.world.rank()) + " expected " +
                        std::to_string(bytes) + " bytes from rank " + std::to_string(in.rank) +
                        ", which offers " + std::to_string(in.told[kBytes]) + " of a block of " +
                        std::to_string(in.source->bytes()) +
                        ": the two disagree about the exchange",
                    in.rank);
    in.began = std::chrono::steady_clock::now();
    if (first_copy_ == std::chrono::steady_clock::time_point{})
        first_copy_ = in.began;
    in.copy = exchange_.link->copy_from(in.rank, std::move(ranges));
}

/// The copy, from when it was handed to the driver.
void LinkMoves::trace(const In& in) const {
    if (!exchange_.device.options().trace)
        return;
    const auto ns = [](std::chrono::steady_clock::time_point time) {
        return time.time_since_epoch() / std::chrono::nanoseconds(1);
    };
    const std::string& owner = exchange_.config.name;
    exchange_.device.add_to_trace({owner + " link from " + std::to_string(in.rank),
                                   "copy " + std::to_string(in.told[kBytes]) + " bytes", owner,
                                   ns(in.began), ns(std::chrono::steady_clock::now())});
}

/// Whether all that the source has told of stands where it belongs.
bool LinkMoves::try_copy(In& in, bool& changed) {
    if (!in.copy) {
        in.source =
            exchange_.link->open(in.rank, in.told[kId], in.told[kBlockBytes], exchange_.opened);
        if (!in.source)
            return false;
        begin_copy(in);
        changed = true;
    }
    return in.copy->done();
}

/// Whether nothing is left to do for this member.
bool LinkMoves::step_in(In& in, bool& changed) {
    if (in.done)
        return true;
    if (!in.copy) {
        Transfer& told = (*receives_)[in.transfer];
        if (without_(in.at)) {
            told.cancel();
            return in.done = true;
        }
        if (!test(told, in.at))
            return false;
        if (!std::exchange(in.heard, true))
            unsealed<std::uint64_t>(in.told, sequence_, in.rank);
    }
    try {
        if (!try_copy(in, changed))
            return false;
    } catch (const Error&) {
        if (!without_(in.at))
            throw;
        in.copy.reset(); // its memory went with it
        return changed = in.done = true;
    }
    trace(in);
    came_(in.at);
    in.taken = in.told[kBytes];
    answers_.emplace_back(in.at,
                          exchange_.transport.post_send(in.rank, {sequence_, kTakenStream},
                                                        std::as_bytes(std::span(&in.taken, 1))));
    changed = in.done = true;
    return true;
}

bool LinkMoves::step_out(Out& out) {
    bool done = true;
    for (const std::size_t i : {out.first_transfer, out.first_transfer + 1}) {
        Transfer& transfer = (*sends_)[i];
        if (without_(out.at))
            transfer.cancel();
        else
            done &= test(transfer, out.at);
    }
    return done;
}

Progress LinkMoves::step() {
    bool done = true, changed = false;
    for (const auto& in : in_)
        done &= step_in(*in, changed);
    here_ = done;
    for (const auto& out : out_)
        done &= step_out(*out);
    for (auto& [at, answer] : answers_)
        done &= without_(at) ? answer.cancel() : test(answer, at);
    return done ? Progress::Done : changed ? Progress::Moved : Progress::Again;
}

} // namespace bellows
