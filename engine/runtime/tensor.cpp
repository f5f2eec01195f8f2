// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/tensor.hpp>

#include <algorithm>
#include <limits>
#include <string>

namespace bellows {

BufferView BufferView::sub(std::uint64_t first, std::uint64_t size) const {
    if (first > bytes || size > bytes - first)
        throw Error(ErrorCode::InvalidArgument,
                    "range [" + std::to_string(first) + ", +" + std::to_string(size) +
                        ") lies outside a view of " + std::to_string(bytes) + " bytes");
    return {resource, offset + first, size};
}

TensorView TensorView::contiguous(BufferView buffer, DType dtype,
                                  std::initializer_list<std::uint64_t> extents) {
    return contiguous(buffer, dtype, std::span(extents.begin(), extents.size()));
}

TensorView TensorView::contiguous(BufferView buffer, DType dtype,
                                  std::span<const std::uint64_t> extents) {
    if (extents.size() == 0 || extents.size() > kMaxRank)
        throw Error(ErrorCode::InvalidArgument,
                    "a tensor has 1 to 4 dimensions, not " + std::to_string(extents.size()));
    TensorView tensor;
    tensor.dtype = dtype;
    tensor.rank = static_cast<std::uint32_t>(extents.size());
    std::uint32_t i = 0;
    for (std::uint64_t extent : extents)
        tensor.extent[i++] = extent;
    std::uint64_t stride = 1;
    for (i = tensor.rank; i-- > 0;) {
        tensor.stride[i] = stride;
        if (tensor.extent[i] != 0 &&
            stride > std::numeric_limits<std::uint64_t>::max() / 8 / tensor.extent[i])
            throw Error(ErrorCode::InvalidArgument, "tensor size overflows 64 bits");
        stride *= tensor.extent[i];
    }
    const std::uint64_t bytes = tensor.num_bytes();
    if (bytes > buffer.bytes)
        throw Error(ErrorCode::InvalidArgument, "a tensor of " + std::to_string(bytes) +
                                                    " bytes does not fit a view of " +
                                                    std::to_string(buffer.bytes) + " bytes");
    tensor.buffer = {buffer.resource, buffer.offset, bytes};
    return tensor;
}

std::uint64_t TensorView::num_elements() const noexcept {
    std::uint64_t product = 1;
    for (std::uint32_t i = 0; i < rank; ++i)
        product *= extent[i];
    return rank == 0 ? 0 : product;
}

bool TensorView::is_contiguous() const noexcept {
    std::uint64_t expected = 1;
    for (std::uint32_t i = rank; i-- > 0;) {
        if (extent[i] != 1 && stride[i] != expected)
            return false;
        expected *= extent[i];
    }
    return true;
}

TensorView TensorView::rows(std::uint64_t first, std::uint64_t count) const {
    if (rank == 0 || first > extent[0] || count > extent[0] - first)
        throw Error(ErrorCode::InvalidArgument,
                    "rows [" + std::to_string(first) + ", +" + std::to_string(count) +
                        ") lie outside a tensor of " + std::to_string(extent[0]) + " rows");
    TensorView part = *this;
    const std::uint64_t skip = first * stride[0] * size_of(dtype);
    part.buffer = buffer.sub(skip, buffer.bytes - skip);
    part.extent[0] = count;
    part.row_count = {};
    part.rows_per_count = 0;
    if (part.is_contiguous())
        part.buffer.bytes = part.num_bytes();
    return part;
}

TensorView TensorView::with_row_count(BufferView count) const noexcept {
    TensorView counted = *this;
    counted.row_count = count;
    counted.rows_per_count = 0;
    return counted;
}

TensorView TensorView::with_row_counts(BufferView counts, std::uint64_t of_each) const noexcept {
    TensorView counted = *this;
    counted.row_count = counts;
    counted.rows_per_count = of_each;
    return counted;
}

std::uint64_t TensorView::counted_rows() const noexcept {
    if (!row_count)
        return 0;
    return rows_per_count != 0 ? rows_per_count : std::max<std::uint64_t>(extent[0], 1);
}

BufferView TensorView::row_counts_or(BufferView otherwise) const {
    if (!row_count)
        return otherwise;
    const std::uint64_t counts =
        rows_per_count == 0 ? 1 : div_up(rank == 0 ? 0 : extent[0], rows_per_count);
    const std::uint64_t bytes = counts * sizeof(std::uint32_t);
    if (row_count.bytes < bytes || row_count.offset % sizeof(std::uint32_t) != 0)
        throw Error(ErrorCode::InvalidArgument,
                    "row counts are " + std::to_string(counts) +
                        " u32 at a multiple of 4 bytes; their buffer view has " +
                        std::to_string(row_count.bytes) + " bytes from byte " +
                        std::to_string(row_count.offset) + " on");
    return row_count.sub(0, bytes);
}

TensorView TensorView::reshaped(std::initializer_list<std::uint64_t> extents) const {
    if (!is_contiguous())
        throw Error(ErrorCode::InvalidArgument, "only contiguous tensors can be reshaped");
    TensorView other = contiguous(buffer, dtype, extents);
    if (other.num_elements() != num_elements())
        throw Error(ErrorCode::InvalidArgument, "reshaping " + std::to_string(num_elements()) +
                                                    " elements to " +
                                                    std::to_string(other.num_elements()));
    other.row_count = row_count;
    return other;
}

} // namespace bellows
