// SPDX-License-Identifier: MIT
// Tensors handed to other libraries and taken from them.

#include "support/test_device.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/dlpack.hpp>
#include <bellows/engine/ops.hpp>

#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::read_back;

/// A tensor of "another library", which counts how often it was given back.
struct Foreign {
    std::vector<std::int64_t> shape, strides;
    DLManagedTensor managed{};
    int given_back = 0;

    Foreign(void* data, std::vector<std::int64_t> extents, DLDataType type = {kDLFloat, 32, 1},
            std::vector<std::int64_t> steps = {})
        : shape(std::move(extents)), strides(std::move(steps)) {
        managed.dl_tensor = {.data = data,
                             .device = {kDLCPU, 0},
                             .ndim = static_cast<int>(shape.size()),
                             .dtype = type,
                             .shape = shape.data(),
                             .strides = strides.empty() ? nullptr : strides.data(),
                             .byte_offset = 0};
        managed.manager_ctx = this;
        managed.deleter = [](DLManagedTensor* gone) {
            ++static_cast<Foreign*>(gone->manager_ctx)->given_back;
        };
    }
};

std::vector<float> counted(std::size_t count) {
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), 1.0f);
    return values;
}

TEST(Dlpack, CopiesSmallTensorsOfTheHost) {
    const auto device = make_device();
    std::vector<float> values = counted(6);
    Foreign foreign(values.data(), {2, 3});
    {
        const TakenTensor taken(*device, &foreign.managed, "small");
        EXPECT_TRUE(taken.copied());
        EXPECT_EQ(foreign.given_back, 1);
        ASSERT_EQ(taken.view().rank, 2u);
        EXPECT_EQ(taken.view().extent[1], 3u);
        EXPECT_EQ(read_back<float>(*device, taken.view().buffer), values);
    }
    EXPECT_EQ(foreign.given_back, 1);
}

TEST(Dlpack, CopiesStridedTensorsInTheirOrder) {
    const auto device = make_device();
    std::vector<float> values = counted(12);
    Foreign foreign(values.data(), {2, 3}, {kDLFloat, 32, 1}, {1, 4}); // a transposed part
    foreign.managed.dl_tensor.byte_offset = 4;
    const TakenTensor taken(*device, &foreign.managed, "strided");
    EXPECT_EQ(read_back<float>(*device, taken.view().buffer),
              (std::vector<float>{2, 6, 10, 3, 7, 11}));
}

TEST(Dlpack, UsesAlignedMemoryOfTheHostWhereItStands) {
    const auto device = make_device();
    const std::uint64_t unit = device->info().host_import_alignment;
    if (unit == 0)
        GTEST_SKIP() << "the device imports no host memory";
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(unit, unit),
                                                             &std::free);
    const std::span<float> values(static_cast<float*>(memory.get()), unit / sizeof(float));
    std::ranges::fill(values, 2.0f);
    Foreign foreign(memory.get(), {static_cast<std::int64_t>(values.size())});
    {
        const TakenTensor taken(*device, &foreign.managed, "aligned");
        EXPECT_FALSE(taken.copied());
        EXPECT_EQ(foreign.given_back, 0);
        Recording recording(*device, QueueRole::Compute, "scale");
        ops::scale(recording, taken.view(), taken.view(), 3);
        device->submit(recording).wait();
    }
    EXPECT_EQ(foreign.given_back, 1);
    EXPECT_EQ(values.front(), 6.0f);
    EXPECT_EQ(values.back(), 6.0f);
}

TEST(Dlpack, RefusesWhatItCannotTakeAndLeavesItToTheCaller) {
    const auto device = make_device();
    std::vector<float> values = counted(6);
    const auto refusal = [&](auto change) {
        Foreign foreign(values.data(), {2, 3});
        change(foreign.managed.dl_tensor);
        try {
            const TakenTensor taken(*device, &foreign.managed, "wrong");
        } catch (const Error& error) {
            EXPECT_EQ(foreign.given_back, 0);
            return error.message();
        }
        return std::string("nothing was thrown");
    };
    const auto expect = [&](const char* says, auto change) {
        EXPECT_NE(refusal(change).find(says), std::string::npos) << refusal(change);
    };
    std::int64_t negative[] = {2, -3}, huge[] = {std::int64_t{1} << 40, std::int64_t{1} << 40};
    std::int64_t backwards[] = {3, -1}, none[] = {0, 3};
    expect("0 dimensions", [](DLTensor& t) { t.ndim = 0; });
    expect("5 dimensions", [](DLTensor& t) { t.ndim = 5; });
    expect("negative extent", [&](DLTensor& t) { t.shape = negative; });
    expect("negative stride", [&](DLTensor& t) { t.strides = backwards; });
    expect("64 bits", [&](DLTensor& t) { t.shape = huge; });
    expect("no elements", [&](DLTensor& t) { t.shape = none; });
    expect("64 bits, 1 lanes", [](DLTensor& t) { t.dtype.bits = 64; });
    expect("4 lanes", [](DLTensor& t) { t.dtype.lanes = 4; });
    expect("no memory", [](DLTensor& t) { t.data = nullptr; });
    expect("device of type 7", [](DLTensor& t) { t.device.device_type = kDLVulkan; });
}

TEST(Dlpack, HandsOutHostMemoryThatOutlivesTheBuffer) {
    const auto device = make_device();
    DLManagedTensor* out = nullptr;
    {
        const SharedBuffer shared(*device, SharedBuffer::Place::Host, 24, "result");
        device->upload(shared.buffer().view(), counted(6));
        const TensorView tensor = shared.buffer().tensor(DType::F32, {2, 3});
        out = shared.hand_out(tensor.rows(1, 1));
        const Buffer other(*device, {.name = "other", .bytes = 24});
        EXPECT_THROW(shared.hand_out(other.tensor(DType::F32, {2, 3})), Error);
    }
    EXPECT_EQ(device->memory_report().bytes, 24u);
    EXPECT_EQ(out->dl_tensor.device.device_type, kDLCPU);
    EXPECT_EQ(out->dl_tensor.shape[0], 1);
    EXPECT_EQ(out->dl_tensor.strides[0], 3);
    EXPECT_EQ(out->dl_tensor.dtype.bits, 32);
    const auto* values = static_cast<const float*>(out->dl_tensor.data);
    EXPECT_EQ(std::vector<float>(values, values + 3), (std::vector<float>{4, 5, 6}));
    out->deleter(out);
    EXPECT_EQ(device->memory_report().bytes, 0u);
}

// On a GPU of CUDA the tensor goes through that driver's memory and back; elsewhere the reason is
// said.
TEST(Dlpack, DeviceMemoryWhereTheDriverSharesIt) {
    const auto device = make_device();
    const std::string why_not = SharedBuffer::why_not_on_device(*device);
    if (!why_not.empty()) {
        try {
            const SharedBuffer shared(*device, SharedBuffer::Place::Device, 24, "result");
            FAIL() << "nothing was thrown";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        }
        return;
    }
    DLManagedTensor* out = nullptr;
    {
        const SharedBuffer shared(*device, SharedBuffer::Place::Device, 24, "result");
        device->upload(shared.buffer().view().sub(0, 24), counted(6));
        out = shared.hand_out(shared.buffer().tensor(DType::F32, {2, 3}));
    }
    EXPECT_EQ(out->dl_tensor.device.device_type, kDLCUDA);
    const TakenTensor back(*device, out, "back");
    EXPECT_TRUE(back.copied());
    EXPECT_EQ(read_back<float>(*device, back.view().buffer.sub(0, 24)), counted(6));
}

} // namespace
} // namespace bellows
