// SPDX-License-Identifier: MIT

// Transport over MPI: one communicator of its own, one MPI message per piece of at most
// max_message_bytes, all pieces posted at once (MPI keeps the order of equal tags). After the job
// has failed no MPI call is made any more: MPI cannot survive its peers, and what does not run
// cannot write into buffers that are being given up.

#include "self_queue.hpp"
#include "transports.hpp"
#include "world/mpi_context.hpp"

#include <bellows/comm/message.hpp>

#include <algorithm>

namespace bellows {
namespace {

// The pieces of one message; they finish in order, so only the first open one is tested.
class MpiTransfer final : public Transfer::State {
public:
    MpiTransfer(const MpiContext& mpi, const ControlPlane& control, Direction direction, int peer,
                std::uint64_t expected)
        : mpi_(mpi), control_(control), direction_(direction), peer_(peer), expected_(expected) {}

    // Cancels what was posted when posting a later piece throws.
    ~MpiTransfer() override { cancel(); }

    MPI_Request* add(std::uint64_t bytes) {
        pieces_.push_back({MPI_REQUEST_NULL, bytes});
        return &pieces_.back().request;
    }

    bool test() override {
        control_.throw_if_failed();
        const auto guard = mpi_.lock();
        while (next_ < pieces_.size()) {
            int done = 0;
            MPI_Status status;
            check(MPI_Test(&pieces_[next_].request, &done, &status));
            if (!done) {
                control_.throw_if_lost(peer_);
                return false;
            }
            if (direction_ == Direction::Receive)
                check_size(status);
            seen_ += pieces_[next_].bytes;
            ++next_;
        }
        return true;
    }

    bool cancel() noexcept override {
        if (next_ == pieces_.size())
            return true;
        bool released = true;
        if (control_.failed() || (direction_ == Direction::Send && control_.lost(peer_))) {
            released = direction_ == Direction::Send;
        } else {
            const auto guard = mpi_.lock();
            for (; next_ < pieces_.size(); ++next_)
                released = cancel_piece(pieces_[next_].request) && released;
        }
        next_ = pieces_.size();
        return released;
    }

    std::uint64_t seen_bytes() const noexcept override { return seen_; }

private:
    struct Piece {
        MPI_Request request;
        std::uint64_t bytes;
    };

    static bool cancel_piece(MPI_Request& request) noexcept {
        if (request == MPI_REQUEST_NULL)
            return true;
        if (MPI_Cancel(&request) != MPI_SUCCESS)
            return false;
        const Deadline deadline(Milliseconds{100});
        Backoff backoff;
        for (;;) {
            int done = 0;
            if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done)
                return true;
            if (deadline.expired())
                return false; // matched and under way: MPI may still write
            backoff.pause();
        }
    }

    void check(int result) {
        int error_class = MPI_SUCCESS;
        if (result != MPI_SUCCESS)
            MPI_Error_class(result, &error_class);
        if (error_class == MPI_ERR_TRUNCATE)
            throw_size("more");
        check_mpi(result, "MPI_Test");
    }

    void check_size(const MPI_Status& status) {
        int count = 0;
        check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
        if (static_cast<std::uint64_t>(count) != pieces_[next_].bytes) {
            seen_ += static_cast<std::uint64_t>(count);
            throw_size(std::to_string(seen_));
        }
    }

    [[noreturn]] void throw_size(const std::string& came) {
        ++next_; // this request is over
        throw Error(ErrorCode::Corrupt,
                    "rank " + std::to_string(control_.rank()) + " expected " +
                        std::to_string(expected_) + " bytes from rank " + std::to_string(peer_) +
                        ", but " + came + " came: the two disagree about the exchange",
                    peer_);
    }

    const MpiContext& mpi_;
    const ControlPlane& control_;
    Direction direction_;
    int peer_;
    std::uint64_t expected_;
    std::uint64_t seen_ = 0;
    std::size_t next_ = 0;
    std::deque<Piece> pieces_; // requests must not move
};

class MpiTransport final : public Transport {
public:
    MpiTransport(World& world, const TransportOptions& options)
        : Transport(world), mpi_(*world.impl().mpi), progress_(*world.impl().progress),
          self_(world.rank()), max_message_bytes_(options.max_message_bytes) {
        communicator_ = mpi_.duplicate(mpi_.communicator(), options.setup_timeout, &control());
        void* attribute = nullptr;
        int found = 0;
        const auto guard = mpi_.lock();
        check_mpi(
            MPI_Comm_get_attr(communicator_, MPI_TAG_UB, static_cast<void*>(&attribute), &found),
            "MPI_Comm_get_attr");
        const int upper = found ? *static_cast<int*>(attribute) : 32767; // MPI's least
        sequences_ = (static_cast<std::uint64_t>(upper) + 1) / Tag::kStreams;
    }

    ~MpiTransport() override {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (!finalized && !control().failed() && !control().any_lost()) {
            const auto guard = mpi_.lock();
            MPI_Comm_free(&communicator_);
        }
    }

    std::string_view name() const noexcept override { return "mpi"; }

    Transfer post_send(int peer, Tag tag, std::span<const std::byte> bytes) override {
        require(peer, tag);
        if (peer == rank())
            return self_.post_send(tag, bytes);
        auto state = open(Direction::Send, peer, bytes.size());
        const auto guard = mpi_.lock();
        for_each_piece(bytes, [&](std::span<const std::byte> piece) {
            check_mpi(MPI_Isend(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, peer,
                                mpi_tag(tag), communicator_, state->add(piece.size())),
                      "MPI_Isend");
        });
        return Transfer(Direction::Send, peer, tag, bytes.size(), std::move(state));
    }

    Transfer post_recv(int peer, Tag tag, std::span<std::byte> bytes) override {
        require(peer, tag);
        if (peer == rank())
            return self_.post_recv(tag, bytes);
        auto state = open(Direction::Receive, peer, bytes.size());
        const auto guard = mpi_.lock();
        for_each_piece(bytes, [&](std::span<std::byte> piece) {
            check_mpi(MPI_Irecv(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, peer,
                                mpi_tag(tag), communicator_, state->add(piece.size())),
                      "MPI_Irecv");
        });
        return Transfer(Direction::Receive, peer, tag, bytes.size(), std::move(state));
    }

    void progress() override {
        control().throw_if_failed();
        const auto guard = mpi_.lock();
        int arrived = 0;
        check_mpi(
            MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &arrived, MPI_STATUS_IGNORE),
            "MPI_Iprobe");
    }

private:
    std::unique_ptr<MpiTransfer> open(Direction direction, int peer, std::uint64_t bytes) const {
        progress_.wake();
        return std::make_unique<MpiTransfer>(mpi_, control(), direction, peer, bytes);
    }

    // Sequence numbers return after `sequences_` exchanges (512 at the least that MPI allows), far
    // more than can be in flight.
    int mpi_tag(Tag tag) const noexcept {
        return static_cast<int>(tag.sequence % sequences_ * Tag::kStreams + tag.stream);
    }

    // An empty message is one empty piece.
    template <typename Byte, typename Function>
    void for_each_piece(std::span<Byte> bytes, Function function) const {
        do {
            const auto size = std::min<std::uint64_t>(bytes.size(), max_message_bytes_);
            function(bytes.first(size));
            bytes = bytes.subspan(size);
        } while (!bytes.empty());
    }

    const MpiContext& mpi_;
    MpiProgress& progress_;
    SelfQueue self_;
    std::uint64_t max_message_bytes_;
    std::uint64_t sequences_ = 1;
    MPI_Comm communicator_ = MPI_COMM_NULL;
};

} // namespace

std::unique_ptr<Transport> make_mpi_transport(World& world, const TransportOptions& options) {
    return std::make_unique<MpiTransport>(world, options);
}

} // namespace bellows
