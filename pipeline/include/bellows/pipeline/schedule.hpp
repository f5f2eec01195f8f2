// SPDX-License-Identifier: MIT
#pragma once

// Pipeline schedules as data: for each stage the list of its ops in the order in which they are
// handed in. No Vulkan, no MPI; pure functions.

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

enum class OpKind : std::uint8_t {
    Forward,
    InputGradient,
    WeightGradient,
};

struct ScheduleOp {
    OpKind kind = OpKind::Forward;
    std::uint64_t micro_batch = 0;
    bool operator==(const ScheduleOp&) const = default;
};

struct Schedule {
    std::uint64_t num_stages = 0;
    std::uint64_t num_micro_batches = 0;
    std::vector<std::vector<ScheduleOp>> stages; ///< ops of each stage

    /// Micro-batches whose activations a stage holds at once, from forward to weight gradient:
    /// micro-batch m is kept in slot m % peak_in_flight. Throws Error{InvalidArgument}.
    std::uint64_t peak_in_flight(std::uint64_t stage) const;
};

/// One forward, one backward (PipeDream-flush): stage s of P runs min(M, P - 1 - s) forwards, then
/// alternates, then drains; each input gradient is followed by its weight gradient.
/// Throws Error{InvalidArgument} when there is no stage or no micro-batch.
Schedule one_f_one_b(std::uint64_t num_stages, std::uint64_t num_micro_batches);

/// Checks any schedule, whoever made it: sizes and ranges; every micro-batch has each op once, in
/// dependency order, without deadlock; neighbours send and take messages in one order, the edges
/// between them being FIFOs; weight gradients come in ascending order of micro-batches; and no slot
/// is taken while it is held. Throws Error{InvalidArgument} that names the stage and the op.
void verify(const Schedule& schedule);

/// "F0".
std::string to_text(const ScheduleOp& op);
/// "F0 F1 B0 W0 …", one line per stage.
std::string to_text(const Schedule& schedule);

} // namespace bellows
