// SPDX-License-Identifier: MIT
// The checks of bench_fp8_quantize accept what the ops compute, and nothing that was there before.

#include "fp8_quantize/workloads.hpp"

#include <gtest/gtest.h>

namespace bellows::bench {
namespace {

class BenchFp8Quantize : public ::testing::TestWithParam<QuantizeShape> {
protected:
    static std::unique_ptr<Device> poisoned_device() {
        DeviceOptions options;
        options.poison_freed_memory = true;
        return Device::create(DeviceOptions::from_environment(options));
    }
    std::unique_ptr<Device> device_ = poisoned_device();
};

TEST_P(BenchFp8Quantize, OnlyARightResultPasses) {
    for (const fp8::Format format : {fp8::Format::E4M3, fp8::Format::E5M2})
        for (const fp8::ScaleRule rule : {fp8::ScaleRule::PowerOfTwo, fp8::ScaleRule::F32})
            for (const QuantizeOp& op :
                 quantize_ops(GetParam(), format, rule, {DType::F32, DType::BF16})) {
                SCOPED_TRACE(op.name + " " + to_string(format) + " " + to_string(rule));
                OpData data(*device_);
                const Workload work = op.make(data);
                EXPECT_NE(work.verify(), "") << "before it ran";
                Recording recording(*device_, QueueRole::Compute, "op");
                work.record(recording);
                device_->submit(recording).wait();
                EXPECT_EQ(work.verify(), "");
                EXPECT_GT(work.bytes, 0);
            }
}

INSTANTIATE_TEST_SUITE_P(Shapes, BenchFp8Quantize,
                         ::testing::Values(QuantizeShape{1, 1, 128}, QuantizeShape{1, 300, 384},
                                           QuantizeShape{3, 128, 256}),
                         [](const auto& shape) { return "of" + name_of(shape.param); });

} // namespace
} // namespace bellows::bench
