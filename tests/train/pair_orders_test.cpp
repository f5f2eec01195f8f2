// SPDX-License-Identifier: MIT
// What nodes of a traced step took, from which their order follows.
#include "train/pair_orders.hpp"

#include <gtest/gtest.h>

namespace bellows {
namespace {

TraceEvent kernel(const char* queue, const char* node, std::int64_t begin_ms, std::int64_t end_ms,
                  const char* op = "F0.m0", const char* by = "") {
    return {queue, "kernel", node, begin_ms * 1'000'000, end_ms * 1'000'000, op, by};
}

TEST(NodeSeconds, AreTheMeanOfANodesKernels) {
    const std::vector<TraceEvent> events{
        kernel("compute", "ATTN(F)", 0, 3),
        kernel("compute", "ATTN(F)", 3, 4),
        kernel("compute", "ATTN(F)", 10, 12),
        kernel("compute", "clear", 12, 20),
        kernel("compute", "ATTN(F)", 20, 30, ""),                      // of no op
        kernel("compute", "ATTN(F)", 30, 40, "F0.m0", "DISPATCH(F)")}; // an exchange's
    const NodeSeconds seconds = node_seconds(events, {{"ATTN(F)", 2}});
    ASSERT_EQ(seconds.size(), 1u);
    EXPECT_NEAR(seconds.at("ATTN(F)"), 0.003, 1e-12);
}

TEST(NodeSeconds, ShareTheDeviceWhereTheyRunAtOnce) {
    const std::vector<TraceEvent> events{kernel("compute", "ATTN(F)", 0, 8),
                                         kernel("compute_beside", "MLP(B)", 2, 10, "I1.m0"),
                                         kernel("compute_deferred", "MLP(W)", 4, 7, "W1.m0")};
    const NodeSeconds seconds =
        node_seconds(events, {{"ATTN(F)", 1}, {"MLP(B)", 1}, {"MLP(W)", 1}});
    // Alone, two at once, all three, two, alone: 2, 2, 3, 1 and 2 ms.
    EXPECT_NEAR(seconds.at("ATTN(F)"), 0.002 + 0.001 + 0.001 + 0.0005, 1e-12);
    EXPECT_NEAR(seconds.at("MLP(B)"), 0.001 + 0.001 + 0.0005 + 0.002, 1e-12);
    EXPECT_NEAR(seconds.at("MLP(W)"), 0.001, 1e-12);
}

} // namespace
} // namespace bellows
