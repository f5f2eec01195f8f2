// SPDX-License-Identifier: MIT
#pragma once

// The inside of the collectives: a lane job that takes a tensor through the network chunk by chunk.
// Each chunk has a slot of staging memory in which the device and the network meet.

#include "collectives_plan.hpp"
#include "transport/link_transfer.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/engine/recording.hpp>

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
/// arrives to be summed.
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

/// One chunk of a collective. It records its device work when it is made, while the caller's
/// tensors are sure to be there; the rest happens on the lane's thread.
class ChunkTransfer {
public:
    ChunkTransfer(CollectiveContext& context, StagingSlot& slot, bool linked,
                  const CollectiveTensors& tensors, const ChunkPlan& plan, std::uint64_t sequence,
                  std::uint64_t index);

    /// Does what can be done now; true when the chunk has ended. Never blocks.
    bool step(LaneContext& lane);
    bool waits_for_network() const noexcept {
        return phase_ == Phase::Scatter || phase_ == Phase::Gather;
    }
    /// Rises with every message that is done and every phase.
    std::uint64_t num_events() const noexcept { return num_events_; }
    std::span<const Transfer> transfers() const noexcept { return transfers_; }
    const char* phase_name() const noexcept;
    const CollectivesStats& stats() const noexcept { return stats_; }

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
    void reserve_staging(LaneContext& lane);
    void reserve(MessageBuffer& staging, std::uint64_t bytes, LaneContext& lane);
    bool own_piece_placed();
    bool advance(LaneContext& lane);
    void submit(LaneContext& lane, Recording& recording);
    void after_out();
    void post_scatter();
    void post_gather();
    void post(std::uint64_t member, std::uint32_t stream, const MessageBuffer& at, MemoryRun run,
              Direction direction);
    bool all_done();

    CollectiveContext& context_;
    StagingSlot& slot_;
    bool linked_; ///< messages go from device to device
    const CollectiveTensors& tensors_;
    const MessageBuffer* source_; ///< that members copy their parts from; null: from the image
    const MessageBuffer* target_; ///< that pieces are gathered in; null: in the image
    const ChunkPlan& plan_;
    std::uint64_t sequence_;
    std::uint32_t first_stream_;
    Phase phase_ = Phase::Start;
    std::vector<std::uint64_t> out_at_; ///< per member: its part in the source or image
    std::uint64_t image_bytes_ = 0, incoming_bytes_ = 0;
    std::uint64_t incoming_stride_ = 0;
    ByteRange image_;                          ///< of the target
    std::optional<std::uint64_t> bounce_lead_; ///< own piece in `incoming`, from this byte on
    std::uint64_t edge_at_ = 0;                ///< in `incoming`: the target's last word as it was
    std::unique_ptr<LinkCopy> bounce_;
    std::vector<Transfer> transfers_;
    Recording out_, sum_, in_;
    TimePoint submitted_;
    std::uint64_t num_events_ = 0;
    CollectivesStats stats_;
};

/// The job of one collective.
class CollectiveJob {
public:
    CollectiveJob(std::shared_ptr<CollectiveContext> context, std::shared_ptr<StagingSlots> slots,
                  bool linked, std::string name, CollectiveTensors tensors,
                  std::vector<ChunkPlan> plans);

    Progress step(LaneContext& lane);

private:
    using TimeOfDay = std::chrono::steady_clock::time_point;

    Progress advance(LaneContext& lane);
    std::string describe() const;
    void watch(std::uint64_t num_events);
    void finish(const ChunkTransfer& chunk);
    bool step_slot(std::size_t slot, LaneContext& lane);
    bool hurries() const;

    std::shared_ptr<CollectiveContext> context_;
    std::shared_ptr<StagingSlots> slots_; // outlives the recordings of the chunks
    bool linked_;
    std::string name_;
    CollectiveTensors tensors_;
    std::vector<ChunkPlan> plans_;
    std::vector<std::unique_ptr<ChunkTransfer>> chunks_; ///< chunk i in slot i % slots
    std::vector<std::size_t> next_;                      ///< per slot: the chunk that it is at
    TimeOfDay last_step_, last_progress_;
    std::uint64_t events_of_ended_ = 0, last_events_ = 0;
    CollectivesStats stats_;
    mutable std::timed_mutex mutex_; ///< of what describe() reads; held by steps
    bool began_ = false;
    ControlPlane::Activity activity_; // last: it calls describe()
};

} // namespace bellows
