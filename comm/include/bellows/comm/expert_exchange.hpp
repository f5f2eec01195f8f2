// SPDX-License-Identifier: MIT
#pragma once

// The expert exchange: tokens travel to the ranks that own their experts (dispatch) and their
// results come back summed (combine), both with their backward passes. A handle is one micro-batch
// in flight: it owns the buffers and the slot maps, and replays them for the backward pass, so the
// layout crosses the network once. All ranks of the group make the same calls in the same order.
//
// Placement comes from prefix sums on the device: rows arrive grouped by local expert in the order
// (expert, source rank, source token), or as they come, (source rank, source token), the same on
// every run. Sums are f32 in a fixed order. A token travels once per rank, whatever number of its
// experts live there; across nodes once per node (ExchangeConfig::by_node).
//
// The calls only hand work in; they return the time point of their result and never wait for the
// network. One thread at a time calls an exchange and its handles.
//
// A call that fails on one rank fails on all: whatever a rank refuses (an argument, too many
// tokens) or cannot do (memory for what arrives) ends the job through the control plane, and every
// rank of the world throws that error, with the rank, the phase and the counts, at its next wait or
// call. Only in a group of one a refused call changes nothing. Bytes travel through the Transport
// that the caller opened; nothing has to be called to keep them moving.

#include <bellows/comm/configuration.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/comm/sizes.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/recipe.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// What an exchange has moved so far.
struct ExchangeStats {
    std::uint64_t exchanges = 0;
    std::uint64_t bytes_sent = 0;          ///< to other ranks
    std::uint64_t bytes_sent_to_nodes = 0; ///< of those: to ranks of other nodes
    std::uint64_t bytes_sent_by_link = 0;  ///< and: from device to device (Transport::device_link)
    std::uint64_t bytes_received = 0;
    std::uint64_t messages_sent = 0;
    double seconds_waited =
        0; ///< between the last byte handed to the network and the last received
    /// Before that: until every member had told how much comes, and for memory for it.
    double seconds_for_counts = 0, seconds_for_memory = 0;
    /// From when a leg's first copy began to when its last record had come, copies to and from the
    /// host among it, packing not.
    double seconds_moving = 0;
};

/// The same with one other rank.
struct ExchangePeerStats {
    int rank = 0;
    std::uint64_t bytes_sent = 0, bytes_received = 0, messages_sent = 0;
    double seconds_waited = 0; ///< for the last of its records of each leg
};

/// How results are combined.
struct CombineOptions {
    bool accumulate = false; ///< onto what stands in out
    /// Each row's result times its routing weight, in f32, before it is summed; the gradients'
    /// calls leave that to the caller. Masked rows always are; RankMajor's sums are the caller's:
    /// Error{InvalidArgument}.
    bool weighted = false;
    /// Up to two, the first one first: [tokens, hidden] of dtype, added in f32 at the source (a
    /// shared expert's output, a residual), before what comes back.
    TensorView bias{}, second_bias{};
};

class ExpertExchange;

class ExchangeHandle {
public:
    /// Waits for the results of its calls and until the other ranks have what its memory is sent
    /// from, within the calls' time limits; not after a failure. What a lane still has under way
    /// keeps the memory that it needs.
    ~ExchangeHandle();
    ExchangeHandle(const ExchangeHandle&) = delete;
    ExchangeHandle& operator=(const ExchangeHandle&) = delete;

    /// Received rows: [capacity, hidden] of dtype, or codes; their row_count is on the device. The
    /// memory is bound when the counts are known. Contiguous in ExpertMajor unless they are codes.
    /// ExpertSlots: [ranks * max_tokens, hidden], as they came.
    TensorView rows() const;
    /// rows() with their scales, where tokens travel as codes. Codes and scales of ExpertMajor's
    /// padding are 0. Throws Error{InvalidArgument} elsewhere, as what follows does.
    fp8::Quantized quantized_rows() const;
    /// ExpertSlots: [capacity] i32, the slot of each row, received token * top_k + k.
    TensorView row_slots() const;
    /// Not of masked rows. Routing weights: [capacity] f32 of each row by expert, [capacity, top_k]
    /// of each choice of its token in RankMajor, 0 for experts of other ranks.
    TensorView row_weights() const;
    /// RankMajor: [capacity, top_k] i32, the local experts that a row is for, -1 for others.
    TensorView row_experts() const;
    /// Rows by expert: first row of each local expert: [num_local_experts + 1] u32. A rank without
    /// experts has one entry, 0, and nothing to multiply: grouped products want a group.
    TensorView expert_offsets() const;
    /// Rows for each local expert: [num_local_experts] u32. Not in RankMajor of LowLatency.
    TensorView expert_counts() const;
    /// Masked rows: how many an expert has room for; the masked layout of grouped products is
    /// fp8::GroupLayout::masked(expert_counts(), spacing()).
    std::uint64_t spacing() const;
    /// Where rows that travel to the experts as codes stand at their source, [tokens, hidden] and
    /// scales: those of the last dispatch or combine_backward, until the next of them. A caller may
    /// quantise the tokens of the next one here itself and hand in the codes as x, or d_out. Not of
    /// LowLatency.
    fp8::Quantized outgoing_codes(std::uint64_t tokens) const;
    /// Where combine takes from what it sends, one for each received token: [ranks * max_tokens,
    /// hidden] of the sums' type, strided. Bound and left as it is by each dispatch. RankMajor: the
    /// rows' results, which the caller writes here to save a copy. Rows by expert: what
    /// sum_results() or sum_row_gradients() leave, and for nobody else to read.
    TensorView results() const;
    /// Rows by expert: records what combine would do first on the device, the sum of each received
    /// token's results: [capacity, hidden] of dtype. For callers who want it behind what makes
    /// them, on whichever queue. Hand results() to combine then. Of the handle as it is at the
    /// recording's run. weighted: as CombineOptions::weighted, which combine refuses here.
    void sum_results(Recording& recording, const TensorView& results, bool weighted = false) const;
    /// The same of dispatch_backward, which takes results() for d_rows then, and d_topk_weights if
    /// there were d_row_weights here, else what it writes there is undefined. Those: [capacity]
    /// f32, or none.
    void sum_row_gradients(Recording& recording, const TensorView& d_rows,
                           const TensorView& d_row_weights) const;
    /// Gradient of the rows' results, as combine_backward delivers it, in the places of rows(): of
    /// dtype, or codes.
    TensorView d_results() const;
    /// d_results() with their scales, where gradients travel as codes, as quantized_rows().
    fp8::Quantized quantized_d_results() const;
    std::uint64_t capacity() const;

    /// By which of ExpertExchange::set_placement's tables the dispatches that follow go; at first
    /// the one of number 0. Throws Error{InvalidArgument} for one that there is not.
    void use_placement(std::uint64_t number);

    /// A tensor with one row per row, of ExpertSlots by expert, bound together with rows():
    /// [capacity, columns].
    /// For what the experts compute. Before the first dispatch.
    TensorView add_row_tensor(std::string name, DType dtype, std::uint64_t columns,
                              MemoryCategory category = MemoryCategory::Activations);

    struct Impl;

private:
    friend class ExpertExchange;
    friend class ChunkedExchange;
    explicit ExchangeHandle(std::shared_ptr<Impl> impl);
    std::shared_ptr<Impl> impl_;
};

/// The second half of a call in the hook form: called once, it begins to receive. Until then the
/// exchange holds no posted receive, no workgroup and no queue for it, and its time limit does not
/// run; its own sends go on. Large records leave a rank when they are received: what the other
/// ranks hand in next with the same handle waits for this hook, and so does the call's time limit
/// there. So no rank may wait for a later call before it has called its hooks of earlier ones. By
/// node, what a rank passes on of others' tokens, whatever its size, leaves with the hook, too.
/// Over a device link records come before the hook, by the link's copies alone, except those of a
/// high-throughput dispatch, whose numbers are not known. Dropped without being called, it receives
/// and passes on all the same, so that other ranks are not held up, but the result is lost. The
/// handle, and what its exchange works with, must outlive it, called or not.
class [[nodiscard]] ExchangeHook {
public:
    ExchangeHook(ExchangeHook&&) noexcept;
    ExchangeHook& operator=(ExchangeHook&&) noexcept;
    ~ExchangeHook();

    /// The time point of the result; in the order of work the result is written here. Throws
    /// Error{InvalidArgument} at a second call.
    TimePoint operator()();

    struct Impl;

private:
    friend class ExpertExchange;
    explicit ExchangeHook(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

class ExpertExchange {
public:
    /// Not collective. `thread` runs the exchange's lanes. The world, transport, thread and device
    /// must outlive it and what was handed in. Throws Error{InvalidArgument} naming the value that
    /// does not fit, Error{Unsupported} for an option that this version does not have.
    ExpertExchange(Device& device, World& world, Transport& transport, HostThread& thread,
                   ExchangeConfig config);
    ~ExpertExchange();

    const ExchangeConfig& config() const noexcept;
    /// With slots_per_rank: slots.
    std::uint64_t num_local_experts() const noexcept;
    std::uint64_t first_local_expert() const noexcept;
    /// Which expert each slot holds from the next dispatch on, [ranks * slots_per_rank], the slots
    /// of a rank one behind the other; -1: the slot is empty, and no row comes for it. Each expert
    /// has at least one slot, and at most one of a rank. A token goes to the slot of its own rank
    /// where there is one, else to one of its node, else to any, by turns (the token's number plus
    /// the source's position); in LowLatency ranks that are masked or lost are passed over while
    /// another has the expert. Handles keep the slots of their last dispatch. number: of a table,
    /// below ExchangeConfig::placements. Collective: all ranks give the same between the same
    /// dispatches. Waits for dispatches that are being packed. Throws Error{InvalidArgument}.
    void set_placement(std::span<const std::int32_t> expert_of_slot, std::uint64_t number = 0);
    /// As it stands; empty where slots_per_rank is 0.
    std::span<const std::int32_t> placement(std::uint64_t number = 0) const;
    /// Positions in the group of the ranks that hold an expert, ascending.
    std::vector<int> owners(std::uint64_t expert, std::uint64_t number = 0) const;
    /// Whether tokens travel once to each node (ExchangeConfig::by_node).
    bool by_node() const noexcept;

    /// ExchangeConfig::workgroups for the calls that follow; ranks may differ.
    void set_workgroups(std::uint32_t most) noexcept;

    /// LowLatency: the calls that follow, and what of earlier ones has not come, do without a rank:
    /// nothing is sent to it, its tokens are for nobody here, and its experts' results count as 0.
    /// Ranks that are lost (ControlOptions::outlive_lost_ranks) are done without from the moment at
    /// which this rank hears of it, for good. A rank that lives must mask those that mask it, and
    /// unmask them before the same call; earlier calls, done or not, go on without them. A rank
    /// that is masked when a call's result is here is still sent what that call owes it, within the
    /// call's time limit, and the handle's next call waits for that; one that is lost is not. Throw
    /// Error{InvalidArgument} in other modes and for ranks that are not others of the group.
    void mask_rank(int rank);
    void unmask_rank(int rank);
    /// Those that are masked or lost, ascending.
    std::vector<int> masked_ranks() const;

    /// Summed over all its handles, living or not. What runs right now may be missing.
    ExchangeStats stats() const noexcept;
    /// The same by rank: those that this rank has exchanged bytes with, ascending. By node ranks of
    /// this node and those of the same place on others.
    std::vector<ExchangePeerStats> peer_stats() const;

    /// Bytes that create_handle() takes, exactly. In LowLatency that is all that a handle ever
    /// takes of the device's memory; in HighThroughput rows and received records come with what
    /// arrives. What copies between device and host pass through is the host's and not counted. A
    /// link's driver rounds each buffer of records up to its granularity. Before there is an
    /// exchange: exchange_handle_bytes() of sizes.hpp.
    std::uint64_t handle_bytes() const;
    /// Handles in flight at once may be as many as there are; each has a lane of its own.
    std::unique_ptr<ExchangeHandle> create_handle(std::string name);

    /// x: [tokens, hidden] of dtype, or the codes of outgoing_codes(tokens); topk_ids: [tokens,
    /// top_k] i32 of global experts (-1: none), topk_weights: [tokens, top_k] f32; tokens may be 0
    /// and differ between ranks. More than max_tokens is Error{InvalidArgument}: a dispatch is not
    /// cut into pieces. Fills the handle's rows, weights and offsets. Collective.
    TimePoint dispatch(ExchangeHandle& handle, const TensorView& x, const TensorView& topk_ids,
                       const TensorView& topk_weights);
    /// out[t] (+)= the sum of the results of the token's rows. results: [capacity, hidden] of
    /// dtype, contiguous, or the handle's results(); out: [tokens, hidden]. Weights are not applied
    /// here but by CombineOptions::weighted. Collective.
    TimePoint combine(ExchangeHandle& handle, const TensorView& results, const TensorView& out,
                      bool accumulate = false);
    /// The same, weighted or with biases.
    TimePoint combine(ExchangeHandle& handle, const TensorView& results, const TensorView& out,
                      const CombineOptions& options);
    /// The same calls, sending only: what they return receives when it is called, and until then no
    /// other call may use the handle. Ranks need not use the same form. In SyncMode::Serial the
    /// bytes are received at once.
    ExchangeHook dispatch_send(ExchangeHandle& handle, const TensorView& x,
                               const TensorView& topk_ids, const TensorView& topk_weights);
    ExchangeHook combine_send(ExchangeHandle& handle, const TensorView& results,
                              const TensorView& out, bool accumulate = false);
    ExchangeHook combine_send(ExchangeHandle& handle, const TensorView& results,
                              const TensorView& out, const CombineOptions& options);
    /// The gradient of combine: d_out: [tokens, hidden] as x in dispatch, to the handle's
    /// d_results(). Collective.
    TimePoint combine_backward(ExchangeHandle& handle, const TensorView& d_out);
    /// The gradient of dispatch: d_rows: [capacity, hidden] as results in combine, d_row_weights:
    /// f32 of the extents of row_weights() (optional); d_x: [tokens, hidden], d_topk_weights:
    /// [tokens, top_k] f32 (if d_row_weights). Collective.
    TimePoint dispatch_backward(ExchangeHandle& handle, const TensorView& d_rows,
                                const TensorView& d_row_weights, const TensorView& d_x,
                                bool accumulate, const TensorView& d_topk_weights);

    struct Impl;

private:
    friend class ChunkedExchange;
    std::shared_ptr<Impl> impl_;
};

} // namespace bellows
