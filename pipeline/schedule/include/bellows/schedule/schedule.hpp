// SPDX-License-Identifier: MIT
#pragma once

// Pipeline schedules as data: for each rank the list of its ops in the order in which they are
// handed in. No Vulkan, no MPI; pure functions.
//
// A model is cut into stages. A rank holds one or more chunks, each a stage; ops name a chunk by
// its number on the rank, the phase. Micro-batches pass through the stages in one stream, or in two
// from both ends (DualPipe), where each stage stands on two ranks: the first half of the
// micro-batches are stream 0's.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

enum class OpKind : std::uint8_t {
    Forward,
    Backward, ///< the input's gradient, then the weights'
    InputGradient,
    WeightGradient, ///< what an InputGradient has left for later
};

struct ScheduleOp {
    OpKind kind = OpKind::Forward;
    std::uint32_t phase = 0;
    std::uint64_t micro_batch = 0; ///< of all streams'
    /// This and the next op are a pair, a Forward and a Backward of different micro-batches, which
    /// may overlap.
    bool with_next = false;
    bool operator==(const ScheduleOp&) const = default;
};

struct ScheduleChunk {
    std::uint64_t stage = 0, stream = 0;
    bool operator==(const ScheduleChunk&) const = default;
};

enum class ScheduleKind : std::uint8_t {
    GPipe,       ///< all forwards, then all backwards
    OneFOneB,    ///< PipeDream-flush
    Interleaved, ///< 1F1B with several chunks per rank
    ZbH1,        ///< zero bubble with the activations of 1F1B
    ZbH2,        ///< zero bubble with up to 2 * ranks - 1 of them
    ZbV,         ///< zero bubble, two chunks per rank placed as a V
    DualPipe,    ///< from both ends, two copies of the parameters
    DualPipeV,   ///< half of it, folded: two chunks per rank placed as a V
};
inline constexpr std::size_t kNumScheduleKinds = 8;
/// "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev".
const char* to_string(ScheduleKind kind) noexcept;
/// Throws Error{InvalidArgument} that names them all.
ScheduleKind parse_schedule_kind(std::string_view name);

struct ScheduleDesc {
    ScheduleKind kind = ScheduleKind::OneFOneB;
    std::uint64_t ranks = 1;
    std::uint64_t micro_batches = 1; ///< of both streams together
    std::uint64_t chunks = 2;        ///< Interleaved: per rank
};

/// What a rank keeps at most, in chunks.
struct HighWater {
    std::uint64_t activations = 0; ///< from a forward to the end of its input's gradient
    std::uint64_t deferred = 0;    ///< input gradients whose weight gradients are still to come
    std::uint64_t both = 0;        ///< at once
};

struct Schedule {
    std::string name;
    std::uint64_t num_stages = 0, num_streams = 1, num_micro_batches = 0;
    bool forward_only = false;                      ///< nothing goes back: see forwards_of()
    std::vector<std::vector<ScheduleChunk>> chunks; ///< of each rank
    std::vector<std::vector<ScheduleOp>> ops;       ///< of each rank

    std::uint64_t num_ranks() const noexcept { return ops.size(); }
    /// Micro-batches [first, first + num_micro_batches / num_streams) are the stream's.
    std::uint64_t first_of_stream(std::uint64_t stream) const noexcept {
        return num_micro_batches / num_streams * stream;
    }
    const ScheduleChunk& chunk_of(std::uint64_t rank, const ScheduleOp& op) const {
        return chunks[rank][op.phase];
    }

    /// Whether two ops anywhere may overlap as a pair.
    bool has_pairs() const noexcept;
    /// Micro-batches that a chunk holds at once, from forward to weight gradient: the m-th of its
    /// stream is kept in slot m % peak_in_flight. Where nothing goes back two take turns, so that
    /// one arrives while the other computes. These throw Error{InvalidArgument}.
    std::uint64_t peak_in_flight(std::uint64_t rank, std::uint64_t phase = 0) const;
    HighWater high_water(std::uint64_t rank) const;
};

/// Throws Error{InvalidArgument} that names the rule that the numbers break: at least one rank and
/// one micro-batch; Interleaved at least 2 chunks and a multiple of `ranks` micro-batches; DualPipe
/// an even number of ranks, an even number of micro-batches, at least 2 * ranks of them; DualPipeV
/// at least 2 * ranks.
Schedule make_schedule(const ScheduleDesc& desc);

/// The schedule with each Backward as its halves, so that its input's gradient leaves before the
/// weights' is made; those of pairs stay.
Schedule split_backwards(Schedule schedule);

/// The schedule's forwards alone, in their order: to evaluate a model that is spread out to train.
Schedule forwards_of(Schedule schedule);

/// Where a stage's chunk of a stream stands.
struct ChunkPlace {
    std::uint64_t rank = 0;
    std::uint32_t phase = 0;
};
/// [stream][stage]. The schedule's chunks must be valid.
std::vector<std::vector<ChunkPlace>> chunk_places(const Schedule& schedule);

/// Checks any schedule, whoever made it: sizes and ranges; each stage stands once in each stream;
/// each micro-batch of a chunk has its forward and, unless forward_only, its input's and its
/// weights' gradient once, in dependency order, without deadlock, a pair as one; between two ranks
/// activations are taken in the order in which they were sent, and so are gradients; each chunk's
/// weight gradients come in ascending order of micro-batches, so that sums do not depend on the
/// schedule; and no slot is taken while it is held. Throws Error{InvalidArgument} that names the
/// rank and the op.
void verify(const Schedule& schedule);

/// "F0", "B1", "I1", "W": the phase's digit; of deferred weight gradients the oldest is meant.
std::string to_text(const ScheduleOp& op);
/// "F0.m3": what to_text says, and the micro-batch.
std::string to_name(const ScheduleOp& op);
/// "F0 F1 I1 W F0&B1 …", one line per rank.
std::string to_text(const Schedule& schedule);

} // namespace bellows
