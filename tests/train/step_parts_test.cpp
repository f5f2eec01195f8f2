// SPDX-License-Identifier: MIT
// Where a step's time goes, by what a trace says.
#include <bellows/train/step_parts.hpp>

#include <gtest/gtest.h>

#include <vector>

namespace bellows {
namespace {

TraceEvent work(const char* lane, const char* category, std::int64_t begin_ms, std::int64_t end_ms,
                const char* op = "", const char* by = "") {
    return {lane, "kernel", category, begin_ms * 1'000'000, end_ms * 1'000'000, op, by};
}

StepParts parts_of(const std::vector<TraceEvent>& events) {
    StepPartsCounter counter; // what is added in pieces counts as if it were one
    const std::size_t half = events.size() / 2;
    counter.add(std::span(events).first(half));
    counter.add(std::span(events).subspan(half));
    const StepParts parts = counter.take();
    EXPECT_EQ(counter.take(), StepParts{});
    return parts;
}

TEST(StepParts, KernelsBesideEachOtherCountOnce) {
    const std::vector<TraceEvent> events = {
        work("compute", "ATTN(F)", 10, 20, "F0.m0"),
        work("compute", "ATTN(W)", 50, 60, "W0.m0"),
        work("compute_deferred", "ATTN(W)", 55, 70, "W0.m0"),
        work("compute", "ATTN(B)", 15, 18, "I0.m0"), // within another
        work("compute", "ROUTER(F)", 20, 21, "F0.m0"),
        work("compute", "MLP(F)", 21, 25, "F0.m0"),
        work("compute", "SHARED(B)", 24, 27, "I0.m0"),
        work("compute", "HEAD(F)", 27, 29, "F0.m0"),
        work("compute", "FFN(F)", 40, 41, "F0.m0"),
        work("compute_deferred", "AdamW", 80, 85),
        work("compute", "gradient norm", 78, 79),
    };
    const StepParts parts = parts_of(events);
    EXPECT_DOUBLE_EQ(parts.attention, 0.030);
    EXPECT_DOUBLE_EQ(parts.experts, 0.007);
    EXPECT_DOUBLE_EQ(parts.rest, 0.003);
    EXPECT_DOUBLE_EQ(parts.optimizer, 0.006);
    EXPECT_DOUBLE_EQ(parts.exchange, 0);
    EXPECT_DOUBLE_EQ(parts.device, 0.046);
    EXPECT_EQ(parts_of({}), StepParts{});
}

TEST(StepParts, WhatLanesMoveIsAnExchangeOrAReduction) {
    const std::vector<TraceEvent> events = {
        work("compute", "DISPATCH", 0, 1, "F0.m0"),
        work("stage 0 slot 0 layer 1", kJobCategory, 1, 5, "F0.m0"),
        work("stage 0 slot 0 layer 1", "stage 0 slot 0 layer 1 DISPATCH(F)", 1, 9), // a phase
        work("experts messages to 1", "experts", 2, 9),                             // a message
        work("async_forward_in", "unpack", 4, 6, "F0.m0", "stage 0 slot 0 layer 1"),
        work("gradients 0", kJobCategory, 10, 12),
        work("async_compute", "gradients sum", 11, 14, "", "gradients 0"),
        work("expert gradients 1", kJobCategory, 20, 21),
        work("activations", kJobCategory, 30, 40, "PP(F0.m0)"),
        work("losses of stage 0", kJobCategory, 40, 41),
    };
    const StepParts parts = parts_of(events);
    EXPECT_DOUBLE_EQ(parts.exchange, 0.006);
    EXPECT_DOUBLE_EQ(parts.reductions, 0.005);
    EXPECT_DOUBLE_EQ(parts.rest, 0);
    EXPECT_DOUBLE_EQ(parts.device, 0.006);
}

} // namespace
} // namespace bellows
