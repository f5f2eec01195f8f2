// SPDX-License-Identifier: MIT
// The schedules. Each is written as what one rank does; which micro-batch an op is of follows from
// how many of its kind and phase have gone before.

#include <bellows/base/error.hpp>
#include <bellows/schedule/schedule.hpp>

#include <algorithm>
#include <deque>
#include <utility>

namespace bellows {

namespace {

/// A rank's ops as they are added.
class RankProgram {
public:
    /// first: each phase's first micro-batch.
    explicit RankProgram(std::vector<std::uint64_t> first)
        : forwards_(first), gradients_(std::move(first)) {}

    void forward(std::uint32_t phase) { add(OpKind::Forward, phase, forwards_[phase]++); }
    void backward(std::uint32_t phase) { add(OpKind::Backward, phase, gradients_[phase]++); }
    /// A backward whose weight gradient is left for later.
    void input_gradient(std::uint32_t phase) {
        deferred_.push_back({OpKind::WeightGradient, phase, gradients_[phase]});
        add(OpKind::InputGradient, phase, gradients_[phase]++);
    }
    /// The oldest that is left of all phases.
    void weight_gradient() { weight_gradient(deferred_.front().phase); }
    /// The oldest that is left of a phase.
    void weight_gradient(std::uint32_t phase) {
        const auto oldest = std::ranges::find(deferred_, phase, &ScheduleOp::phase);
        ops_.push_back(*oldest);
        deferred_.erase(oldest);
    }
    void pair(std::uint32_t forward_phase, std::uint32_t backward_phase) {
        forward(forward_phase);
        ops_.back().with_next = true;
        backward(backward_phase);
    }
    std::uint64_t num_deferred() const { return deferred_.size(); }
    std::uint64_t num_deferred(std::uint32_t phase) const {
        return static_cast<std::uint64_t>(std::ranges::count(deferred_, phase, &ScheduleOp::phase));
    }
    std::uint64_t num_forwards(std::uint32_t phase) const { return forwards_[phase]; }
    std::vector<ScheduleOp> take() { return std::move(ops_); }

private:
    void add(OpKind kind, std::uint32_t phase, std::uint64_t micro_batch) {
        ops_.push_back({kind, phase, micro_batch});
    }

    std::vector<ScheduleOp> ops_;
    std::vector<std::uint64_t> forwards_, gradients_; ///< the next micro-batch of each phase
    std::deque<ScheduleOp> deferred_;                 ///< weight gradients left for later
};

using Program = std::vector<ScheduleOp>;

template <class F>
void repeat(std::uint64_t times, F&& what) {
    for (std::uint64_t i = 0; i < times; ++i)
        what();
}

Program gpipe(std::uint64_t micro_batches) {
    RankProgram program({0});
    repeat(micro_batches, [&] { program.forward(0); });
    repeat(micro_batches, [&] { program.backward(0); });
    return program.take();
}

Program one_f_one_b(std::uint64_t ranks, std::uint64_t rank, std::uint64_t micro_batches) {
    RankProgram program({0});
    const std::uint64_t warm_up = std::min(micro_batches, ranks - 1 - rank);
    repeat(warm_up, [&] { program.forward(0); });
    repeat(micro_batches - warm_up, [&] {
        program.forward(0);
        program.backward(0);
    });
    repeat(warm_up, [&] { program.backward(0); });
    return program.take();
}

/// Micro-batches go through in groups of as many as there are ranks, each group through all chunks
/// before the next one; backwards in the same order, chunks from the last.
Program interleaved(const ScheduleDesc& desc, std::uint64_t rank) {
    RankProgram program(std::vector<std::uint64_t>(desc.chunks, 0));
    const std::uint64_t all = desc.micro_batches * desc.chunks;
    const auto phase_of = [&](std::uint64_t index) {
        return static_cast<std::uint32_t>(index / desc.ranks % desc.chunks);
    };
    const auto last = static_cast<std::uint32_t>(desc.chunks - 1);
    const std::uint64_t warm_up =
        std::min(all, 2 * (desc.ranks - 1 - rank) + (desc.chunks - 1) * desc.ranks);
    for (std::uint64_t i = 0; i < all + warm_up; ++i) {
        if (i < all)
            program.forward(phase_of(i));
        if (i >= warm_up)
            program.backward(last - phase_of(i - warm_up));
    }
    return program.take();
}

/// `lead` forwards begin; each weight gradient follows its input gradient until the last `tail`
/// micro-batches, whose forwards, where some are left, take that place: the weight gradients they
/// push back fill the end.
Program zero_bubble(std::uint64_t lead, std::uint64_t tail, std::uint64_t micro_batches) {
    RankProgram program({0});
    lead = std::min(lead, micro_batches);
    repeat(lead, [&] { program.forward(0); });
    for (std::uint64_t i = 0, left = micro_batches - lead; i < micro_batches; ++i) {
        program.input_gradient(0);
        const bool steady = i + tail < micro_batches;
        if (steady || left == 0)
            program.weight_gradient();
        if (left > 0) {
            program.forward(0);
            --left;
        }
    }
    repeat(program.num_deferred(), [&] { program.weight_gradient(); });
    return program.take();
}

/// Phase 0 goes down the V, phase 1 up again. Made for at least 2 * ranks - 1 micro-batches; of
/// fewer, what the others would do is left out.
Program zb_v(std::uint64_t ranks, std::uint64_t rank, std::uint64_t micro_batches) {
    RankProgram program({0, 0});
    const std::uint64_t least = std::max(micro_batches, 2 * ranks - 1);
    const auto gradients = [&](std::uint32_t phase) {
        program.input_gradient(phase);
        program.weight_gradient(phase);
    };
    repeat(2 * (ranks - rank) - 1, [&] { program.forward(0); });
    repeat(rank, [&] {
        program.forward(1);
        program.forward(0);
    });
    repeat(ranks - rank, [&] {
        program.forward(1);
        gradients(1);
    });
    while (program.num_forwards(1) < least) {
        if (program.num_forwards(0) < least)
            program.forward(0);
        gradients(0);
        program.forward(1);
        gradients(1);
    }
    repeat(rank, [&] {
        program.input_gradient(0);
        program.input_gradient(1);
    });
    repeat(ranks - rank, [&] {
        program.input_gradient(0);
        program.weight_gradient(0);
    });
    for (const std::uint32_t phase : {0u, 1u})
        repeat(program.num_deferred(phase), [&] { program.weight_gradient(phase); });
    Program ops = program.take();
    std::erase_if(ops, [&](const ScheduleOp& op) { return op.micro_batch >= micro_batches; });
    return ops;
}

/// What DualPipe and DualPipeV share. outer: how far the rank is from where the streams turn or
/// meet; h: from the end; paired: pairs of step 4 of both orders.
Program dual_pipe(std::uint64_t outer, std::uint64_t h, std::uint64_t paired,
                  std::vector<std::uint64_t> first) {
    RankProgram program(std::move(first));
    repeat(2 * outer, [&] { program.forward(0); });
    repeat(h + 1, [&] {
        program.forward(0);
        program.forward(1);
    });
    repeat(outer, [&] {
        program.input_gradient(1);
        program.weight_gradient();
        program.forward(1);
    });
    for (std::uint64_t i = 0; i < paired; ++i) {
        if (i == 0 && outer == 0) { // what this forward's peer waits for need not wait for the pair
            program.forward(0);
            program.backward(1);
        } else {
            program.pair(0, 1);
        }
        program.pair(1, 0);
    }
    repeat(outer, [&] {
        program.backward(1);
        program.pair(1, 0);
    });
    // From the middle on, gradients of inputs alone: first of phase 1 if h is odd, else of phase 0.
    for (std::uint64_t i = 0; i <= h; ++i) {
        const std::uint64_t middle = (h + 1) / 2;
        if (i > middle || (i == middle && h % 2 == 1))
            program.input_gradient(1);
        else
            program.backward(1);
        if (i >= middle)
            program.input_gradient(0);
        else
            program.backward(0);
    }
    repeat(outer, [&] {
        program.weight_gradient();
        program.input_gradient(0);
    });
    repeat(h + 1, [&] { program.weight_gradient(); });
    return program.take();
}

[[noreturn]] void impossible(const ScheduleDesc& desc, const std::string& rule) {
    throw Error(ErrorCode::InvalidArgument, std::string(to_string(desc.kind)) + " " + rule +
                                                "; there are " + std::to_string(desc.ranks) +
                                                " ranks, " + std::to_string(desc.micro_batches) +
                                                " micro-batches");
}

void check(const ScheduleDesc& desc) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 16, kMostOps = std::uint64_t{1} << 24;
    const auto require = [&](bool holds, const std::string& rule) {
        if (!holds)
            impossible(desc, rule);
    };
    require(desc.ranks > 0 && desc.micro_batches > 0, "needs at least 1 rank and 1 micro-batch");
    require(desc.ranks <= kMost && desc.micro_batches <= kMost && desc.chunks <= kMost,
            "takes up to 65536 ranks, micro-batches and chunks");
    const std::uint64_t chunks = desc.kind == ScheduleKind::Interleaved ? desc.chunks : 1;
    require(desc.ranks * desc.micro_batches <= kMostOps / std::max<std::uint64_t>(chunks, 1),
            "has more than 2^24 forwards");
    switch (desc.kind) {
    case ScheduleKind::Interleaved:
        require(desc.chunks >= 2, "needs at least 2 chunks per rank");
        require(desc.micro_batches % desc.ranks == 0,
                "needs a number of micro-batches that is a multiple of that of ranks");
        break;
    case ScheduleKind::DualPipe:
        require(desc.ranks % 2 == 0 && desc.micro_batches % 2 == 0,
                "needs an even number of ranks and of micro-batches");
        [[fallthrough]];
    case ScheduleKind::DualPipeV:
        require(desc.micro_batches >= 2 * desc.ranks,
                "needs at least twice as many micro-batches as ranks");
        break;
    default:
        break;
    }
}

/// Which chunks a rank has, by phase.
std::vector<ScheduleChunk> chunks_of(const ScheduleDesc& desc, std::uint64_t rank) {
    std::vector<ScheduleChunk> chunks;
    switch (desc.kind) {
    case ScheduleKind::Interleaved:
        for (std::uint64_t chunk = 0; chunk < desc.chunks; ++chunk)
            chunks.push_back({chunk * desc.ranks + rank, 0});
        return chunks;
    case ScheduleKind::ZbV:
    case ScheduleKind::DualPipeV:
        return {{rank, 0}, {2 * desc.ranks - 1 - rank, 0}};
    case ScheduleKind::DualPipe:
        // The second half of the ranks is the first one's mirror image.
        chunks = {{rank, 0}, {desc.ranks - 1 - rank, 1}};
        if (rank >= desc.ranks / 2)
            std::swap(chunks[0], chunks[1]);
        return chunks;
    default:
        return {{rank, 0}};
    }
}

Program program_of(const ScheduleDesc& desc, std::uint64_t rank) {
    const std::uint64_t ranks = desc.ranks, micro_batches = desc.micro_batches;
    switch (desc.kind) {
    case ScheduleKind::GPipe:
        return gpipe(micro_batches);
    case ScheduleKind::OneFOneB:
        return one_f_one_b(ranks, rank, micro_batches);
    case ScheduleKind::Interleaved:
        return interleaved(desc, rank);
    case ScheduleKind::ZbH1:
        return zero_bubble(ranks - rank, ranks, micro_batches);
    case ScheduleKind::ZbH2:
        return zero_bubble(2 * (ranks - rank) - 1, 2 * ranks - 1, micro_batches);
    case ScheduleKind::ZbV:
        return zb_v(ranks, rank, micro_batches);
    case ScheduleKind::DualPipe: {
        const std::uint64_t h = std::min(rank, ranks - 1 - rank), half = micro_batches / 2;
        const std::uint64_t second = rank >= ranks / 2 ? half : 0;
        return dual_pipe(ranks / 2 - 1 - h, h, half - ranks + h + 1, {second, half - second});
    }
    case ScheduleKind::DualPipeV:
        return dual_pipe(ranks - 1 - rank, rank, micro_batches - 2 * ranks + rank + 1, {0, 0});
    }
    impossible(desc, "is no kind of schedule that this version has");
}

} // namespace

Schedule make_schedule(const ScheduleDesc& desc) {
    check(desc);
    Schedule schedule;
    schedule.name = to_string(desc.kind);
    schedule.num_micro_batches = desc.micro_batches;
    schedule.num_streams = desc.kind == ScheduleKind::DualPipe ? 2 : 1;
    for (std::uint64_t rank = 0; rank < desc.ranks; ++rank) {
        schedule.chunks.push_back(chunks_of(desc, rank));
        schedule.ops.push_back(program_of(desc, rank));
        schedule.num_stages += schedule.chunks.back().size();
    }
    schedule.num_stages /= schedule.num_streams;
    return schedule;
}

} // namespace bellows
