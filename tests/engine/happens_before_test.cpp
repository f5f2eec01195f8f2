// SPDX-License-Identifier: MIT
// The happens-before checker finds each kind of missing order, and nothing where nothing is
// missing.

#include "support/test_device.hpp"

#include <bellows/engine/lane.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>

namespace bellows {
namespace {

using testing::make_device;
using testing::test_options;

/// The message of the checker's verdict over `program`, or nothing.
template <class Program>
std::optional<std::string> verdict(const FaultInjection& faults, Program program) {
    DeviceOptions options = test_options();
    options.sync = SyncMode::Overlap;
    options.faults = faults;
    options.roles_apart = true;
    auto device = make_device(options);
    try {
        program(*device);
        device->wait_idle();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Internal) << error.what();
        return error.message();
    }
    return std::nullopt;
}

struct Buffers {
    explicit Buffers(Device& device)
        : a(device, {.name = "a", .bytes = 4096}), b(device, {.name = "b", .bytes = 4096}) {}
    Buffer a, b;
};

void two_operations(Device& device) {
    Buffers buffers(device);
    Recording recording(device, QueueRole::Compute, "recording");
    recording.fill(buffers.a.view(), 1);
    recording.copy(buffers.a.view(), buffers.b.view());
    device.submit(recording).wait();
}

void two_submissions(Device& device, QueueRole first_role, QueueRole second_role) {
    Buffers buffers(device);
    Recording first(device, first_role, "first"), second(device, second_role, "second");
    first.fill(buffers.a.view(), 1);
    second.copy(buffers.a.view(), buffers.b.view());
    device.submit(first);
    device.submit(second).wait();
}

void write_after_read(Device& device) {
    Buffers buffers(device);
    HostThread thread(device, "host");
    Lane lane = thread.add_lane("lane");
    Recording gated(device, QueueRole::Compute, "reads a"),
        writer(device, QueueRole::Compute, "writes a");
    gated.copy(buffers.a.view(), buffers.b.view());
    writer.fill(buffers.a.view(), 2);
    std::atomic<bool> open{false};
    const TimePoint gate =
        lane.post({.name = "gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                       return open ? Progress::Done : Progress::Again;
                   }});
    const std::array<TimePoint, 1> waits{gate};
    device.submit(gated, waits);
    device.submit(writer);
    open = true;
    device.wait_idle();
}

void lane_and_batch(Device& device) {
    Buffers buffers(device);
    HostThread thread(device, "host");
    Lane lane = thread.add_lane("lane");
    Recording fill(device, QueueRole::Compute, "fill"), use(device, QueueRole::Compute, "use");
    fill.fill(buffers.a.view(), 1);
    use.copy(buffers.a.view(), buffers.b.view());
    std::atomic<bool> begun{false}, open{false};
    const TimePoint filled = lane.post({.name = "job",
                                        .waits = {},
                                        .accesses = {{buffers.a.view(), Access::Write}},
                                        .step = [&](LaneContext& context) {
                                            begun = true;
                                            if (!open)
                                                return Progress::Again;
                                            context.submit(fill);
                                            return Progress::Done;
                                        }});
    for (int i = 0; i < 5000 && !begun; ++i) // the checker has seen the job's write by then
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const TimePoint used = device.submit(use);
    open = true;
    used.wait();
    filled.wait();
}

/// The job reads what a batch that is on its way writes.
void batch_and_lane(Device& device) {
    Buffers buffers(device);
    HostThread thread(device, "host");
    Lane lane = thread.add_lane("lane");
    Recording fill(device, QueueRole::Compute, "fills a");
    fill.fill(buffers.a.view(), 1);
    device.submit(fill);
    lane.post({.name = "reader",
               .waits = {},
               .accesses = {{buffers.a.view(), Access::Read}},
               .step = [](LaneContext&) { return Progress::Done; }})
        .wait();
}

/// The second lane's job reads what the first one's has written and ended before it was posted.
void lane_and_lane(Device& device) {
    Buffers buffers(device);
    HostThread thread(device, "host");
    Lane first = thread.add_lane("first"), second = thread.add_lane("second");
    const auto done = [](LaneContext&) { return Progress::Done; };
    first
        .post({.name = "writer",
               .waits = {},
               .accesses = {{buffers.a.view(), Access::Write}},
               .step = done})
        .wait();
    second
        .post({.name = "reader",
               .waits = {},
               .accesses = {{buffers.a.view(), Access::Read}},
               .step = done})
        .wait();
}

/// The job writes what a batch that is still held is going to read.
void held_batch_and_lane(Device& device) {
    Buffers buffers(device);
    HostThread thread(device, "host");
    Lane gates = thread.add_lane("gates"), lane = thread.add_lane("lane");
    Recording gated(device, QueueRole::Compute, "reads a");
    gated.copy(buffers.a.view(), buffers.b.view());
    std::atomic<bool> open{false}, written{false};
    const TimePoint gate =
        gates.post({.name = "gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                        return open ? Progress::Done : Progress::Again;
                    }});
    const std::array<TimePoint, 1> waits{gate};
    device.submit(gated, waits);
    lane.post({.name = "writer",
               .waits = {},
               .accesses = {{buffers.a.view(), Access::Write}},
               .step = [&](LaneContext&) {
                   written = true;
                   return Progress::Done;
               }});
    for (int i = 0; i < 50 && !written; ++i) // in order, it cannot have begun
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    open = true;
    device.wait_idle();
}

void release_in_use(Device& device) {
    Buffer kept(device, {.name = "kept", .bytes = 4096});
    Recording use(device, QueueRole::Compute, "use");
    {
        Buffer gone(device, {.name = "gone", .bytes = 4096});
        use.fill(gone.view(), 3);
        use.copy(gone.view(), kept.view());
        device.submit(use);
    } // released while `use` may still run: only the time point of `use` frees the memory
    device.wait_idle();
}

TEST(HappensBefore, SaysNothingWhereNothingIsMissing) {
    EXPECT_EQ(verdict({}, two_operations), std::nullopt);
    EXPECT_EQ(verdict({},
                      [](Device& device) {
                          two_submissions(device, QueueRole::Compute, QueueRole::TransferOut);
                      }),
              std::nullopt);
    EXPECT_EQ(verdict({}, write_after_read), std::nullopt);
    EXPECT_EQ(verdict({}, lane_and_batch), std::nullopt);
    EXPECT_EQ(verdict({}, batch_and_lane), std::nullopt);
    EXPECT_EQ(verdict({}, held_batch_and_lane), std::nullopt);
    EXPECT_EQ(verdict({}, lane_and_lane), std::nullopt);
    EXPECT_EQ(verdict({}, release_in_use), std::nullopt);
}

void expect_race(const std::optional<std::string>& message, const std::string& part) {
    ASSERT_TRUE(message.has_value()) << "the checker has missed it";
    EXPECT_NE(message->find(part), std::string::npos) << *message;
}

TEST(HappensBefore, FindsAMissingBarrier) {
    expect_race(verdict({.drop_barrier = 0}, two_operations), "race: copy");
}

TEST(HappensBefore, FindsAMissingWaitOnOneQueue) {
    expect_race(verdict({.drop_wait = 0},
                        [](Device& device) {
                            two_submissions(device, QueueRole::Compute, QueueRole::Compute);
                        }),
                "wrote");
}

TEST(HappensBefore, FindsAMissingWaitBetweenQueues) {
    expect_race(verdict({.drop_wait = 0},
                        [](Device& device) {
                            two_submissions(device, QueueRole::TransferIn, QueueRole::Compute);
                        }),
                "wrote");
}

TEST(HappensBefore, FindsAWriteThatOvertakesARead) {
    expect_race(verdict({.drop_wait = 0}, write_after_read), "race");
}

TEST(HappensBefore, FindsABatchThatOvertakesALaneJob) {
    expect_race(verdict({.drop_wait = 0}, lane_and_batch), "race");
}

TEST(HappensBefore, FindsALaneJobThatOvertakesABatch) {
    expect_race(verdict({.drop_wait = 0}, batch_and_lane), "race: reader on lane reads");
    expect_race(verdict({.drop_wait = 0}, held_batch_and_lane), "that writer on lane wrote");
    expect_race(verdict({.drop_wait = 0}, lane_and_lane), "reader on second reads");
}

TEST(HappensBefore, FindsMemoryThatIsReleasedTooEarly) {
    expect_race(verdict({.release_too_early = 0}, release_in_use), "released while");
}

} // namespace
} // namespace bellows
