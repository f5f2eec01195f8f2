// SPDX-License-Identifier: MIT
#pragma once

// What the tests of the dense ops share: one device per program, tensors made from float values
// (rounded to their storage), and results as floats. Result tensors begin as a bit pattern that no
// op writes, so that elements which were never written or should not have been are seen.

#include "support/compare.hpp"
#include "support/test_device.hpp"

#include <bellows/engine/ops.hpp>

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace bellows::testing {

/// A buffer and the tensor in it.
struct OpTensor {
    Buffer buffer;
    TensorView view;
    operator const TensorView&() const { return view; }
};

inline constexpr std::uint32_t kUntouched = 0x7FC17FC1u; ///< NaN as f32 and as two bf16
inline bool untouched(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return bits == kUntouched || bits == (kUntouched & 0xFFFF0000u);
}

class OpTest : public ::testing::Test {
protected:
    static void SetUpTestSuite() { device_ = make_device(); }
    static void TearDownTestSuite() { device_.reset(); }
    static Device& device() { return *device_; }

    /// Records with `record`, submits, waits.
    static void run(const std::function<void(Recording&)>& record) {
        Recording recording(device(), QueueRole::Compute, "op");
        record(recording);
        device().submit(recording).wait();
    }

    /// All kUntouched.
    static OpTensor result(DType dtype, std::initializer_list<std::uint64_t> extents) {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents) {
            elements *= extent;
        }
        OpTensor tensor;
        const std::uint64_t bytes =
            std::max<std::uint64_t>(16, (elements * size_of(dtype) + 3) / 4 * 4);
        tensor.buffer = Buffer(device(), {.name = "result", .bytes = bytes});
        tensor.view = TensorView::contiguous(tensor.buffer.view(), dtype, extents);
        const std::vector<std::uint32_t> words(bytes / 4, kUntouched);
        device().upload(tensor.buffer.view(), std::span<const std::uint32_t>(words));
        return tensor;
    }

    /// f32, bf16, i32 or u32 from numbers.
    template <class T>
    static OpTensor tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                           const std::vector<T>& values) {
        OpTensor tensor = result(dtype, extents);
        EXPECT_EQ(values.size(), tensor.view.num_elements());
        write(tensor.view, values);
        return tensor;
    }

    template <class T>
    static void write(const TensorView& view, const std::vector<T>& values) {
        std::vector<std::byte> bytes(span_elements(view) * size_of(view.dtype));
        std::vector<std::byte> padded((bytes.size() + 3) / 4 * 4);
        device().download(words(view, padded.size()), std::span<std::byte>(padded));
        each_element(view, [&](std::uint64_t index, std::uint64_t at) {
            encode(view.dtype, values[index], padded.data() + at * size_of(view.dtype));
        });
        device().upload(words(view, padded.size()), std::span<const std::byte>(padded));
    }

    /// In row-major order of the view's extents, whatever its strides.
    template <class T = float>
    static std::vector<T> read(const TensorView& view) {
        std::vector<std::byte> bytes((span_elements(view) * size_of(view.dtype) + 3) / 4 * 4);
        device().download(words(view, bytes.size()), std::span<std::byte>(bytes));
        std::vector<T> values(view.num_elements());
        each_element(view, [&](std::uint64_t index, std::uint64_t at) {
            values[index] = decode<T>(view.dtype, bytes.data() + at * size_of(view.dtype));
        });
        return values;
    }

    static Buffer workspace(std::uint64_t bytes) {
        return Buffer(device(), {.name = "workspace", .bytes = std::max<std::uint64_t>(16, bytes)});
    }

    /// Values of [low, high] that are exact in dtype.
    static std::vector<float> random(DType dtype, std::uint64_t count, std::uint64_t seed,
                                     double low = -1, double high = 1) {
        return dtype == DType::BF16 ? test::random_bf16(count, seed, low, high)
                                    : test::random_f32(count, seed, low, high);
    }

private:
    /// Transfers go by words; a bf16 view may end in the middle of one.
    static BufferView words(const TensorView& view, std::uint64_t bytes) {
        return {view.buffer.resource, view.buffer.offset, bytes};
    }

    static std::uint64_t span_elements(const TensorView& view) {
        std::uint64_t elements = view.num_elements() == 0 ? 0 : 1;
        for (std::uint32_t i = 0; i < view.rank && elements > 0; ++i) {
            elements += (view.extent[i] - 1) * view.stride[i];
        }
        return elements;
    }

    template <class F>
    static void each_element(const TensorView& view, const F& visit) {
        const std::uint64_t count = view.num_elements();
        for (std::uint64_t index = 0; index < count; ++index) {
            std::uint64_t rest = index, at = 0;
            for (std::uint32_t axis = view.rank; axis-- > 0;) {
                at += rest % view.extent[axis] * view.stride[axis];
                rest /= view.extent[axis];
            }
            visit(index, at);
        }
    }

    template <class T>
    static void encode(DType dtype, T value, std::byte* to) {
        if (dtype == DType::F32) {
            const auto number = static_cast<float>(value);
            std::memcpy(to, &number, 4);
        } else if (dtype == DType::BF16) {
            const std::uint16_t bits = test::bf16_bits(static_cast<float>(value));
            std::memcpy(to, &bits, 2);
        } else {
            const auto number = static_cast<std::uint32_t>(static_cast<std::int64_t>(value));
            std::memcpy(to, &number, 4);
        }
    }

    template <class T>
    static T decode(DType dtype, const std::byte* from) {
        if (dtype == DType::BF16) {
            std::uint16_t bits = 0;
            std::memcpy(&bits, from, 2);
            return static_cast<T>(test::from_bf16(bits));
        }
        if (dtype == DType::F32) {
            float number = 0;
            std::memcpy(&number, from, 4);
            return static_cast<T>(number);
        }
        std::uint32_t number = 0;
        std::memcpy(&number, from, 4);
        return dtype == DType::I32 ? static_cast<T>(static_cast<std::int32_t>(number))
                                   : static_cast<T>(number);
    }

    inline static std::unique_ptr<Device> device_;
};

/// Tolerance of one rounding to the storage type on top of f32 arithmetic: `ulps` f32 roundings of
/// values up to `magnitude`.
inline auto storage_bound(DType dtype, double ulps, double magnitude = 0) {
    // The value that is rounded may itself be off by the arithmetic's error: 1 % more.
    const double storage = dtype == DType::BF16 ? 1.01 * test::kBf16Epsilon : 0.0;
    return test::within(ulps * test::kF32Epsilon * magnitude + 1e-37,
                        storage + ulps * test::kF32Epsilon);
}

} // namespace bellows::testing
