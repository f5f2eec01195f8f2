// SPDX-License-Identifier: MIT
// The trace: every operation of every queue role and every lane job, on one clock.

#include "engine/runtime/clock_map.hpp"
#include "support/compare.hpp"
#include "support/test_device.hpp"

#include <bellows/engine/lane.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::test_options;

std::int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

std::unique_ptr<Device> tracing_device() {
    DeviceOptions options = test_options();
    options.trace = true;
    return make_device(options);
}

std::vector<TraceEvent> named(const std::vector<TraceEvent>& events, const std::string& category) {
    std::vector<TraceEvent> found;
    std::copy_if(events.begin(), events.end(), std::back_inserter(found),
                 [&](const TraceEvent& event) { return event.category == category; });
    return found;
}

TEST(EngineTrace, EveryRoleShowsItsOperationsBetweenHandInAndEnd) {
    const auto device = tracing_device();
    const Buffer a(*device, {.name = "a", .bytes = 1 << 20}),
        b(*device, {.name = "b", .bytes = 1 << 20});
    // Without calibrated timestamps the offset is an estimate from within the batches' brackets.
    const std::int64_t slack = device->has_feature("calibrated_timestamps") ? 200'000 : 5'000'000;
    for (std::size_t i = 0; i < kNumQueueRoles; ++i) {
        const auto role = static_cast<QueueRole>(i);
        Recording recording(*device, role, "of the role");
        recording.label("copies");
        recording.fill(a.view(), 3);
        recording.copy(a.view(), b.view());
        for (int round = 0; round < 3; ++round) {
            const std::int64_t before = now_ns();
            device->submit(recording).wait();
            const std::int64_t after = now_ns();
            const std::vector<TraceEvent> all = device->take_trace();
            // One event per operation, or one per batch on a queue without timestamps.
            const bool per_operation = all.size() == 2;
            ASSERT_TRUE(per_operation || all.size() == 1)
                << all.size() << " on " << to_string(role);
            if (per_operation) {
                EXPECT_EQ(named(all, "copies").size(), 2u);
                EXPECT_EQ(all[0].name, "fill");
                EXPECT_EQ(all[1].name, "copy");
                EXPECT_LE(all[0].begin_ns, all[1].end_ns);
            }
            for (const TraceEvent& event : all) {
                EXPECT_FALSE(event.lane.empty());
                EXPECT_LE(event.begin_ns, event.end_ns);
                EXPECT_GE(event.begin_ns, before - slack) << to_string(role);
                EXPECT_LE(event.end_ns, after + slack) << to_string(role);
            }
        }
    }
    EXPECT_TRUE(device->take_trace().empty());
}

TEST(EngineTrace, LaneJobsShareTheClockOfTheQueues) {
    const auto device = tracing_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("exchange");
    const Buffer a(*device, {.name = "a", .bytes = 1 << 16});
    Recording recording(*device, QueueRole::Compute, "produce");
    recording.fill(a.view(), 3);
    const TimePoint produced = device->submit(recording);
    lane.post({.name = "send",
               .waits = {produced},
               .accesses = {{a.view(), Access::Read}},
               .step =
                   [](LaneContext&) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(20));
                       return Progress::Done;
                   }})
        .wait();
    const auto events = device->take_trace();
    const auto sent = std::find_if(events.begin(), events.end(),
                                   [](const TraceEvent& event) { return event.name == "send"; });
    ASSERT_NE(sent, events.end());
    EXPECT_EQ(sent->lane, "exchange");
    EXPECT_GE(sent->end_ns - sent->begin_ns, 19'000'000);
    const auto filled = named(events, "produce");
    ASSERT_EQ(filled.size(), 1u);
    EXPECT_LE(filled[0].end_ns, sent->begin_ns + 5'000'000);
}

TEST(EngineTrace, WorkKnowsItsOpAndWhoSubmittedIt) {
    const auto device = tracing_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("exchange");
    const Buffer a(*device, {.name = "a", .bytes = 1 << 16});
    Recording own(*device, QueueRole::Compute, "own"), of_job(*device, QueueRole::Compute, "pack");
    own.fill(a.view(), 3);
    of_job.fill(a.view(), 4);
    EXPECT_EQ(device->trace_as("F0.m3"), "");
    device->submit(own);
    const TimePoint sent = lane.post({.name = "send",
                                      .waits = {},
                                      .accesses = {{a.view(), Access::Write}},
                                      .step = [&](LaneContext& context) {
                                          context.submit(of_job);
                                          return Progress::Done;
                                      }});
    EXPECT_EQ(device->trace_as("I1.m2"), "F0.m3"); // what was handed in keeps its own
    sent.wait();
    device->submit(own).wait();
    EXPECT_EQ(device->trace_as(""), "I1.m2");
    device->submit(own).wait();
    std::vector<std::array<std::string, 3>> seen;
    for (const TraceEvent& event : device->take_trace())
        if (!event.name.starts_with("waits"))
            seen.push_back({event.category, event.op, event.by});
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, (std::vector<std::array<std::string, 3>>{{"lane", "F0.m3", ""},
                                                             {"own", "", ""},
                                                             {"own", "F0.m3", ""},
                                                             {"own", "I1.m2", ""},
                                                             {"pack", "F0.m3", "exchange"}}));
}

TEST(EngineTrace, AJobShowsWhatItWaitsForAndWhatItDoes) {
    const auto device = tracing_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("exchange");
    constexpr auto kWait = std::chrono::milliseconds(15);
    auto began = std::chrono::steady_clock::time_point{};
    const auto step = [&](LaneContext& context) {
        const auto now = std::chrono::steady_clock::now();
        if (began == std::chrono::steady_clock::time_point{})
            began = now;
        if (now - began < kWait) {
            context.phase("waits for counts"); // asked again and again: one event
            return Progress::Again;
        }
        context.phase("moves records");
        std::this_thread::sleep_for(kWait);
        return Progress::Done;
    };
    lane.post({.name = "DISPATCH(F)", .waits = {}, .accesses = {}, .step = step}).wait();
    lane.post({.name = "COMBINE(F)",
               .waits = {},
               .accesses = {},
               .step = [](LaneContext&) { return Progress::Done; }})
        .wait();
    const auto events = device->take_trace();
    ASSERT_EQ(events.size(), 4u);
    const auto phases = named(events, "DISPATCH(F)"), jobs = named(events, "lane");
    ASSERT_EQ(phases.size(), 2u);
    ASSERT_EQ(jobs.size(), 2u);
    EXPECT_EQ(phases[0].name, "waits for counts");
    EXPECT_EQ(phases[1].name, "moves records");
    EXPECT_EQ(jobs[0].name, "DISPATCH(F)");
    EXPECT_EQ(phases[0].end_ns, phases[1].begin_ns);
    EXPECT_GE(phases[0].begin_ns, jobs[0].begin_ns);
    EXPECT_EQ(phases[1].end_ns, jobs[0].end_ns);
    for (const TraceEvent& phase : phases) {
        EXPECT_EQ(phase.lane, "exchange");
        EXPECT_GE(phase.end_ns - phase.begin_ns, 14'000'000) << phase.name;
    }
}

TEST(EngineTrace, ALaneShowsWhatItsNextJobWaitsFor) {
    const auto device = tracing_device();
    HostThread gates(*device, "gates"), thread(*device, "host");
    Lane gate_lane = gates.add_lane("gates"), lane = thread.add_lane("exchange");
    std::atomic<bool> open{false};
    const TimePoint gate =
        gate_lane.post({.name = "gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                            return open ? Progress::Done : Progress::Again;
                        }});
    const TimePoint sent =
        lane.post({.name = "send", .waits = {gate}, .accesses = {}, .step = [](LaneContext&) {
                       return Progress::Done;
                   }});
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    open = true;
    sent.wait();
    const auto events = device->take_trace();
    const auto waits = named(events, "send");
    ASSERT_EQ(waits.size(), 1u);
    EXPECT_EQ(waits[0].lane, "exchange");
    EXPECT_EQ(waits[0].name, "waits for gate");
    EXPECT_GE(waits[0].end_ns - waits[0].begin_ns, 10'000'000);
    const auto job = std::find_if(events.begin(), events.end(),
                                  [](const TraceEvent& event) { return event.name == "send"; });
    ASSERT_NE(job, events.end());
    EXPECT_EQ(job->begin_ns, waits[0].end_ns);
}

TEST(EngineTrace, MessagesThatOverlapGetLanesOfTheirOwn) {
    const auto device = tracing_device();
    // Handed in as they end.
    device->add_to_trace({"from 1", "a", "m", 100, 200});
    device->add_to_trace({"from 2", "b", "m", 150, 250});
    device->add_to_trace({"from 1", "c", "m", 150, 300});
    device->add_to_trace({"from 1", "d", "m", 50, 400});
    device->add_to_trace({"from 1", "e", "m", 200, 500});
    std::vector<std::pair<std::string, std::string>> lanes;
    for (const TraceEvent& event : device->take_trace())
        lanes.emplace_back(event.name, event.lane);
    std::sort(lanes.begin(), lanes.end());
    EXPECT_EQ(lanes, (std::vector<std::pair<std::string, std::string>>{{"a", "from 1 (2)"},
                                                                       {"b", "from 2"},
                                                                       {"c", "from 1 (3)"},
                                                                       {"d", "from 1"},
                                                                       {"e", "from 1 (2)"}}));
    EXPECT_TRUE(device->take_trace().empty());
    const auto silent = make_device();
    silent->add_to_trace({"from 1", "a", "m", 100, 200});
    EXPECT_TRUE(silent->take_trace().empty());
}

TEST(EngineTrace, TheOffsetOfClocksLiesWithinEveryBracket) {
    // A device clock that is 123,456,789 ns behind; batches begin up to 1 ms after they were handed
    // in and are seen up to 5 ms after their end.
    constexpr std::int64_t kOffset = 123'456'789;
    detail::ClockMap clock;
    EXPECT_FALSE(clock.known());
    test::Random random(5);
    std::int64_t host = 1'000'000'000, last_error = std::int64_t{1} << 40;
    for (int batch = 0; batch < 200; ++batch) {
        const std::int64_t submitted = host;
        const std::int64_t begin =
            submitted + 1000 + static_cast<std::int64_t>(random.below(1'000'000));
        const std::int64_t end = begin + 50'000;
        const std::int64_t observed =
            end + 1000 + static_cast<std::int64_t>(random.below(5'000'000));
        clock.bracket(begin - kOffset, end - kOffset, submitted, observed);
        host = observed;
        ASSERT_TRUE(clock.known());
        const std::int64_t error = std::abs(clock.offset_ns() - kOffset);
        EXPECT_LE(error, 2'500'000);
        last_error = error;
    }
    EXPECT_LE(last_error, 50'000);
    clock.read_together(1000, 1000 + kOffset);
    EXPECT_EQ(clock.offset_ns(), kOffset);
}

} // namespace
} // namespace bellows
