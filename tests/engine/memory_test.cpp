// SPDX-License-Identifier: MIT
// The memory report, and what an Error says when memory runs out.

#include "support/test_device.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::test_options;

constexpr MemoryCategory kAll[] = {MemoryCategory::Weights,       MemoryCategory::Gradients,
                                   MemoryCategory::Optimizer,     MemoryCategory::Activations,
                                   MemoryCategory::DeferredWgrad, MemoryCategory::Communication,
                                   MemoryCategory::Scratch};
static_assert(std::size(kAll) == kNumMemoryCategories);

TEST(EngineMemory, TheReportCountsEveryCategory) {
    const auto device = make_device();
    const MemoryReport empty = device->memory_report();
    EXPECT_EQ(empty.bytes, 0u);
    EXPECT_GT(empty.device_bytes, 0u);
    EXPECT_GT(empty.budget_bytes, 0u);
    EXPECT_EQ(empty.describe(), "nothing");

    std::vector<Buffer> buffers;
    for (std::size_t i = 0; i < kNumMemoryCategories; ++i)
        buffers.emplace_back(
            *device,
            BufferDesc{.name = to_string(kAll[i]), .bytes = 1000 * (i + 1), .category = kAll[i]});
    MemoryReport report = device->memory_report();
    for (std::size_t i = 0; i < kNumMemoryCategories; ++i) {
        EXPECT_EQ(report.of(kAll[i]).bytes, 1000 * (i + 1)) << to_string(kAll[i]);
        EXPECT_EQ(report.of(kAll[i]).num_buffers, 1u);
    }
    EXPECT_EQ(report.bytes, 28'000u);
    EXPECT_GE(report.held_bytes, report.bytes);
    EXPECT_LE(report.held_bytes, report.bytes * 5 / 4 + 256 * kNumMemoryCategories);
    EXPECT_EQ(report.largest(), MemoryCategory::Scratch);
    EXPECT_EQ(report.describe().find("scratch 6.84 KiB in 1 buffer, communication 5.86 KiB"), 0u)
        << report.describe();

    buffers[2] = Buffer(
        *device, {.name = "larger", .bytes = 100'000, .category = MemoryCategory::Optimizer});
    buffers.erase(buffers.begin() + 3);
    report = device->memory_report();
    EXPECT_EQ(report.largest(), MemoryCategory::Optimizer);
    EXPECT_EQ(report.of(MemoryCategory::Activations).num_buffers, 0u);
    EXPECT_EQ(report.of(MemoryCategory::Activations).peak_bytes, 4000u);
    EXPECT_GE(report.pooled_bytes, 7000u) << "released memory is kept for the next request";
    buffers.clear();
    EXPECT_EQ(device->memory_report().bytes, 0u);
    EXPECT_GE(device->memory_report().peak_bytes, 121'000u);
}

TEST(EngineMemory, OutOfMemoryNamesTheLargestPartAndAWayOut) {
    const auto device = make_device();
    const Buffer weights(
        *device, {.name = "weights", .bytes = 3 << 20, .category = MemoryCategory::Weights});
    // More than any machine has; the second and third would wrap if sizes were rounded carelessly.
    for (const std::uint64_t bytes :
         {std::uint64_t{1} << 50, ~std::uint64_t{0}, ~std::uint64_t{0} - 4096})
        try {
            const Buffer buffer(
                *device,
                {.name = "layer 3 keys", .bytes = bytes, .category = MemoryCategory::Activations});
            ADD_FAILURE() << "got " << bytes << " bytes";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
            for (const char* part : {"layer 3 keys (activations)", "weights 3.00 MiB in 1 buffer",
                                     "The largest part is activations; make micro-batches smaller"})
                EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
        }
    // Nothing was changed.
    EXPECT_EQ(device->memory_report().of(MemoryCategory::Activations).num_buffers, 0u);
    const Buffer small(*device, {.name = "small", .bytes = 64});
    EXPECT_TRUE(small.bound());
}

TEST(EngineMemory, TheLargestPartIsWhatIsHeldWhenLittleMoreWasAskedFor) {
    // A device that has no more is imitated by asking for more than its heap in pieces would take
    // too long here; a large category that is held must win over a small request.
    const auto device = make_device();
    const MemoryReport now = device->memory_report();
    MemoryReport full = now;
    full.categories[static_cast<std::size_t>(MemoryCategory::Weights)] = {1 << 20, 1 << 20, 3};
    full.categories[static_cast<std::size_t>(MemoryCategory::DeferredWgrad)] = {5 << 20, 5 << 20,
                                                                                9};
    EXPECT_EQ(full.largest(), MemoryCategory::DeferredWgrad);
    EXPECT_EQ(full.describe(),
              "deferred weight gradients 5.00 MiB in 9 buffers, weights 1.00 MiB in 3 buffers");
}

} // namespace
} // namespace bellows
