// SPDX-License-Identifier: MIT
// The order of work: what is submitted behaves as if executed one after another, whatever the
// queues and lanes do, and wait-before-signal never blocks a queue.

#include "support/test_device.hpp"

#include "engine/runtime/recording_impl.hpp"

#include <bellows/engine/lane.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::read_back;
using testing::test_options;

Buffer make_buffer(Device& device, const char* name, std::uint64_t words) {
    return Buffer(device, {.name = name, .bytes = words * 4});
}

LaneJob simple_job(std::string name, std::vector<DeclaredAccess> accesses,
                   std::function<void(LaneContext&)> work) {
    return {.name = std::move(name),
            .waits = {},
            .accesses = std::move(accesses),
            .step = [work = std::move(work)](LaneContext& context) {
                work(context);
                return Progress::Done;
            }};
}

TEST(EngineOrder, OperationsOfARecordingFollowOneAnother) {
    auto device = make_device();
    Buffer a = make_buffer(*device, "a", 1000), b = make_buffer(*device, "b", 1000);
    Recording recording(*device, QueueRole::Compute, "chain");
    recording.fill(a.view(), 7);
    recording.copy(a.view(), b.view());
    recording.fill(a.view(), 9);
    device->submit(recording).wait();
    EXPECT_EQ(read_back<std::uint32_t>(*device, b.view()), std::vector<std::uint32_t>(1000, 7));
    EXPECT_EQ(read_back<std::uint32_t>(*device, a.view()), std::vector<std::uint32_t>(1000, 9));
    EXPECT_GT(device->num_checked_accesses(), 0u);
}

TEST(EngineOrder, DispatchesOfAQueueFollowOneAnother) {
    constexpr std::uint64_t kWords = 1 << 20;
    auto device = make_device();
    const Buffer a = make_buffer(*device, "a", kWords), b = make_buffer(*device, "b", kWords),
                 c = make_buffer(*device, "c", kWords);
    const auto tensor = [](const Buffer& buffer) { return buffer.tensor(DType::F32, {kWords}); };
    for (std::size_t i = 0; i < kNumQueueRoles; ++i) {
        const auto role = static_cast<QueueRole>(i);
        if (!takes_dispatches(role))
            continue;
        Recording first(*device, role, "first"), second(*device, role, "second");
        ops::copy(first, tensor(a), tensor(b));
        ops::copy(second, tensor(b), tensor(c));
        EXPECT_TRUE(second.impl().computes()) << to_string(role);
        for (std::uint32_t round = 0; round < 5; ++round) {
            const std::vector<std::uint32_t> words(kWords,
                                                   10 * static_cast<std::uint32_t>(i) + round);
            device->upload(a.view(), std::span<const std::uint32_t>(words));
            {
                const Gathering together(*device);
                device->submit(first);
                device->submit(second);
            }
            EXPECT_EQ(read_back<std::uint32_t>(*device, c.view()), words) << to_string(role);
        }
    }
}

TEST(EngineOrder, RolesApartWaitForOneAnother) {
    constexpr std::uint64_t kWords = 1 << 20;
    DeviceOptions options = testing::test_options();
    options.roles_apart = true;
    const auto device = make_device(options);
    const Buffer a = make_buffer(*device, "a", kWords), b = make_buffer(*device, "b", kWords);
    const auto tensor = [](const Buffer& buffer) { return buffer.tensor(DType::F32, {kWords}); };
    // Round all roles and back: each copies what the one before has left.
    std::vector<Recording> chain;
    for (std::size_t i = 0; i < kNumQueueRoles; ++i) {
        const auto role = static_cast<QueueRole>(i);
        EXPECT_EQ(device->distinct_queues(role, QueueRole::Compute), role != QueueRole::Compute);
        Recording& work = chain.emplace_back(*device, role, to_string(role));
        const Buffer &from = i % 2 == 0 ? a : b, &to = i % 2 == 0 ? b : a;
        if (takes_dispatches(role))
            ops::copy(work, tensor(from), tensor(to));
        else
            work.copy(from.view(), to.view());
    }
    const Buffer& last = kNumQueueRoles % 2 == 0 ? a : b;
    for (std::uint32_t round = 1; round <= 3; ++round) {
        const std::vector<std::uint32_t> words(kWords, round);
        device->upload(a.view(), std::span<const std::uint32_t>(words));
        {
            const Gathering together(*device);
            for (Recording& work : chain)
                device->submit(work);
        }
        EXPECT_EQ(read_back<std::uint32_t>(*device, last.view()), words);
    }
}

TEST(EngineOrder, ACopyInBurstsIsOneOperation) {
    auto device = make_device();
    std::vector<std::uint32_t> words(1003);
    std::iota(words.begin(), words.end(), 5u);
    Buffer from = make_buffer(*device, "from", words.size());
    device->upload(from.view(), std::span<const std::uint32_t>(words));
    for (const std::uint64_t burst : {4u, 400u, 4000u, 4012u, 8000u}) {
        Buffer to = make_buffer(*device, "to", words.size());
        Recording recording(*device, QueueRole::TransferOut, "bursts");
        recording.fill(to.view(), 0);
        recording.copy(from.view().sub(4, 4000), to.view().sub(8, 4000), burst);
        const std::uint64_t before = device->num_checked_accesses();
        device->submit(recording).wait();
        EXPECT_EQ(device->num_checked_accesses() - before, 3u) << burst;
        std::vector<std::uint32_t> expected(words.size(), 0);
        std::copy_n(words.begin() + 1, 1000, expected.begin() + 2);
        EXPECT_EQ(read_back<std::uint32_t>(*device, to.view()), expected) << burst;
    }
    Recording recording(*device, QueueRole::TransferOut, "bursts");
    Buffer to = make_buffer(*device, "to", words.size());
    EXPECT_THROW(recording.copy(from.view(), to.view(), 0), Error);
    EXPECT_THROW(recording.copy(from.view(), to.view(), 6), Error);
}

/// Writes `word` to all of `to` if the grid has workgroups.
void fill_by_grid(Recording& recording, BufferView to, std::uint32_t word, BufferView grid) {
    recording.dispatch_indirect(
        kernels::FillWords{.destination = to,
                           .num_words = static_cast<std::uint32_t>(to.bytes / 4),
                           .value = word},
        grid);
}

TEST(EngineOrder, GridsAreReadAsTheyWereWrittenLast) {
    constexpr std::uint64_t kRounds = 40, kWords = 100;
    auto device = make_device();
    const Buffer grid = make_buffer(*device, "grid", 4);
    const Buffer out = make_buffer(*device, "out", kRounds * kWords);
    const Buffer other = make_buffer(*device, "other", kWords);
    Recording recording(*device, QueueRole::Compute, "grids");
    recording.fill(grid.view(), 1);
    recording.fill(out.view(), 0);
    for (std::uint64_t round = 0; round < kRounds; ++round) {
        recording.fill(grid.view().sub(0, 4), round % 3 == 0 ? 1 : 0);
        recording.fill(other.view(), 1);
        recording.copy(other.view(), out.view().sub(round * kWords * 4, kWords * 4));
        fill_by_grid(recording, out.view().sub(round * kWords * 4, kWords * 4), 2, grid.view());
    }
    device->submit(recording).wait();
    const auto words = read_back<std::uint32_t>(*device, out.view());
    for (std::uint64_t i = 0; i < words.size(); ++i)
        ASSERT_EQ(words[i], i / kWords % 3 == 0 ? 2u : 1u) << "word " << i;
}

TEST(EngineOrder, OnlyBarriersBehindWritersOfGridsOrderGrids) {
    auto device = make_device();
    const Buffer grid = make_buffer(*device, "grid", 8), a = make_buffer(*device, "a", 8);
    const BufferView early = grid.view().sub(0, 12), late = grid.view().sub(16, 12);
    Recording recording(*device, QueueRole::Compute, "grids");
    recording.fill(a.view(), 1);
    recording.fill(a.view(), 2);                 // a barrier, nobody has written a grid
    fill_by_grid(recording, a.view(), 3, early); // written elsewhere, or never
    recording.fill(late, 1);
    recording.fill(a.view(), 4); // the first barrier behind the fill of `late`
    recording.fill(a.view(), 5);
    fill_by_grid(recording, a.view(), 6, late);
    fill_by_grid(recording, a.view(), 7, late);
    std::vector<bool> barriers, to_grid;
    for (const auto& operation : recording.impl().operations) {
        barriers.push_back(operation.barrier_before);
        to_grid.push_back(operation.barrier_to_grid);
    }
    EXPECT_EQ(barriers, (std::vector<bool>{false, true, true, false, true, true, true, true}));
    EXPECT_EQ(to_grid, (std::vector<bool>{false, false, false, false, true, false, false, false}));
}

TEST(EngineOrder, UploadAndDownloadKeepEveryByte) {
    auto device = make_device();
    std::vector<std::uint32_t> values(12345);
    std::iota(values.begin(), values.end(), 17u);
    Buffer buffer = make_buffer(*device, "values", values.size());
    device->upload(buffer.view(), std::span<const std::uint32_t>(values));
    EXPECT_EQ(read_back<std::uint32_t>(*device, buffer.view()), values);
}

TEST(EngineOrder, ABatchMayWaitForALaneThatWaitsForALaterBatch) {
    // On one queue this deadlocks unless the pump holds the first batch back.
    auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    Buffer early = make_buffer(*device, "early", 64), late = make_buffer(*device, "late", 64);
    Buffer result = make_buffer(*device, "result", 64);

    Recording produce(*device, QueueRole::Compute, "produce");
    produce.fill(late.view(), 5);
    Recording consume(*device, QueueRole::Compute, "consume");
    consume.copy(early.view(), result.view());
    Recording forward(*device, QueueRole::TransferIn, "forward");
    forward.copy(late.view(), early.view());

    // A gate that opens only when `produce` has been handed in, after `consume`.
    std::atomic<bool> submitted{false};
    TimePoint produced;
    lane.post({.name = "gate",
               .waits = {},
               .accesses = {{early.view(), Access::Write}},
               .step = [&](LaneContext& context) {
                   if (!submitted)
                       return Progress::Again;
                   context.submit(forward, std::array{produced});
                   return Progress::Done;
               }});
    const TimePoint consumed = device->submit(consume);
    EXPECT_EQ(consumed.state(), TimePoint::State::Pending);
    produced = device->submit(produce);
    submitted = true;
    consumed.wait();
    EXPECT_EQ(read_back<std::uint32_t>(*device, result.view()), std::vector<std::uint32_t>(64, 5));
}

TEST(EngineOrder, RecordedWorkFollowsABufferThatIsBoundLater) {
    auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    Buffer late = Buffer::declare(*device, {.name = "late"});
    Buffer out = make_buffer(*device, "out", 256);
    Recording fill(*device, QueueRole::Compute, "fill");
    fill.fill(late.view().sub(0, 1024), 11);
    fill.copy(late.view().sub(0, 1024), out.view());
    for (std::uint64_t round = 1; round <= 3; ++round) {
        lane.post(simple_job("bind", {{late.view(), Access::Write}},
                             [&](LaneContext& context) { context.bind(late, 1024 * round); }));
        device->submit(fill).wait();
        EXPECT_EQ(read_back<std::uint32_t>(*device, out.view())[255], 11u);
    }
}

TEST(EngineOrder, ABufferLivesUntilHeldWorkHasUsedIt) {
    auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    std::atomic<bool> open{false};
    const TimePoint gate =
        lane.post({.name = "gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                       return open ? Progress::Done : Progress::Again;
                   }});
    Buffer out = make_buffer(*device, "out", 32);
    Recording use(*device, QueueRole::Compute, "use");
    TimePoint used;
    {
        Buffer brief = make_buffer(*device, "brief", 32);
        use.fill(brief.view(), 4);
        use.copy(brief.view(), out.view());
        used = device->submit(use, std::array{gate});
    }
    open = true;
    used.wait();
    EXPECT_EQ(read_back<std::uint32_t>(*device, out.view()), std::vector<std::uint32_t>(32, 4));
}

/// What a job submits for the next one holds up that one's end, not its own.
TEST(EngineOrder, AJobMayLeaveWorkToTheNext) {
    const auto device = make_device();
    HostThread thread(*device, "thread"), gate_thread(*device, "gate thread");
    Lane lane = thread.add_lane("lane"), gate_lane = gate_thread.add_lane("gate lane");
    Buffer source = make_buffer(*device, "source", 64), copied = make_buffer(*device, "copied", 64);
    Recording before(*device, QueueRole::Compute, "before");
    before.fill(source.view(), 7);
    Recording copy(*device, QueueRole::Compute, "copy");
    copy.copy(source.view(), copied.view());
    Recording after(*device, QueueRole::Compute, "after");
    after.fill(source.view(), 9);
    std::atomic<bool> open{false};
    const TimePoint gate =
        gate_lane.post({.name = "gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                            return open ? Progress::Done : Progress::Again;
                        }});
    device->submit(before);
    const std::vector<DeclaredAccess> reads = {{source.view(), Access::Read}};
    const TimePoint early = lane.post(simple_job("early", reads, [&](LaneContext& context) {
        context.submit_for_next(copy, std::array{gate});
    }));
    const TimePoint late = lane.post(simple_job("late", reads, [](LaneContext&) {}));
    const TimePoint overwritten = device->submit(after);
    early.wait(std::chrono::seconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(late.reached());
    EXPECT_FALSE(overwritten.reached());
    open = true;
    late.wait(std::chrono::seconds(20));
    overwritten.wait(std::chrono::seconds(20));
    EXPECT_EQ(read_back<std::uint32_t>(*device, copied.view()), std::vector<std::uint32_t>(64, 7));
}

TEST(EngineOrder, AFailedLaneJobFailsWhatDependsOnIt) {
    auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    Buffer a = make_buffer(*device, "a", 16), b = make_buffer(*device, "b", 16);
    Recording use(*device, QueueRole::Compute, "use");
    use.copy(a.view(), b.view());
    const TimePoint failed =
        lane.post(simple_job("exchange", {{a.view(), Access::Write}}, [](LaneContext&) {
            throw Error(ErrorCode::PeerLost, "rank 3 is gone", 3);
        }));
    TimePoint dependent;
    try {
        dependent = device->submit(use);
    } catch (const Error&) {
        // The job may have failed before the submission.
    }
    try {
        failed.wait();
        FAIL() << "the job's error is lost";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::PeerLost);
        EXPECT_EQ(error.rank(), 3);
    }
    if (dependent.ticket() != nullptr) {
        EXPECT_THROW(dependent.wait(), Error);
    }
    EXPECT_THROW(device->submit(use), Error);
}

TEST(EngineOrder, AWaitThatRunsOutNamesWhatItWaitsFor) {
    auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    std::atomic<bool> open{false};
    const TimePoint point =
        lane.post({.name = "a closed gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                       return open ? Progress::Done : Progress::Again;
                   }});
    try {
        point.wait(std::chrono::milliseconds(30));
        FAIL() << "the wait should have run out";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Timeout);
        EXPECT_NE(error.message().find("a closed gate"), std::string::npos) << error.what();
    }
    open = true;
    point.wait();
}

TEST(EngineOrder, AbortReleasesHeldWork) {
    auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    Buffer a = make_buffer(*device, "a", 16);
    Recording use(*device, QueueRole::Compute, "use");
    use.fill(a.view(), 1);
    const TimePoint gate = lane.post({.name = "gate",
                                      .waits = {},
                                      .accesses = {{a.view(), Access::Write}},
                                      .step = [](LaneContext&) { return Progress::Again; }});
    const TimePoint held = device->submit(use);
    device->abort(Error(ErrorCode::Aborted, "enough"));
    EXPECT_THROW(held.wait(std::chrono::seconds(5)), Error);
    EXPECT_THROW(gate.wait(std::chrono::seconds(5)), Error);
}

/// A random program of fills and copies between parts of a few buffers, on all queue roles and two
/// lanes, every lane job delayed at random. Returns what the buffers hold in the end.
std::vector<std::uint32_t> run_random_program(const DeviceOptions& options, std::uint64_t seed) {
    constexpr std::uint64_t kWords = 64, kBuffers = 6;
    auto device = make_device(options);
    HostThread thread(*device, "host");
    thread.delay_jobs(std::chrono::microseconds(400), seed * 77 + 1);
    std::vector<Lane> lanes;
    lanes.push_back(thread.add_lane("lane 0"));
    lanes.push_back(thread.add_lane("lane 1"));
    std::vector<Buffer> buffers;
    for (std::uint64_t i = 0; i < kBuffers; ++i) {
        buffers.push_back(make_buffer(*device, "buffer", kWords));
        Recording clear(*device, QueueRole::Compute, "clear");
        clear.fill(buffers.back().view(), static_cast<std::uint32_t>(i));
        device->submit(clear).wait();
    }
    std::mt19937_64 random(seed);
    std::vector<std::unique_ptr<Recording>> recordings;
    const auto part = [&](std::uint64_t buffer) {
        const std::uint64_t first = random() % 2 * kWords / 2;
        return buffers[buffer].view().sub(first * 4, kWords / 2 * 4);
    };
    const auto random_recording = [&](std::vector<DeclaredAccess>& accesses) {
        auto recording = std::make_unique<Recording>(*device, static_cast<QueueRole>(random() % 4),
                                                     "r" + std::to_string(recordings.size()));
        for (std::uint64_t i = 0, n = 1 + random() % 3; i < n; ++i) {
            const std::uint64_t to = random() % kBuffers;
            const std::uint64_t from = (to + 1 + random() % (kBuffers - 1)) % kBuffers;
            const BufferView target = part(to), source = part(from);
            accesses.push_back({target, Access::ReadWrite});
            if (random() % 4 == 0) {
                recording->fill(target, static_cast<std::uint32_t>(random()));
            } else {
                recording->copy(source, target);
                accesses.push_back({source, Access::Read});
            }
        }
        recordings.push_back(std::move(recording));
        return recordings.back().get();
    };
    for (int step = 0; step < 60; ++step) {
        std::vector<DeclaredAccess> accesses;
        Recording* recording = random_recording(accesses);
        if (random() % 4 == 0)
            lanes[random() % 2].post(simple_job(
                "job", accesses, [=](LaneContext& context) { context.submit(*recording); }));
        else
            device->submit(*recording);
    }
    std::vector<std::uint32_t> all;
    for (Buffer& buffer : buffers) {
        const auto words = read_back<std::uint32_t>(*device, buffer.view());
        all.insert(all.end(), words.begin(), words.end());
    }
    device->wait_idle();
    return all;
}

TEST(EngineOrder, SerialOverlapAndShuffleGiveTheSameBits) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        DeviceOptions options = test_options();
        options.sync = SyncMode::Serial;
        const auto serial = run_random_program(options, seed);
        options.sync = SyncMode::Overlap;
        EXPECT_EQ(run_random_program(options, seed), serial) << "overlap, seed " << seed;
        options.sync = SyncMode::Shuffle;
        for (options.shuffle_seed = 1; options.shuffle_seed <= 2; ++options.shuffle_seed)
            EXPECT_EQ(run_random_program(options, seed), serial)
                << "shuffle " << options.shuffle_seed << ", seed " << seed;
    }
}

} // namespace
} // namespace bellows
