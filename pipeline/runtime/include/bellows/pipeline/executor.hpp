// SPDX-License-Identifier: MIT
#pragma once

// Runs a rank's part of any verified schedule: hands the ops of its chunks in, in the schedule's
// order, and moves activations and gradients between chunks: through pipes to other ranks, and with
// one copy within the device where the next stage is this rank's, too (forwards alone: through
// pipes). It waits for no other rank: what needs another's result is ordered behind its arrival,
// and a result leaves when its op has ended.
// Within that the device runs what can begin first, but, apart from pairs that interleave, what
// another rank waits for is held up neither by weight gradients, which come behind the gradient
// unless they are to fill (fill()), nor by the next op of its kind, which begins behind the last
// that it computes: what its exchanges leave free is shorter than what would begin meanwhile. Where
// copies have no queue of their own what ops compute keeps their order and waits until what left
// before has left. One thread at a time.

#include <bellows/comm/pipe.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/schedule/pair.hpp>
#include <bellows/schedule/schedule.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace bellows {

/// What a rank does for one of its chunks. Each op is a Forward, an InputGradient or a
/// WeightGradient (a Backward is the latter two) and made of nodes. Slots are below
/// Schedule::peak_in_flight(); what stands in one keeps until the slot's next forward. All stages'
/// tensors have the same size, whole words of 4 bytes.
class PipelineChunk {
public:
    virtual ~PipelineChunk() = default;

    virtual std::size_t num_nodes(OpKind op) const = 0;
    /// Whether a node computes; others move tokens.
    virtual bool computes(OpKind op, std::size_t node) const = 0;
    /// Of what forwards and input gradients compute.
    virtual QueueRole queue() const = 0;
    /// Hands a node in: an op's in ascending order, weight gradients as PipelineExecutor::fill()
    /// says, those of other chunks between them. Work on the same memory must take effect in the
    /// order of handing in, as the device's does.
    /// It begins behind `waits`, too, if it computes. Returns when it will have ended.
    virtual TimePoint submit(OpKind op, std::size_t node, std::uint64_t micro_batch,
                             std::uint64_t slot, std::span<const TimePoint> waits) = 0;

    /// What comes from the stage before and its gradient, which goes back there; of all stages but
    /// the first.
    virtual TensorView input(std::uint64_t slot) const = 0;
    virtual TensorView input_gradient(std::uint64_t slot) const = 0;
    /// What goes to the stage behind and its gradient, which comes from there; of all but the last.
    virtual TensorView output(std::uint64_t slot) const = 0;
    virtual TensorView output_gradient(std::uint64_t slot) const = 0;
};

/// A pipe for each kind of message: between two ranks those of one kind keep their order
/// (verify()), but not those of both together.
struct PipelinePipes {
    Pipe* activations = nullptr; ///< null: there is but one stage
    Pipe* gradients = nullptr;
};

class PipelineExecutor {
public:
    /// rank: of the schedule; world_ranks: which rank of the world stands for each of it; chunks:
    /// this rank's by phase; limit: of its waits for what it has handed in before. All that is
    /// handed in must outlive it. Throws Error{InvalidArgument} as verify() does, and for numbers
    /// that do not fit.
    PipelineExecutor(Device& device, const Schedule& schedule, std::uint64_t rank,
                     std::vector<int> world_ranks, std::vector<PipelineChunk*> chunks,
                     PipelinePipes pipes,
                     std::chrono::milliseconds limit = TimePoint::kDefaultTimeout);
    PipelineExecutor(Device&, const Schedule&&, std::uint64_t, std::vector<int>,
                     std::vector<PipelineChunk*>, PipelinePipes,
                     std::chrono::milliseconds = {}) = delete; // it must outlive this

    /// How the nodes of pairs of a forward of one phase and a backward of another interleave from
    /// now on; until then they are handed in one after the other. All ranks that share an exchange
    /// must have the same order. Throws Error{InvalidArgument} unless each node is there once, as
    /// verify() does for what it knows of them.
    void interleave(std::uint32_t forward, std::uint32_t backward, PairOrder order);
    /// How a phase's backwards that are no part of a pair hand their nodes in from now on, be they
    /// a Backward or an InputGradient and its WeightGradient right behind it: weight gradients
    /// before the last input gradient begin behind what those before them compute. Until then they
    /// all come last. Throws Error{InvalidArgument} unless each node is there once, input gradients
    /// in their order.
    void fill(std::uint32_t backward, std::vector<BackwardNode> order);
    /// Hands a step in. In the trace work has the name of its op, a Backward's of its halves, e.g.
    /// "F0.m3", "I1.m2", "W1.m2" (TraceEvent::op), and what goes between stages "PP(F0.m3)".
    void run();

private:
    /// A Forward, an InputGradient or a WeightGradient that is being handed in.
    struct Part {
        ScheduleOp op;
        std::uint64_t slot = 0;
        std::size_t handed_in = 0, count = 0; ///< nodes
        std::vector<TimePoint> waits{};       ///< of all of them
        TimePoint computed{};                 ///< the last that computes
    };
    Part part_of(const ScheduleOp& op, OpKind kind) const;
    /// Of an op, of both of a pair, or of a backward's halves.
    std::vector<Part> parts_of(std::span<const ScheduleOp> ops) const;
    std::size_t together(std::size_t op) const;
    void receive(const Part& part);
    TimePoint send(const Part& part);
    /// Of a part that does not interleave: so that nothing holds up what leaves the rank.
    std::vector<TimePoint> waits_of(const Part& part) const;
    void submit(Part& part, std::size_t node);
    void submit_next(Part& part) { submit(part, part.handed_in); }
    /// One after the other, apart from an order.
    void submit_all(Part& part);
    /// In the order of fill().
    void submit_filled(Part& input, Part& weight, const std::vector<BackwardNode>& order);
    bool sends(const Part& part) const;
    /// The world's rank that has a stage in the stream of a chunk.
    int rank_of(const ScheduleChunk& chunk, std::uint64_t stage) const;
    /// This rank's own phase of a stage in the stream of a chunk, where it and that chunk hand
    /// over by a copy; else null.
    const std::uint32_t* phase_here(const ScheduleChunk& chunk, std::uint64_t stage) const;
    std::uint64_t slot_of(std::uint32_t phase, std::uint64_t micro_batch) const;
    /// What a forward takes from, or an input gradient gives to, the stage before, which is
    /// `before` here and has kept its slot from its forward on.
    TimePoint hand_over(const Part& part, std::uint32_t before);

    Device& device_;
    bool one_queue_; ///< for what computes and what leaves
    const Schedule& schedule_;
    std::uint64_t rank_;
    std::vector<int> world_ranks_;
    std::vector<PipelineChunk*> chunks_;
    PipelinePipes pipes_;
    std::chrono::milliseconds limit_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, PairOrder> orders_; ///< by phases
    std::map<std::uint32_t, std::vector<BackwardNode>> fills_;            ///< by phase
    std::vector<std::vector<ChunkPlace>> places_;
    std::vector<std::uint64_t> slots_;                    ///< of each phase
    std::vector<std::vector<TimePoint>> input_gradients_; ///< the last ones, by phase and slot
    TimePoint last_done_;                                 ///< of the ops before
    std::array<TimePoint, 2> last_sent_;                  ///< activations, gradients
    /// What the last forward and the last input gradient that leave their stage have computed.
    std::array<TimePoint, 2> last_computed_;
    struct Copy {
        std::unique_ptr<Recording> recording;
        TimePoint last;
    };
    /// By the op's kind, its phase and slot, and the slot of the stage before.
    std::map<std::tuple<OpKind, std::uint32_t, std::uint64_t, std::uint64_t>, Copy> copies_;
};

} // namespace bellows
