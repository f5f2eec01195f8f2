// SPDX-License-Identifier: MIT
#pragma once

// The inside of the collectives: a lane job that takes a tensor through the network chunk by chunk.
// Each chunk has a slot of staging memory in which the device and the network meet.

#include "collectives_plan.hpp"
#include "transport/link_transfer.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/engine/recording.hpp>

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// Memory that messages leave from or arrive in.
struct MessageBuffer {
    std::shared_ptr<LinkBlock> block; ///< that the buffer is bound to, if messages are linked
    Buffer buffer;
};

/// Memory of tensors that others copy from and to where they stand.
struct LinkedTensors {
    MessageBuffer memory; ///< without a buffer where another Collectives has it
    const Resource* resource = nullptr;
};

/// What the jobs of one Collectives share; lives as long as the last of them.
struct CollectiveContext {
    Device& device;
    Transport& transport;
    Group group;
    int position = 0;
    CollectivesOptions options;
    DeviceLink* link = nullptr; ///< between the devices of all members; null where there is none
    std::mutex stats_mutex{};
    CollectivesStats stats{};
    std::shared_ptr<GoneBlocks> gone = std::make_shared<GoneBlocks>();
    OpenedBlocks opened{};                     ///< the lanes' thread only
    std::list<LinkedTensors> linked_tensors{}; ///< the caller's thread only, as the next
    std::list<Buffer> tensors{}; ///< memory that was asked for where nothing is linked

    std::uint64_t members() const noexcept { return static_cast<std::uint64_t>(group.size()); }
    std::uint64_t self() const noexcept { return static_cast<std::uint64_t>(position); }
    /// The linked memory that the view stands in; null: it does not.
    const MessageBuffer* linked(const BufferView& view) const noexcept;
};

/// Memory of a chunk, declared at first and grown by the lane, mapped if its messages go through
/// the host. `image` holds what is sent to be summed, unless others take it from the source, then
/// the gathered bytes as they stand in the target, unless they go straight there; `incoming` what
/// arrives to be summed. Of moves `image` holds what is sent, `incoming` what arrives, with the
/// same exceptions.
struct StagingSlot {
    MessageBuffer image, incoming;
};

/// Those of a lane: which ones depends on the way of a collective's messages.
struct StagingSlots {
    std::vector<StagingSlot> host, linked;
};

struct CollectiveTensors {
    BufferView source, target;
    bool own_in_place = false; ///< this member's gathered piece already stands in the target
};

/// What is summed on the device in ascending order of members, as sum_ranks.comp says.
struct MemberSum {
    BufferView own;     ///< of member `self`
    BufferView staged;  ///< the others' rows, stride bytes apart; empty with one member
    BufferView sum;     ///< may be own
    BufferView image{}; ///< gets a copy of the sum; may be empty
    std::uint64_t stride = 0, members = 1, self = 0;
};

void record_member_sum(Recording& recording, const MemberSum& of);

/// One chunk of a collective. It records its device work when it is made, while the caller's
/// tensors are sure to be there; the rest happens on the lane's thread.
class CollectiveChunk {
public:
    /// first_stream: the first of two that no other chunk under way has.
    CollectiveChunk(CollectiveContext& context, StagingSlot& slot, bool linked,
                    std::uint64_t sequence, std::uint32_t first_stream)
        : context_(context), slot_(slot), linked_(linked), sequence_(sequence),
          first_stream_(first_stream) {}
    CollectiveChunk(const CollectiveChunk&) = delete;
    CollectiveChunk& operator=(const CollectiveChunk&) = delete;
    virtual ~CollectiveChunk() = default;

    /// Does what can be done now; true when the chunk has ended. Never blocks.
    bool step(LaneContext& lane);
    virtual bool waits_for_network() const noexcept = 0;
    virtual const char* phase_name() const noexcept = 0;
    /// Rises with every message that is done and every phase.
    std::uint64_t num_events() const noexcept { return num_events_; }
    std::span<const Transfer> transfers() const noexcept { return transfers_; }
    const CollectivesStats& stats() const noexcept { return stats_; }

protected:
    /// One phase further if that is possible now.
    virtual bool advance(LaneContext& lane) = 0;
    virtual bool ended() const noexcept = 0;

    /// Grows the slot's memory to image_bytes_ and incoming_bytes_. Called when nothing uses it.
    void reserve_staging(LaneContext& lane);
    TimePoint submit(LaneContext& lane, Recording& recording);
    /// runs: one behind the other unless messages are linked; without bytes nothing is posted.
    void post(std::uint64_t member, std::uint32_t stream, const MessageBuffer& at,
              std::vector<MemoryRun> runs, Direction direction);
    bool all_done();

    CollectiveContext& context_;
    StagingSlot& slot_;
    const bool linked_; ///< messages go from device to device
    std::uint64_t image_bytes_ = 0, incoming_bytes_ = 0;

private:
    void reserve(MessageBuffer& staging, std::uint64_t bytes, LaneContext& lane);

    std::uint64_t sequence_;
    std::uint32_t first_stream_;
    std::vector<Transfer> transfers_;
    std::uint64_t num_events_ = 0;
    CollectivesStats stats_;
};

/// A chunk of a sum, a gathering, or both.
class ChunkTransfer final : public CollectiveChunk {
public:
    ChunkTransfer(CollectiveContext& context, StagingSlot& slot, bool linked,
                  const CollectiveTensors& tensors, ChunkPlan plan, std::uint64_t sequence,
                  std::uint32_t first_stream);

    bool waits_for_network() const noexcept override {
        return phase_ == Phase::Scatter || phase_ == Phase::Gather;
    }
    const char* phase_name() const noexcept override;

private:
    enum class Phase : std::uint8_t { Start, Out, Scatter, Sum, Gather, In, Done };

    bool replicated() const noexcept;
    bool fills_target() const noexcept;
    std::uint64_t in_image(std::uint64_t target_byte) const noexcept;
    void lay_out();
    void record();
    void record_scatter_out();
    void record_own_piece();
    void record_sum();
    void record_in();
    bool own_piece_placed();
    bool advance(LaneContext& lane) override;
    bool ended() const noexcept override { return phase_ == Phase::Done; }
    void after_out();
    void post_scatter();
    void post_gather();

    CollectiveTensors tensors_;
    const MessageBuffer* source_; ///< that members copy their parts from; null: from the image
    const MessageBuffer* target_; ///< that pieces are gathered in; null: in the image
    ChunkPlan plan_;
    Phase phase_ = Phase::Start;
    std::vector<std::uint64_t> out_at_; ///< per member: its part in the source or image
    std::uint64_t incoming_stride_ = 0;
    ByteRange image_;                          ///< of the target
    std::optional<std::uint64_t> bounce_lead_; ///< own piece in `incoming`, from this byte on
    std::uint64_t edge_at_ = 0;                ///< in `incoming`: the target's last word as it was
    std::unique_ptr<LinkCopy> bounce_;
    Recording out_, sum_, in_;
    TimePoint submitted_;
};

/// A chunk of a list of moves.
class MoveTransfer final : public CollectiveChunk {
public:
    /// Keeps nothing of the plan. sums: other terms than the first are added, and messages never go
    /// straight to the target.
    MoveTransfer(CollectiveContext& context, StagingSlot& slot, bool linked,
                 const CollectiveTensors& tensors, const MovePlan& plan,
                 std::span<const MovePiece> pieces, bool sums, std::uint64_t sequence,
                 std::uint32_t first_stream);

    bool waits_for_network() const noexcept override { return phase_ == Phase::Network; }
    const char* phase_name() const noexcept override;

private:
    enum class Phase : std::uint8_t { Start, Out, Network, In, Done };
    struct Arrival;

    std::vector<Arrival> lay_out(const MovePlan& plan, std::span<const MovePiece> pieces);
    void record(const std::vector<Arrival>& arrivals);
    void post_messages();
    bool advance(LaneContext& lane) override;
    bool ended() const noexcept override { return phase_ == Phase::Done; }

    CollectiveTensors tensors_;
    const MessageBuffer* source_; ///< that members copy from; null: from the image
    const MessageBuffer* target_; ///< that messages go straight to; null: to `incoming`
    Phase phase_ = Phase::Start;
    std::vector<std::vector<MemoryRun>> sends_, receives_; ///< per member
    Recording out_, within_, in_, sum_;
    TimePoint sent_, moved_within_, moved_in_, summed_;
};

/// The job of one collective.
class CollectiveJob {
public:
    /// Makes chunk `index`, which travels on two streams from `first_stream` on.
    using MakeChunk = std::function<std::unique_ptr<CollectiveChunk>(
        StagingSlot& slot, std::size_t index, std::uint64_t sequence, std::uint32_t first_stream)>;

    /// Makes all chunks at once.
    CollectiveJob(std::shared_ptr<CollectiveContext> context, std::shared_ptr<StagingSlots> slots,
                  bool linked, std::string name, std::size_t num_chunks, const MakeChunk& make);

    Progress step(LaneContext& lane);

private:
    using TimeOfDay = std::chrono::steady_clock::time_point;

    Progress advance(LaneContext& lane);
    std::string describe() const;
    void watch(std::uint64_t num_events);
    void finish(const CollectiveChunk& chunk);
    bool step_slot(std::size_t slot, LaneContext& lane);
    bool hurries() const;

    std::shared_ptr<CollectiveContext> context_;
    std::shared_ptr<StagingSlots> slots_; // outlives the recordings of the chunks
    bool linked_;
    std::string name_;
    std::vector<std::unique_ptr<CollectiveChunk>> chunks_; ///< chunk i in slot i % slots
    std::vector<std::size_t> next_;                        ///< per slot: the chunk that it is at
    TimeOfDay last_step_, last_progress_;
    std::uint64_t events_of_ended_ = 0, last_events_ = 0;
    CollectivesStats stats_;
    mutable std::timed_mutex mutex_; ///< of what describe() reads; held by steps
    bool began_ = false;
    ControlPlane::Activity activity_; // last: it calls describe()
};

} // namespace bellows
