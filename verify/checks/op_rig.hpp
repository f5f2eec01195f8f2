// SPDX-License-Identifier: MIT
#pragma once

// What checks of the dense ops stand on, in `bellows selftest` and in the tests: tensors made from
// numbers (rounded to their storage) and results as numbers, on a device of the caller's. Result
// tensors begin as a bit pattern that no op writes, so that elements which were never written or
// should not have been are seen. One thread at a time.

#include "verify/reference/compare.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/device.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace bellows::checks {

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

class OpRig {
public:
    explicit OpRig(Device& device) : device_(device) {}
    Device& device() const { return device_; }

    /// Records with `record`, submits, waits.
    void run(const std::function<void(Recording&)>& record) const {
        Recording recording(device_, QueueRole::Compute, "op");
        record(recording);
        device_.submit(recording).wait();
    }

    /// All kUntouched.
    OpTensor result(DType dtype, std::initializer_list<std::uint64_t> extents) const {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents)
            elements *= extent;
        OpTensor tensor;
        const std::uint64_t bytes =
            std::max<std::uint64_t>(16, (elements * size_of(dtype) + 3) / 4 * 4);
        tensor.buffer = Buffer(device_, {.name = "result", .bytes = bytes});
        tensor.view = TensorView::contiguous(tensor.buffer.view(), dtype, extents);
        const std::vector<std::uint32_t> words(bytes / 4, kUntouched);
        device_.upload(tensor.buffer.view(), std::span<const std::uint32_t>(words));
        return tensor;
    }

    /// The same, of which the tensor is the first `size` of the last dimension.
    OpTensor head(DType dtype, std::initializer_list<std::uint64_t> extents,
                  std::uint64_t size) const {
        OpTensor tensor = result(dtype, extents);
        tensor.view.extent[tensor.view.rank - 1] = size;
        return tensor;
    }

    /// f32, bf16, i32 or u32 from as many numbers as it has elements.
    template <class T>
    OpTensor tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                    const std::vector<T>& values) const {
        OpTensor tensor = result(dtype, extents);
        write(tensor.view, values);
        return tensor;
    }

    template <class T>
    void write(const TensorView& view, const std::vector<T>& values) const {
        if (values.size() != view.num_elements())
            throw Error(ErrorCode::InvalidArgument,
                        std::to_string(values.size()) + " values for a tensor of " +
                            std::to_string(view.num_elements()) + " elements");
        if (values.empty())
            return;
        std::vector<std::byte> padded((span_elements(view) * size_of(view.dtype) + 3) / 4 * 4);
        device_.download(words(view, padded.size()), std::span<std::byte>(padded));
        each_element(view, [&](std::uint64_t index, std::uint64_t at) {
            encode(view.dtype, values[index], padded.data() + at * size_of(view.dtype));
        });
        device_.upload(words(view, padded.size()), std::span<const std::byte>(padded));
    }

    /// In row-major order of the view's extents, whatever its strides.
    template <class T = float>
    std::vector<T> read(const TensorView& view) const {
        std::vector<T> values(view.num_elements());
        if (values.empty())
            return values;
        std::vector<std::byte> bytes((span_elements(view) * size_of(view.dtype) + 3) / 4 * 4);
        device_.download(words(view, bytes.size()), std::span<std::byte>(bytes));
        each_element(view, [&](std::uint64_t index, std::uint64_t at) {
            values[index] = decode<T>(view.dtype, bytes.data() + at * size_of(view.dtype));
        });
        return values;
    }

    /// All elements of the tensor's buffer that `part` of it does not address.
    std::vector<float> outside(const OpTensor& tensor, const TensorView& part) const {
        const BufferView all = tensor.buffer.view();
        std::vector<std::byte> bytes(all.bytes);
        device_.download(all, std::span<std::byte>(bytes));
        const std::uint64_t size = size_of(part.dtype);
        const std::uint64_t first = (part.buffer.offset - all.offset) / size;
        std::vector<bool> addressed(bytes.size() / size);
        each_element(part, [&](std::uint64_t, std::uint64_t at) { addressed[first + at] = true; });
        std::vector<float> values;
        for (std::uint64_t i = 0; i < addressed.size(); ++i)
            if (!addressed[i])
                values.push_back(decode<float>(part.dtype, bytes.data() + i * size));
        return values;
    }
    std::vector<float> outside(const OpTensor& tensor) const {
        return outside(tensor, tensor.view);
    }

    Buffer workspace(std::uint64_t bytes) const {
        return Buffer(device_, {.name = "workspace", .bytes = std::max<std::uint64_t>(16, bytes)});
    }

    /// Values of [low, high] that are exact in dtype.
    static std::vector<float> random(DType dtype, std::uint64_t count, std::uint64_t seed,
                                     double low = -1, double high = 1) {
        return dtype == DType::BF16 ? reference::random_bf16(count, seed, low, high)
                                    : reference::random_f32(count, seed, low, high);
    }

private:
    /// Transfers go by words; a bf16 view may end in the middle of one.
    static BufferView words(const TensorView& view, std::uint64_t bytes) {
        return {view.buffer.resource, view.buffer.offset, bytes};
    }

    static std::uint64_t span_elements(const TensorView& view) {
        std::uint64_t elements = view.num_elements() == 0 ? 0 : 1;
        for (std::uint32_t i = 0; i < view.rank && elements > 0; ++i)
            elements += (view.extent[i] - 1) * view.stride[i];
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
            const std::uint16_t bits = reference::bf16_bits(static_cast<float>(value));
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
            return static_cast<T>(reference::from_bf16(bits));
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

    Device& device_;
};

/// Tolerance of one rounding to the storage type on top of f32 arithmetic: `ulps` f32 roundings of
/// values up to `magnitude`.
inline auto storage_bound(DType dtype, double ulps, double magnitude = 0) {
    // The value that is rounded may itself be off by the arithmetic's error: 1 % more.
    const double storage = dtype == DType::BF16 ? 1.01 * reference::kBf16Epsilon : 0.0;
    return reference::within(ulps * reference::kF32Epsilon * magnitude + 1e-37,
                             storage + ulps * reference::kF32Epsilon);
}

} // namespace bellows::checks
