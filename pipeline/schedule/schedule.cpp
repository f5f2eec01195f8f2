// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/pipeline/schedule.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

std::string to_text(const ScheduleOp& op) {
    static constexpr char kLetters[] = {'F', 'B', 'W'};
    const auto kind = static_cast<std::size_t>(op.kind);
    return (kind < std::size(kLetters) ? kLetters[kind] : '?') + std::to_string(op.micro_batch);
}

std::uint64_t Schedule::peak_in_flight(std::uint64_t stage) const {
    if (stage >= stages.size())
        throw Error(ErrorCode::InvalidArgument, "stage " + std::to_string(stage) +
                                                    " of a schedule of " +
                                                    std::to_string(stages.size()));
    std::uint64_t now = 0, peak = 0;
    for (const ScheduleOp& op : stages[stage]) {
        now += op.kind == OpKind::Forward ? 1 : 0;
        peak = std::max(peak, now);
        now -= op.kind == OpKind::WeightGradient && now > 0 ? 1 : 0;
    }
    return peak;
}

Schedule one_f_one_b(std::uint64_t num_stages, std::uint64_t num_micro_batches) {
    if (num_stages == 0 || num_micro_batches == 0)
        throw Error(ErrorCode::InvalidArgument,
                    "a schedule needs at least one stage and one micro-batch");
    Schedule schedule{num_stages, num_micro_batches, {}};
    for (std::uint64_t stage = 0; stage < num_stages; ++stage) {
        std::vector<ScheduleOp> ops;
        const std::uint64_t warm_up = std::min(num_micro_batches, num_stages - 1 - stage);
        for (std::uint64_t m = 0; m < warm_up; ++m)
            ops.push_back({OpKind::Forward, m});
        for (std::uint64_t m = 0; m < num_micro_batches; ++m) {
            if (warm_up + m < num_micro_batches)
                ops.push_back({OpKind::Forward, warm_up + m});
            ops.push_back({OpKind::InputGradient, m});
            ops.push_back({OpKind::WeightGradient, m});
        }
        schedule.stages.push_back(std::move(ops));
    }
    return schedule;
}

std::string to_text(const Schedule& schedule) {
    std::string text;
    for (const auto& ops : schedule.stages) {
        for (std::size_t i = 0; i < ops.size(); ++i)
            text += (i == 0 ? "" : " ") + to_text(ops[i]);
        text += '\n';
    }
    return text;
}

} // namespace bellows
