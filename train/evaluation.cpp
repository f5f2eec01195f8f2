// SPDX-License-Identifier: MIT
#include "evaluation.hpp"

#include "step_totals.hpp"

#include <span>
#include <utility>

namespace bellows {

Schedule one_forward_of(const Schedule& schedule) {
    Schedule forward = forwards_of(schedule);
    for (std::uint64_t rank = 0; rank < forward.num_ranks(); ++rank) {
        auto& ops = forward.ops[rank];
        std::erase_if(ops, [&](const ScheduleOp& op) {
            const std::uint64_t stream = forward.chunk_of(rank, op).stream;
            return op.micro_batch != schedule.first_of_stream(stream);
        });
        for (ScheduleOp& op : ops)
            op.micro_batch = forward.chunk_of(rank, op).stream;
    }
    forward.num_micro_batches = forward.num_streams;
    return forward;
}

Evaluation::Evaluation(RunningStep& step, HostCollectives& everyone, Desc desc)
    : step_(step), everyone_(everyone), desc_(std::move(desc)),
      schedule_(one_forward_of(desc_.training)),
      executor_(step.device, schedule_, desc_.place, desc_.world_ranks, desc_.chunks, desc_.pipes,
                step.limit) {
}

double Evaluation::loss(const SequenceSource& source, std::uint64_t count) {
    losses_ = {count, {}};
    const std::uint64_t training = step_.first_micro_batch;
    step_.index = 0;
    step_.source = &source;
    step_.held_out = &losses_;
    const std::uint64_t at_once = desc_.dp * schedule_.num_streams; // micro-batches
    for (std::uint64_t first = 0; first * desc_.sequences < count; first += at_once) {
        step_.first_micro_batch = first + desc_.d * schedule_.num_streams;
        executor_.run();
    }
    step_.last_loss.wait(step_.limit);
    step_.held_out = nullptr;
    step_.first_micro_batch = training;
    return sum_over_ranks() / static_cast<double>(count * step_.seq);
}

double Evaluation::sum_over_ranks() {
    std::vector<double> mine; // pairs: which micro-batch, its loss
    for (const auto& [micro_batch, loss] : losses_.by_micro_batch) {
        mine.push_back(static_cast<double>(micro_batch));
        mine.push_back(loss);
    }
    std::map<double, double> all;
    for (const auto& part : everyone_.all_gather(std::as_bytes(std::span(mine)))) {
        const std::vector<double> values = numbers_of(part);
        for (std::size_t i = 0; i + 1 < values.size(); i += 2)
            all[values[i]] = values[i + 1];
    }
    double sum = 0;
    for (const auto& [micro_batch, loss] : all)
        sum += loss;
    return sum;
}

} // namespace bellows
