// SPDX-License-Identifier: MIT
#include "moves.hpp"

#include "transport/trace_transfer.hpp"

#include <bellows/engine/ops.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

namespace {

/// Staging memory grows by more than is asked for, and seldom.
std::uint64_t grown(std::uint64_t bytes) {
    return bytes + bytes / 4;
}

/// Copies out that are with the device at once: the host takes as long to hand one over as some
/// take, so that the first are sent while later ones are handed over.
constexpr std::uint32_t kCopiesAhead = 4;

/// Copies out at their full rate hold up an H100's L2: products beside them took 12 % longer, and
/// copies in starved. Short bursts leave room for both, at some of the rate of what is alone.
constexpr std::uint64_t kBurst = std::uint64_t{512} << 10, kBurstAlone = std::uint64_t{2} << 20;

/// The next piece of what is left: half of it in the end, as a piece is copied in when all of it
/// has been copied out, and the last one's way in is what nothing else hides.
std::uint64_t piece_of(std::uint64_t left, std::uint64_t most) {
    constexpr std::uint64_t kLeast = std::uint64_t{1} << 20;
    const std::uint64_t half = left / 2 / 16 * 16;
    return std::min(most, half < kLeast ? left : half);
}

} // namespace

RecordMoves::RecordMoves(ExchangeHandle::Impl& handle, std::string name, Tag tag, Out from, In to,
                         std::vector<bool> without, bool beside)
    : handle_(handle), exchange_(handle.exchange), name_(std::move(name)), tag_(tag),
      from_(std::move(from)), to_(to), beside_(beside), staged_(!exchange_.zero_copy()),
      without_(std::move(without)),
      links_(
          exchange_, tag.sequence, [this](std::uint64_t at) { return this->without(at); },
          [this](std::uint64_t at) { came(at); }),
      nanoseconds_waited_(exchange_.group_size()) {
}

void RecordMoves::came(std::uint64_t at) {
    last_here_ = std::chrono::steady_clock::now();
    nanoseconds_waited_[at] = nanoseconds(last_here_ - began_in_);
}

void RecordMoves::begin_moving(Time since) {
    if (moving_since_ == Time{} || since < moving_since_)
        moving_since_ = since;
}

void RecordMoves::count_times() {
    for (std::uint64_t at = 0; at < nanoseconds_waited_.size(); ++at)
        exchange_.peers[at].nanoseconds_waited += std::exchange(nanoseconds_waited_[at], 0);
    if (links_.first_copy() != Time{})
        begin_moving(links_.first_copy());
    if (last_here_ != Time{})
        exchange_.nanoseconds_moving += nanoseconds(last_here_ - moving_since_);
    last_here_ = {};
}

bool RecordMoves::without(std::uint64_t at) {
    if (!without_[at])
        without_[at] = here_ && !late_ ? exchange_.lost(at) : exchange_.without(at);
    return without_[at];
}

std::vector<RecordMoves::Piece> RecordMoves::cut(const std::vector<MemoryRun>& runs,
                                                 std::uint64_t at) const {
    std::vector<Piece> pieces;
    for (const MemoryRun& run : runs) {
        std::uint64_t first = 0;
        while (first < run.bytes) {
            Piece piece;
            piece.at = at;
            piece.offset = run.offset + first;
            piece.bytes = piece_of(run.bytes - first, exchange_.config.piece_bytes);
            first += piece.bytes;
            pieces.push_back(std::move(piece));
        }
    }
    return pieces;
}

/// First pieces first, those for the next rank before those for the one after it.
std::vector<RecordMoves::Piece> RecordMoves::cut(const RecordRuns& runs) const {
    const std::uint64_t ranks = runs.size();
    std::vector<std::vector<Piece>> of_members;
    std::size_t longest = 0;
    for (std::uint64_t i = 1; i <= ranks; ++i) {
        const std::uint64_t at = (static_cast<std::uint64_t>(exchange_.position) + i) % ranks;
        if (exchange_.linked(at) || (at == self() && own_apart()))
            continue;
        of_members.push_back(cut(runs[at], at));
        longest = std::max(longest, of_members.back().size());
    }
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < longest; ++i)
        for (std::vector<Piece>& member : of_members)
            if (i < member.size())
                pieces.push_back(std::move(member[i]));
    return pieces;
}

int RecordMoves::rank_of(const Piece& piece) const noexcept {
    return exchange_.config.ranks[piece.at];
}

bool RecordMoves::in_place(const Piece& piece) const noexcept {
    return staged_ && exchange_.imports && exchange_.transport.reads_in_place(rank_of(piece));
}

void RecordMoves::copy(LaneContext& context, Piece& piece, QueueRole role, BufferView source,
                       BufferView destination) {
    piece.copy = std::make_unique<Recording>(exchange_.device, role, name_);
    const bool out = piece.state == State::CopyingOut;
    piece.copy->copy(source, destination, !out ? UINT64_MAX : alone(in_) ? kBurstAlone : kBurst);
    // The leg's first job ends when all is here, whatever is still copied out: that is the
    // second's.
    piece.copied =
        out && !here_ ? context.submit_for_next(*piece.copy) : context.submit_beside(*piece.copy);
}

void RecordMoves::begin_out(LaneContext& context) {
    links_.begin_out(from_.runs, from_.place.wire.link, sends_);
    out_ = cut(from_.runs);
    std::erase_if(out_, [this](const Piece& piece) { return without(piece.at); });
    std::uint64_t bytes = 0;
    for (const Piece& piece : out_)
        first_out_ = std::min(first_out_, piece.offset);
    for (const Piece& piece : out_)
        bytes = std::max(bytes, piece.offset - first_out_ + piece.bytes);
    if (staged_ && handle_.staging_out.size() < bytes) {
        SharedMemory memory = exchange_.share(grown(bytes));
        handle_.staging_out = memory ? Buffer::import_host(exchange_.device, memory.bytes(),
                                                           handle_.name + " staging out")
                                     : handle_.make_staging(" staging out", grown(bytes));
        handle_.staging_memory = std::move(memory);
    }
    for (Piece& piece : out_) {
        if (!is_self(piece)) {
            exchange_.peers[piece.at].bytes_sent += piece.bytes;
            begin_moving(std::chrono::steady_clock::now());
        }
        if (staged_)
            piece.state = State::Waiting;
        else
            send(piece);
    }
    copy_out(context);
    has_begun_out_ = true;
    copy_own(context);
}

/// Whether nothing but one direction's copies is under way, as far as is known: there are none of
/// the other.
bool RecordMoves::alone(const std::vector<Piece>& others) const noexcept {
    return others.empty() && !beside_;
}

/// Of the next copy of a direction, whose queue is `own`: between two copies a queue idles for a
/// tenth of what a piece takes, so a direction that is alone takes both queues in turn.
QueueRole RecordMoves::next_role(QueueRole own, const std::vector<Piece>& others) {
    if (!alone(others) || ++copies_ % 2 == 1)
        return own;
    return own == QueueRole::TransferOut ? QueueRole::TransferIn : QueueRole::TransferOut;
}

/// Where members are sent the same, when the bytes of this piece of out_ have been copied for the
/// members before it, of which some may have been given up before their turn; null: not yet.
const TimePoint* RecordMoves::copied_for_another(std::size_t piece) const noexcept {
    if (!from_.same)
        return nullptr;
    for (std::size_t i = piece; i > 0 && out_[i - 1].offset == out_[piece].offset; --i)
        if (out_[i - 1].copied.ticket() != nullptr)
            return &out_[i - 1].copied;
    return nullptr;
}

/// As many as may be under way. Whether there was one.
bool RecordMoves::copy_out(LaneContext& context) {
    bool any = false;
    for (; next_out_ < out_.size() && copying_out_ < kCopiesAhead; ++next_out_) {
        Piece& piece = out_[next_out_];
        if (piece.state != State::Waiting)
            continue; // it was given up
        piece.state = State::CopyingOut;
        ++copying_out_;
        any = true;
        if (const TimePoint* const copied = copied_for_another(next_out_))
            piece.copied = *copied;
        else
            copy(context, piece, next_role(QueueRole::TransferOut, in_),
                 from_.place.memory.view().sub(piece.offset, piece.bytes),
                 handle_.staging_out.view().sub(piece.offset - first_out_, piece.bytes));
    }
    return any;
}

/// Copy queues are slow inside a device (an H100's copies 87 GB/s there; a kernel on its second
/// compute queue moves ten times that), and others' records on their way in would wait behind this
/// rank's. The second compute queue takes from what runs beside it, though; there the way out is
/// free when this begins.
QueueRole RecordMoves::own_role() const noexcept {
    return beside_ ? QueueRole::TransferOut : role_within(exchange_.device, QueueRole::TransferIn);
}

/// Last, as nobody else waits for it.
void RecordMoves::copy_own(LaneContext& context) {
    if (!has_begun_out_ || !has_begun_in_ || !staged_ || from_.own_there)
        return;
    const std::vector<MemoryRun>&from = from_.runs[self()], &to = runs_in_[self()];
    if (total_bytes(to) == 0)
        return;
    const QueueRole role = own_role();
    own_copy_ = std::make_unique<Recording>(exchange_.device, role, name_);
    for (std::size_t i = 0; i < to.size(); ++i) {
        if (to[i].bytes == 0)
            continue;
        const BufferView source = from_.place.memory.view().sub(from[i].offset, from[i].bytes),
                         destination = to_.place.memory.view().sub(to[i].offset, to[i].bytes);
        if (takes_dispatches(role))
            ops::copy_bytes(*own_copy_, source, destination);
        else
            own_copy_->copy(source, destination);
    }
    own_copied_ = context.submit_beside(*own_copy_);
}

void RecordMoves::begin_in_by_link(const RecordRuns& runs) {
    if (std::exchange(links_in_, true))
        return;
    began_in_ = std::chrono::steady_clock::now();
    for (std::uint64_t at = 0; at < runs.size(); ++at)
        if (!without(at))
            to_.is_blank[at] = false; // from now on something may come
    links_.begin_in(runs, to_.place.wire.link, receives_);
}

void RecordMoves::begin_in(LaneContext& context, const RecordRuns& runs) {
    runs_in_ = runs;
    begin_in_by_link(runs);
    in_ = cut(runs);
    std::erase_if(in_, [this](const Piece& piece) { return without(piece.at); });
    const bool waits = std::any_of(in_.begin(), in_.end(),
                                   [this](const Piece& piece) { return !in_place(piece); });
    for (const Piece& piece : in_)
        bytes_in_ = std::max(bytes_in_, piece.offset + piece.bytes);
    if (staged_ && waits)
        reserve_in();
    for (Piece& piece : in_) {
        receive(piece);
        if (!is_self(piece)) {
            exchange_.peers[piece.at].bytes_received += piece.bytes;
            begin_moving(began_in_);
        }
    }
    has_begun_in_ = true;
    copy_own(context);
}

void RecordMoves::reserve_in() {
    if (handle_.staging_in.size() < bytes_in_)
        handle_.staging_in = handle_.make_staging(" staging in", grown(bytes_in_));
}

void RecordMoves::send(Piece& piece) {
    const auto memory = staged_ ? handle_.staging_out.mapped_as<const std::byte>()
                                : from_.place.memory.mapped_as<const std::byte>();
    const std::uint64_t offset = piece.offset - (staged_ ? first_out_ : 0);
    piece.transfer = sends_.size();
    piece.state = State::Moving;
    sends_.push_back(
        exchange_.transport.post_send(rank_of(piece), tag_, memory.subspan(offset, piece.bytes)));
    if (!is_self(piece))
        ++exchange_.peers[piece.at].messages_sent;
}

void RecordMoves::receive(Piece& piece) {
    const Buffer& memory = staged_ ? handle_.staging_in : to_.place.memory;
    piece.transfer = receives_.size();
    if (in_place(piece))
        receives_.push_back(
            exchange_.transport.post_recv_in_place(rank_of(piece), tag_, piece.bytes));
    else
        receives_.push_back(exchange_.transport.post_recv(
            rank_of(piece), tag_,
            memory.mapped_as<std::byte>().subspan(piece.offset, piece.bytes)));
}

/// A member that is lost meanwhile is seen to at the next step.
bool RecordMoves::arrived(Transfer& transfer, std::uint64_t at) {
    try {
        return test_and_trace(exchange_.device, exchange_.config.name, transfer);
    } catch (const Error&) {
        if (without(at))
            return false;
        throw;
    }
}

/// Of a member that the leg does without. What is being copied is left to end.
void RecordMoves::give_up(Piece& piece, std::vector<Transfer>& transfers) {
    if (piece.state == State::Moving)
        transfers[piece.transfer].cancel();
    if (piece.state == State::Moving || piece.state == State::Waiting)
        piece.state = State::Done;
}

bool RecordMoves::fill_blanks(LaneContext& context) {
    for (std::uint64_t at = 0; at < runs_in_.size(); ++at) {
        if (!without(at) || to_.is_blank[at])
            continue;
        Blank& blank = blanks_.emplace_back();
        blank.fill =
            std::make_unique<Recording>(exchange_.device, QueueRole::TransferIn, name_ + " blank");
        for (const MemoryRun& run : runs_in_[at])
            blank.fill->fill(to_.place.memory.view().sub(run.offset, run.bytes), to_.blank);
        blank.filled = context.submit(*blank.fill); // after what was copied there
        to_.is_blank[at] = true;
    }
    return std::all_of(blanks_.begin(), blanks_.end(),
                       [](const Blank& blank) { return blank.filled.reached(); });
}

/// Whether it has gone on to another state.
bool RecordMoves::step_out(Piece& piece) {
    if (without(piece.at))
        give_up(piece, sends_);
    if (piece.state == State::CopyingOut && piece.copied.reached()) {
        --copying_out_;
        piece.copy.reset();
        if (without(piece.at))
            piece.state = State::Done;
        else
            send(piece);
        return true;
    }
    if (piece.state == State::Moving && arrived(sends_[piece.transfer], piece.at)) {
        piece.state = State::Done;
        return true;
    }
    return false;
}

bool RecordMoves::step_in(LaneContext& context, Piece& piece) {
    if (without(piece.at))
        give_up(piece, receives_);
    if (piece.state == State::CopyingIn && piece.copied.reached()) {
        piece.copy.reset();
        receives_[piece.transfer] = Transfer(); // its sender may use the memory again
        last_here_ = std::chrono::steady_clock::now();
        piece.state = State::Done;
        return true;
    }
    if (piece.state != State::Moving || !arrived(receives_[piece.transfer], piece.at))
        return false;
    if (!is_self(piece))
        came(piece.at);
    if (!staged_) {
        piece.state = State::Done;
        return true;
    }
    piece.state = State::CopyingIn;
    BufferView source;
    const InPlace there = receives_[piece.transfer].in_place();
    if (in_place(piece) && there.lasts) {
        source = exchange_.view_of(rank_of(piece), there);
    } else {
        reserve_in();
        source = handle_.staging_in.view().sub(piece.offset, piece.bytes);
        if (in_place(piece)) // a copy that its sender made of memory which it does not share
            std::copy(there.bytes.begin(), there.bytes.end(),
                      handle_.staging_in.mapped_as<std::byte>().begin() +
                          static_cast<std::ptrdiff_t>(piece.offset));
    }
    copy(context, piece, next_role(QueueRole::TransferIn, out_), source,
         to_.place.memory.view().sub(piece.offset, piece.bytes));
    return true;
}

Progress RecordMoves::step(LaneContext& context) {
    exchange_.transport.progress();
    const Progress by_link = links_.step();
    bool left = by_link == Progress::Done, changed = by_link == Progress::Moved;
    bool in_order = true; // as receivers expect them, whichever copy ends first
    for (Piece& piece : out_) {
        if (in_order || piece.state != State::CopyingOut)
            changed |= step_out(piece);
        in_order = in_order && piece.state != State::CopyingOut;
        left &= piece.state == State::Done;
    }
    changed |= copy_out(context);
    bool all_in = has_begun_in_ && links_.here();
    for (Piece& piece : in_) {
        changed |= step_in(context, piece);
        all_in &= piece.state == State::Done;
    }
    if (own_copy_ && own_copied_.reached()) {
        own_copy_.reset();
        changed = true;
    }
    all_in &= !own_copy_;
    if (!here_ && all_in && fill_blanks(context)) {
        count_times();
        here_ = changed = true;
    }
    if (here_ && left)
        return Progress::Done;
    std::uint64_t seen = 0;
    for (const Transfer& transfer : receives_)
        seen += transfer.seen_bytes();
    changed |= std::exchange(seen_, seen) != seen;
    return changed ? Progress::Moved : Progress::Again;
}

bool RecordMoves::all_posted() const noexcept {
    return std::none_of(out_.begin(), out_.end(), [](const Piece& piece) {
        return piece.state == State::Waiting || piece.state == State::CopyingOut;
    });
}

} // namespace bellows
