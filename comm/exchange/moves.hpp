// SPDX-License-Identifier: MIT
#pragma once

// The records of one leg on their way between this rank's device memory and the other ranks, in
// pieces: while one is copied out of the device, others are with the network and others are copied
// in. Where host memory serves as device memory, messages are sent from it and received in it; else
// pieces are copied to memory that the node's ranks share, and its receivers' devices read them
// there; through staging memory of both sides where ranks share none. Members that the device link
// reaches are left to that. This rank's own records stay on the device. Used by a lane.

#include "exchange_impl.hpp"
#include "link_moves.hpp"

#include <bellows/comm/message.hpp>
#include <bellows/engine/lane.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// As the exchange counts them.
inline std::uint64_t nanoseconds(std::chrono::steady_clock::duration duration) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(duration).count());
}

class RecordMoves {
public:
    /// A buffer, and what it is made of where others reach it.
    struct Place {
        const Buffer& memory;
        const WireMemory& wire;
    };
    struct Out {
        Place place;
        RecordRuns runs;
        bool same = false;      ///< the members' runs are one and the same
        bool own_there = false; ///< this rank's own stand where they are received already
    };
    struct In {
        Place place;
        std::uint32_t blank = 0;     ///< what words are of members that the leg does without
        std::vector<bool>& is_blank; ///< of which members they are
    };
    /// to: where runs are received. name: for the trace. without: members that the leg does without
    /// from the start, whatever becomes of them since. beside: other work runs meanwhile, as in the
    /// hook form, from which the copies shall take little; begin_in() then follows when all has
    /// been copied out.
    RecordMoves(ExchangeHandle::Impl& handle, std::string name, Tag tag, Out from, In to,
                std::vector<bool> without, bool beside);

    /// Once each, in either order.
    void begin_out(LaneContext& context);
    void begin_in(LaneContext& context, const RecordRuns& runs);
    /// Of begin_in() what comes by the device link; may come first.
    void begin_in_by_link(const RecordRuns& runs);
    /// Moves what can be moved. Done: what has been begun stands where it belongs, here and at the
    /// others.
    Progress step(LaneContext& context);
    /// All that comes, and of members that the leg does without what stands for it, is here: later
    /// steps touch it no more.
    bool here() const noexcept { return here_; }
    /// Once all is here, a member that is masked then is still sent what the leg owes it: it may
    /// wait for that where it has not heard of the mask. Until this call.
    void give_up_masked() noexcept { late_ = true; }
    /// All that has been begun is with the network.
    bool all_posted() const noexcept;

    std::span<const Transfer> receives() const noexcept { return receives_; }
    std::span<const Transfer> sends() const noexcept { return sends_; }

private:
    using Time = std::chrono::steady_clock::time_point;
    enum class State : std::uint8_t {
        Waiting,    ///< for its turn to be copied out
        CopyingOut, ///< from the device
        Moving,     ///< with the network
        CopyingIn,  ///< to the device
        Done,
    };
    struct Piece {
        std::uint64_t at = 0; ///< position in the group
        std::uint64_t offset = 0, bytes = 0;
        State state = State::Moving;
        std::size_t transfer = 0;
        std::unique_ptr<Recording> copy;
        TimePoint copied;
    };

    struct Blank {
        std::unique_ptr<Recording> fill;
        TimePoint filled;
    };

    std::vector<Piece> cut(const std::vector<MemoryRun>& runs, std::uint64_t at) const;
    std::vector<Piece> cut(const RecordRuns& runs) const;
    std::uint64_t self() const noexcept { return static_cast<std::uint64_t>(exchange_.position); }
    bool is_self(const Piece& piece) const noexcept { return piece.at == self(); }
    /// Whether no message brings this rank's own records.
    bool own_apart() const noexcept { return staged_ || from_.own_there; }
    bool copy_out(LaneContext& context);
    const TimePoint* copied_for_another(std::size_t piece) const noexcept;
    bool alone(const std::vector<Piece>& others) const noexcept;
    QueueRole next_role(QueueRole own, const std::vector<Piece>& others);
    QueueRole own_role() const noexcept;
    void copy_own(LaneContext& context);
    int rank_of(const Piece& piece) const noexcept;
    bool in_place(const Piece& piece) const noexcept;
    void copy(LaneContext& context, Piece& piece, QueueRole role, BufferView source,
              BufferView destination);
    void reserve_in();
    void send(Piece& piece);
    void receive(Piece& piece);
    bool step_out(Piece& piece);
    bool step_in(LaneContext& context, Piece& piece);
    bool arrived(Transfer& transfer, std::uint64_t at);
    /// Records of a member have come.
    void came(std::uint64_t at);
    void begin_moving(Time since);
    void count_times();
    /// Whether this leg does without a member; once it does, it stays so.
    bool without(std::uint64_t at);
    void give_up(Piece& piece, std::vector<Transfer>& transfers);
    /// What stands where nothing came: nobody's tokens, sums of 0. True once it does.
    bool fill_blanks(LaneContext& context);

    ExchangeHandle::Impl& handle_;
    ExpertExchange::Impl& exchange_;
    std::string name_;
    Tag tag_;
    Out from_;
    In to_;
    bool beside_;
    bool staged_;
    std::vector<Piece> out_, in_;
    std::size_t next_out_ = 0;             ///< the first that is not copied out yet
    std::uint64_t first_out_ = UINT64_MAX; ///< where staging memory begins
    std::uint32_t copying_out_ = 0;
    std::uint64_t copies_ = 0;  ///< of a direction that is alone
    std::vector<bool> without_; ///< members
    LinkMoves links_;           // before the transfers, which use its memory
    bool links_in_ = false;     ///< have begun
    std::vector<Transfer> receives_, sends_;
    std::vector<Blank> blanks_;
    RecordRuns runs_in_;
    bool has_begun_out_ = false, has_begun_in_ = false, here_ = false, late_ = false;
    std::unique_ptr<Recording> own_copy_; ///< of what no message brings
    TimePoint own_copied_;
    Time began_in_{};
    Time moving_since_{}, last_here_{};             ///< copies between members, by whatever way
    std::vector<std::uint64_t> nanoseconds_waited_; ///< for the last that has come of each member
    std::uint64_t bytes_in_ = 0;
    std::uint64_t seen_ = 0; ///< bytes moved at the last look
};

} // namespace bellows
