// SPDX-License-Identifier: MIT
// The checks of bench_permute accept what the ops compute, and nothing that was there before.

#include "permute/permutation.hpp"

#include <gtest/gtest.h>

namespace bellows::bench {
namespace {

class BenchPermute : public ::testing::TestWithParam<PermuteShape> {
protected:
    static std::unique_ptr<Device> poisoned_device() {
        DeviceOptions options;
        options.poison_freed_memory = true;
        return Device::create(DeviceOptions::from_environment(options));
    }
    std::unique_ptr<Device> device_ = poisoned_device();
};

TEST_P(BenchPermute, OnlyARightResultPasses) {
    for (const PermuteOp& op : permute_ops())
        for (const DType act : {DType::F32, DType::BF16}) {
            SCOPED_TRACE(std::string(op.name) + " " + to_string(act));
            OpData data(*device_);
            const Workload work = op.make(Permutation(data, GetParam(), act));
            EXPECT_NE(work.verify(), "") << "before it ran";
            Recording recording(*device_, QueueRole::Compute, "op");
            work.record(recording);
            device_->submit(recording).wait();
            EXPECT_EQ(work.verify(), "");
            EXPECT_GT(work.bytes, 0);
        }
}

INSTANTIATE_TEST_SUITE_P(Shapes, BenchPermute,
                         ::testing::Values(PermuteShape{64, 256, 16, 4}, PermuteShape{1, 8, 8, 8},
                                           PermuteShape{17, 24, 24, 3}, PermuteShape{9, 16, 8, 1}),
                         [](const auto& shape) { return "of" + name_of(shape.param); });

} // namespace
} // namespace bellows::bench
