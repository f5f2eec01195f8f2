// SPDX-License-Identifier: MIT
#pragma once

// Views of device memory: cheap values that own nothing. A view names a resource (a logical
// allocation, see memory.hpp) and a range in it; the memory behind a resource may be bound after
// work that uses the view has been recorded. Any thread.

#include <bellows/base/dtype.hpp>
#include <bellows/base/memory_sizes.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace bellows {

class Resource;

/// A byte range of a resource. Default-constructed: no memory at all, which kernels see as the
/// null address and which serves for operands that a variant does not use.
struct BufferView {
    Resource* resource = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;

    explicit operator bool() const noexcept { return resource != nullptr; }
    /// The range [first, first + size) of this view. Throws Error{InvalidArgument} outside it.
    BufferView sub(std::uint64_t first, std::uint64_t size) const;
};

/// Up to four dimensions, outermost first; strides in elements. extent[0] is a capacity where
/// `row_count` names a u32 on the device that says how many rows are really there, or with
/// rows_per_count a u32 for each rows_per_count rows, of which the first so many are there.
struct TensorView {
    static constexpr std::uint32_t kMaxRank = 4;

    BufferView buffer;
    DType dtype = DType::F32;
    std::uint32_t rank = 0;
    std::array<std::uint64_t, kMaxRank> extent{};
    std::array<std::uint64_t, kMaxRank> stride{};
    BufferView row_count;
    std::uint64_t rows_per_count = 0; ///< 0: one count for all rows

    /// Contiguous row-major view at the start of `buffer`. Throws Error{InvalidArgument} when the
    /// buffer is too small.
    static TensorView contiguous(BufferView buffer, DType dtype,
                                 std::initializer_list<std::uint64_t> extents);
    static TensorView contiguous(BufferView buffer, DType dtype,
                                 std::span<const std::uint64_t> extents);

    std::uint64_t num_elements() const noexcept;
    std::uint64_t num_bytes() const noexcept { return num_elements() * size_of(dtype); }
    bool is_contiguous() const noexcept;
    /// Rows [first, first + count) of dimension 0.
    TensorView rows(std::uint64_t first, std::uint64_t count) const;
    /// The same rows with `count` as their device-side number.
    TensorView with_row_count(BufferView count) const noexcept;
    /// The same rows with a count for each `of_each` of them: what few operators take, which say
    /// so; others throw Error{InvalidArgument}.
    TensorView with_row_counts(BufferView counts, std::uint64_t of_each) const noexcept;
    /// The memory of all counts, `otherwise` without. Throws Error{InvalidArgument} where it is too
    /// small or not at a multiple of 4 bytes.
    BufferView row_counts_or(BufferView otherwise) const;
    /// Rows that share a count; 0 without counts.
    std::uint64_t counted_rows() const noexcept;
    /// The same memory seen with other extents; contiguous views only.
    TensorView reshaped(std::initializer_list<std::uint64_t> extents) const;
};

} // namespace bellows
