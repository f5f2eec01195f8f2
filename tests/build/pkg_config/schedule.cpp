// SPDX-License-Identifier: MIT
#include <bellows/schedule/schedule.hpp>

int main() {
    const bellows::Schedule schedule = bellows::make_schedule(
        {.kind = bellows::ScheduleKind::DualPipe, .ranks = 4, .micro_batches = 8});
    bellows::verify(schedule);
    return schedule.num_ranks() == 4 ? 0 : 1;
}
