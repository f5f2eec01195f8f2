// SPDX-License-Identifier: MIT
#pragma once

// The inside of an exchange. A leg is one crossing of the network: outbound legs (dispatch, and the
// backward of combine) carry one record per (token, member of the group) to the experts; inbound
// legs bring one record per received row back. A leg is a batch that packs, a lane job that moves
// bytes, a batch that unpacks.
//
// An exchange across nodes is two of them, hops, each with handles of its own: the first among the
// ranks of equal local rank, each of which stands for the experts of its node; then one inside the
// node, whose tokens are the rows of the first. Rows that a rank has passed on stand where they
// would if they had come from their sources: by source node, then by the rank that they came from.

#include "exchange_sizes.hpp"
#include "grid.hpp"
#include "replicas.hpp"
#include "transport/device_link.hpp"

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/engine/recording.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace bellows {

/// What a buffer that records travel from or to is made of, where others reach it.
struct WireMemory {
    SharedMemory shared;             ///< of the node's ranks
    std::shared_ptr<LinkBlock> link; ///< of the devices that the exchange's link reaches
};

/// A hop. Lives as long as the last handle or lane job that needs it.
struct ExpertExchange::Impl : ExchangeShape {
    Device& device;
    World& world;
    Transport& transport;
    HostThread& thread;
    ExchangeConfig whole; ///< of the exchange
    /// The hop between nodes, whose rows are this one's tokens; null: tokens are the caller's.
    std::shared_ptr<Impl> before{};
    ControlPlane::Subscription on_failure{}; ///< given up with the ExpertExchange itself
    std::uint32_t workgroups = 0;            ///< most of the calls that follow; 0: as many as serve
    /// Where the exchange has slots, of its first hop: of each placement what the whole exchange's
    /// ranks hold, and the table that slots are chosen from. `live` are the ranks that they know.
    std::vector<Replicas> replicas{};
    std::vector<Buffer> replica_tables{};
    std::vector<bool> live{};
    /// Codes and scales of `rows` rows that stand row_stride bytes from each other in `memory`.
    fp8::Quantized quantized(BufferView memory, std::uint64_t rows, std::uint64_t row_stride) const;
    /// Rows of elements, not codes, that stand so.
    TensorView plain(BufferView memory, DType dtype, std::uint64_t rows,
                     std::uint64_t row_stride) const;

    /// Counted by the lanes, read by anybody.
    std::atomic<std::uint64_t> exchanges{0}, nanoseconds_waited{0}, nanoseconds_for_counts{0},
        nanoseconds_for_memory{0}, nanoseconds_moving{0};
    struct PeerCounters {
        std::atomic<std::uint64_t> bytes_sent{0}, bytes_received{0}, messages_sent{0},
            nanoseconds_waited{0};
    };
    std::unique_ptr<PeerCounters[]> peers{}; ///< members of the group; this rank's own are 0

    /// Memory of peers that the device has imported.
    struct Import {
        int peer = 0;
        InPlace where;
        Buffer memory;
    };
    std::vector<Import> imported{};
    bool imports = false;       ///< the device takes memory that ranks share
    DeviceLink* link = nullptr; ///< null where it reaches nobody of the group
    /// Of the link: what peers have open of this exchange, what this rank has of theirs. Whichever
    /// handles meet in a leg. The latter on `thread`.
    std::shared_ptr<GoneBlocks> gone = std::make_shared<GoneBlocks>();
    OpenedBlocks opened{};
    /// Of low latency: members of the group that are done without. Set by anybody, read by lanes.
    std::unique_ptr<std::atomic<bool>[]> mask{};

    /// The hop whose tokens are the caller's.
    Impl& first() noexcept { return before ? *before : *this; }
    /// This rank's among all ranks of the exchange.
    std::uint64_t source_position() const noexcept;
    /// A short wait is worth a core, unless kernels run on it.
    bool hurries() const noexcept { return !device.info().is_cpu; }
    /// Memory that messages are not copied from, for import into the device; empty where either
    /// is refused.
    SharedMemory share(std::uint64_t bytes) const;
    /// Whether this mode goes on without a member: it was masked, or is lost.
    bool without(std::uint64_t at) const noexcept {
        return low_latency() && (mask[at] || lost(at));
    }
    bool lost(std::uint64_t at) const noexcept {
        return low_latency() && world.control().lost(config.ranks[at]);
    }
    /// Whether records go to and come from a member of the group by the device link.
    bool linked(std::uint64_t at) const noexcept {
        return link != nullptr && link->reaches(config.ranks[at]);
    }
    /// Finds out whether the device takes memory that ranks share.
    void try_import();
    /// A message that stands in a peer's memory, as the device sees it. On `thread`.
    BufferView view_of(int peer, const InPlace& message);
    /// Host memory serves as device memory (CPU drivers): no staging.
    bool zero_copy() const noexcept { return device.info().is_cpu && !config.stage_always; }
    template <class Call>
    auto together(const ExchangeHandle& handle, const Call& call);
    ExchangeGrid grid() const noexcept { return {device.info().is_cpu, workgroups}; }
    void require_placement(std::uint64_t number) const;
    /// The tables of what the slots hold at first.
    void make_placements();
    /// Waits for what reads the table.
    void write_table(std::uint64_t number);
    /// Writes all tables anew if other ranks live now than these know.
    void heed_masks();
    /// Of the whole exchange's ranks those that are not done without.
    std::vector<bool> living() const;
    /// Finds out which ways there are to the others.
    void prepare();
};

/// Recordings of one kind, kept for the tensors they were made with.
class RecordingCache {
public:
    Recording* find(const std::vector<BufferView>& key);
    Recording& keep(std::vector<BufferView> key, std::unique_ptr<Recording> recording);
    void clear() { kept_.clear(); }

private:
    std::vector<std::pair<std::vector<BufferView>, std::unique_ptr<Recording>>> kept_;
};

/// Lives until the handle is gone and its last lane job has ended: after a failure a job may take
/// its last step when everybody who waited for it has long been told.
struct ExchangeHandle::Impl {
    Impl(std::shared_ptr<ExpertExchange::Impl> exchange, std::string name);

    struct RowTensor {
        std::unique_ptr<Buffer> buffer;
        std::uint64_t row_bytes = 0;
    };

    std::shared_ptr<ExpertExchange::Impl> owner;
    ExpertExchange::Impl& exchange;
    std::string name;
    std::shared_ptr<Impl> before; ///< of the hop before
    Lane lane;
    std::uint64_t capacity = 0; ///< rows in the worst case
    /// Of the buffers that records travel from and to.
    WireMemory send_memory, back_memory, received_memory, returned_memory, gradient_memory;
    SharedMemory staging_memory; ///< of staging_out

    // At the source: the slots that stand for each token's experts, where an exchange has such, by
    // which placement; which members each token goes to.
    Buffer slots_chosen;
    std::uint64_t placement = 0;
    Buffer rank_ids, rank_counts, rank_offsets, rank_row_to_slot, rank_slot_to_row;
    /// Of each block of slots (ops::moe_blocks) those that go each route, [blocks, routes()] u32;
    /// then those that choose each expert, [blocks, num_experts]. host_counts: Readback, the same.
    Buffer block_counts, host_counts;
    Buffer quantized; ///< tokens as they travel, if not as they are
    /// Outbound, by destination; late where there is a hop before. None in low latency: see
    /// own_records().
    Buffer send_records;
    Buffer back_records; ///< inbound, the same rows coming back; late likewise
    // At the experts.
    /// Upload: received records, own_range(); at kHandleCountsAt rows of each local expert
    /// (RankMajor); then, for the next hop, first_rows().
    Buffer record_count;
    Buffer received; ///< late: outbound records, by source rank
    Buffer returned; ///< late: inbound records to send
    Buffer slot_ids, slot_weights, slot_scalars;
    Buffer counts, offsets, row_to_slot, slot_to_row, weights_of_rows;
    Buffer workspace;
    /// Late. ExpertMajor: a row per slot; else rows stand in `received`, gradients are records as
    /// they come.
    Buffer rows, gradients;
    std::vector<RowTensor> row_tensors; ///< of the caller
    Buffer staging_out, staging_in;     ///< host copies, grown by the lane

    /// Low latency, by the lane: where nothing stands of members that the exchange is without, in
    /// received and in back_records.
    std::vector<bool> blank_received, blank_back;

    // Known on the host after a dispatch, used by the lane only.
    std::vector<std::uint64_t> sent_rows, received_rows; ///< per member of the group and origin
    std::uint64_t num_rows = 0;

    TimePoint last_leg;  ///< all that comes is here
    TimePoint last_sent; ///< and what this rank sends has left
    TimePoint sum_after; ///< what the next combine's sums come after, beside what they need
    TensorView topk_ids; ///< of the running dispatch
    /// By which combine sums: topk_ids, or of ExactPerChoice the experts that the caller named.
    TensorView summed_ids;
    std::uint64_t tokens = 0;
    bool dispatched = false; ///< row tensors can be added no more
    bool filled = false;     ///< a dispatch was handed in, both halves of it
    bool half_open = false;  ///< a hook waits to be called
    RecordingCache pack_dispatch, pack_backward, unpack_dispatch, unpack_backward;
    RecordingCache reduce_forward, reduce_backward, finish_forward, finish_backward;

    Buffer make_staging(const char* what, std::uint64_t bytes) const;
    /// What records travel from, or, `receives`, to.
    Buffer make_wire(const std::string& what, std::uint64_t bytes, bool receives,
                     WireMemory& memory) const;
    /// Low latency, in a buffer with the records of all ranks: this rank's own. Its tokens are sent
    /// from where they arrive, too.
    BufferView own_records(const Buffer& all, const Record& record) const;
    /// The record of each slot of this hop's tokens, -1 for none.
    TensorView sent_slots(std::uint64_t num_tokens) const;
    ops::MoeLayout send_layout(std::uint64_t num_tokens) const;
    ops::MoeLayout receive_layout() const;
    /// How many records were received, and how many rows there are, on the device; none where rows
    /// are masked.
    BufferView received_count() const;
    BufferView row_count() const;
    /// Where sums_own_in_place(), [3] u32: the first received record of this rank's own tokens, how
    /// many there are, and the first one's place in back_records.
    BufferView own_range() const { return record_count.view().sub(4, 12); }
    /// The first of the rows that came from each member of the group, u32.
    BufferView first_rows() const;
    /// Not of ExpertMajor: received tokens and gradients in their records, as they travel (codes:
    /// their scales behind them). RankMajor: what they are for.
    TensorView tokens_in_records() const;
    TensorView gradients_in_records() const;
    TensorView row_experts() const;
    TensorView row_weights() const;
    /// What comes back for each received token: RankMajor's results, sums of others.
    TensorView results_in_records() const;
    /// Where the bytes of outbound legs arrive: gradients where they stay, if they do.
    const Buffer& arrivals(bool tokens_arrive) const {
        return !tokens_arrive && exchange.in_records() ? gradients : received;
    }
    const WireMemory& memory_of_arrivals(bool tokens_arrive) const {
        return !tokens_arrive && exchange.in_records() ? gradient_memory : received_memory;
    }
    /// Whose tokens are the caller's.
    const Impl& first_hop() const { return before ? *before : *this; }
    Impl& first_hop() { return before ? *before : *this; }
    /// Of this hop's tokens: in `quantized`.
    fp8::Quantized outgoing_codes(std::uint64_t num_tokens) const;
    /// Whether these are its codes.
    bool stand_quantized(const TensorView& tensor) const;
    /// Whether these are the records to return, which need no packing.
    bool stand_in_records(const TensorView& tensor) const;
    /// Received rows, or gradients, which are codes, as callers see them.
    fp8::Quantized quantized_rows(const Buffer& memory, const Record& record) const;
    /// The same, which are not.
    TensorView plain_rows(const Buffer& memory, const Record& record) const;
    /// How many there are of these, at most and on the device.
    std::uint64_t most_arriving() const {
        return exchange.in_records() ? exchange.most_received() : capacity;
    }
    BufferView arrived_count() const;
    /// Waits until others have what they take from its memory, and for what still runs.
    void finish();
};

using ExchangeHandlePtr = std::shared_ptr<ExchangeHandle::Impl>;

/// Closed, a leg sends but does not receive.
struct ReceiveGate {
    std::atomic<bool> open{false};
};

struct LegJob {
    std::string name{};
    std::uint64_t sequence = 0;                  ///< Transport::next_sequence
    std::shared_ptr<ReceiveGate> gate = nullptr; ///< null: receives at once
    bool learn = false;               ///< the sizes are exchanged first, and the row tensors bound
    std::uint64_t blocks = 0;         ///< learn: of ExchangeHandle::Impl::block_counts
    ExchangeHandlePtr next = nullptr; ///< learn: what the next hop sends is bound, too
};

/// The lane jobs of a leg, which become the handle's last_leg and last_sent.
void post_outbound(const ExchangeHandlePtr& handle, LegJob leg);
void post_inbound(const ExchangeHandlePtr& handle, LegJob leg);

} // namespace bellows
