// SPDX-License-Identifier: MIT
#include "operands.hpp"

#include <algorithm>
#include <limits>

namespace bellows::fp8 {

namespace {

std::string list(const std::uint64_t* values, std::size_t count) {
    std::string text = "[";
    for (std::size_t i = 0; i < count; ++i)
        text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    return text + "]";
}

} // namespace

std::string describe(const TensorView& view) {
    std::string text =
        std::string(to_string(view.dtype)) + " " + list(view.extent.data(), view.rank);
    if (!view.is_contiguous())
        text += " with strides " + list(view.stride.data(), view.rank);
    return text;
}

std::string describe(const Matrix& matrix) {
    return (matrix.batch == 1 ? "" : std::to_string(matrix.batch) + " x ") +
           std::to_string(matrix.rows) + " x " + std::to_string(matrix.columns);
}

void Operands::fail(const std::string& message) const {
    throw Error(ErrorCode::InvalidArgument, std::string(op_) + ": " + message);
}

std::uint32_t Operands::u32(const char* what, std::uint64_t value) const {
    require(value <= std::numeric_limits<std::uint32_t>::max(),
            std::string(what) + " is " + std::to_string(value) + ", more than 2^32 - 1");
    return static_cast<std::uint32_t>(value);
}

std::uint32_t Operands::grid(const char* what, std::uint64_t groups) const {
    require(groups <= kMaxGroups, std::string(what) + " needs " + std::to_string(groups) +
                                      " workgroups along an axis, more than " +
                                      std::to_string(kMaxGroups));
    return static_cast<std::uint32_t>(groups);
}

void Operands::workspace(BufferView workspace, std::uint64_t bytes) const {
    require(workspace.bytes >= bytes, "the workspace has " + std::to_string(workspace.bytes) +
                                          " bytes, wanted are " + std::to_string(bytes));
    require(workspace.offset % 16 == 0, "the workspace begins at byte " +
                                            std::to_string(workspace.offset) +
                                            " of its buffer, not at a multiple of 16");
}

/// Row strides are multiples of `padding` elements and rows reach to one.
Matrix Operands::matrix(const char* name, const TensorView& view, std::uint64_t padding) const {
    const auto say = [&] { return std::string(name) + " is " + describe(view); };
    Matrix m;
    m.batch = view.rank == 3 ? view.extent[0] : 1;
    m.rows = view.extent[view.rank - 2];
    m.columns = view.extent[view.rank - 1];
    if (m.empty())
        return m;
    const std::uint64_t row_stride = view.stride[view.rank - 2];
    const std::uint64_t batch_stride = view.rank == 3 ? view.stride[0] : 0;
    require(view.stride[view.rank - 1] == 1, say() + "; its last stride must be 1");
    require(row_stride % padding == 0 && batch_stride % padding == 0,
            say() + "; its row and batch strides must be multiples of " + std::to_string(padding));
    const std::uint64_t row_elements = round_up(m.columns, padding);
    require((m.rows == 1 || row_stride >= row_elements) &&
                (m.batch == 1 || batch_stride >= (m.rows - 1) * row_stride + row_elements),
            say() + "; rows of " + std::to_string(row_elements) +
                " elements (columns up to a multiple of " + std::to_string(padding) + ") overlap");
    require(static_cast<bool>(view.buffer), std::string(name) + " has no memory");
    require(view.buffer.offset % 16 == 0, std::string(name) + " begins at byte " +
                                              std::to_string(view.buffer.offset) +
                                              " of its buffer, not at a multiple of 16");
    const std::uint64_t elements =
        (m.batch - 1) * batch_stride + (m.rows - 1) * row_stride + row_elements;
    const std::uint64_t bytes = elements * size_of(view.dtype);
    // The view ends with its last element where the buffer goes on behind it.
    require(bytes <= view.buffer.bytes,
            say() + " and needs " + std::to_string(bytes) +
                " bytes with the last row's padding to " + std::to_string(row_elements) +
                " elements, its buffer view has " + std::to_string(view.buffer.bytes));
    m.memory = view.buffer.sub(0, bytes);
    m.stride8 = u32("a row stride", row_stride / 8);
    m.batch8 = u32("a batch stride", batch_stride / 8);
    u32("a matrix's size in groups of 8", m.rows * (row_stride / 8));
    u32("rows", m.rows + 128);
    u32("columns", m.columns + 128);
    return m;
}

Matrix Operands::activation(const char* name, const TensorView& view, bool batched) const {
    require(view.dtype == DType::F32 || view.dtype == DType::BF16,
            std::string(name) + " is " + describe(view) + ", wanted is f32 or bf16");
    require(view.rank == 2 || (batched && view.rank == 3),
            std::string(name) + " is " + describe(view) + ", wanted are " +
                (batched ? "2 or 3 dimensions" : "2 dimensions"));
    require(!view.row_count || view.rank == 2,
            std::string(name) + " has a row count and a batch; only one of them is possible");
    return matrix(name, view, 8);
}

Matrix Operands::codes(const char* name, const Quantized& quantized, bool batched) const {
    const TensorView& view = quantized.codes;
    require(view.dtype == dtype_of(quantized.recipe.format),
            std::string(name) + " are " + describe(view) + ", the recipe is " +
                describe(quantized.recipe));
    require(view.rank == 2 || (batched && view.rank == 3),
            std::string(name) + " are " + describe(view) + ", wanted are " +
                (batched ? "2 or 3 dimensions" : "2 dimensions"));
    require(!view.row_count || view.rank == 2,
            std::string(name) + " have a row count and a batch; only one of them is possible");
    return matrix(name, view, 16);
}

Matrix Operands::codes(const char* name, const Quantized& quantized, const Matrix& like) const {
    const Matrix m = codes(name, quantized, true);
    require(m.batch == like.batch && m.rows == like.rows && m.columns == like.columns,
            std::string(name) + " are " + describe(quantized.codes) + ", wanted are " +
                describe(like));
    return m;
}

Destination Operands::destination(const TensorView& d) const {
    const std::uint64_t ld = d.stride[d.rank - 2], batch = d.rank == 3 ? d.stride[0] : 0,
                        element = size_of(d.dtype);
    u32("the number of elements of d", d.extent[d.rank - 2] * ld);
    require(d.stride[d.rank - 1] == 1 && ld * element % 4 == 0 && batch * element % 4 == 0 &&
                d.buffer.offset % 4 == 0,
            "rows of d must begin at multiples of 4 bytes: " + describe(d));
    return {u32("the stride of d", ld), u32("the stride of d", batch),
            d.extent[d.rank - 1] % 4 == 0 && ld % 4 == 0 && batch % 4 == 0 &&
                d.buffer.offset % (4 * element) == 0};
}

std::uint32_t Operands::groups(const Quantized& quantized) const {
    const TensorView& offsets = quantized.group_offsets;
    if (!offsets.buffer)
        return 0;
    require(quantized.recipe.blocks == Blocks::Columns128,
            "group_offsets go with 128x1 blocks, the recipe is " + describe(quantized.recipe));
    require(offsets.dtype == DType::U32 && offsets.rank == 1 && offsets.extent[0] >= 2 &&
                offsets.is_contiguous() && offsets.buffer.offset % 4 == 0,
            "group_offsets are " + describe(offsets) +
                ", wanted is u32 [groups + 1] at a multiple of 4 bytes");
    return u32("groups", offsets.extent[0] - 1);
}

BufferView Operands::group_offsets_or(const Quantized& quantized, BufferView otherwise) const {
    const TensorView& offsets = quantized.group_offsets;
    return offsets.buffer ? offsets.buffer.sub(0, offsets.num_bytes()) : otherwise;
}

Scales Operands::scales(const char* name, const Quantized& quantized, const Matrix& codes) const {
    const TensorView& view = quantized.scales;
    const bool batched = quantized.codes.rank == 3;
    const Shape wanted =
        batched ? scales_shape(quantized.recipe, {codes.batch, codes.rows, codes.columns},
                               groups(quantized))
                : scales_shape(quantized.recipe, {codes.rows, codes.columns}, groups(quantized));
    const DType dtype = scales_dtype(quantized.recipe);
    require(
        view.dtype == dtype && view.rank == wanted.rank &&
            std::equal(view.extent.begin(), view.extent.begin() + view.rank, wanted.extent.begin()),
        std::string(name) + " are " + describe(view) + ", wanted are " + to_string(dtype) + " " +
            list(wanted.extent.data(), wanted.rank) + " for codes " + describe(quantized.codes) +
            " and " + describe(quantized.recipe));
    Scales s;
    if (codes.empty())
        return s;
    const auto say = [&] { return std::string(name) + " are " + describe(view); };
    const bool mx = quantized.recipe.blocks == Blocks::MX32;
    const std::uint64_t multiple = mx ? 4 : (quantized.recipe.blocks == Blocks::Columns128 ? 8 : 1);
    const std::uint64_t row_stride = view.rank == 1 ? 0 : view.stride[view.rank - 2];
    const std::uint64_t batch_stride = batched && view.rank == 3 ? view.stride[0] : 0;
    const std::uint64_t row_elements = round_up(view.extent[view.rank - 1], multiple);
    require(view.stride[view.rank - 1] == 1, say() + "; their last stride must be 1");
    require(row_stride % multiple == 0 && batch_stride % multiple == 0,
            say() + "; their row and batch strides must be multiples of " +
                std::to_string(multiple));
    const std::uint64_t scale_rows = view.rank == 1 ? 1 : view.extent[view.rank - 2];
    require((scale_rows == 1 || row_stride >= row_elements) &&
                (codes.batch == 1 || view.rank != 3 ||
                 batch_stride >= (scale_rows - 1) * row_stride + row_elements),
            say() + "; rows of " + std::to_string(row_elements) + " scales overlap");
    require(static_cast<bool>(view.buffer), std::string(name) + " have no memory");
    require(view.buffer.offset % (multiple == 8 ? 16 : 4) == 0,
            std::string(name) + " begin at byte " + std::to_string(view.buffer.offset) +
                " of their buffer, not at a multiple of " + (multiple == 8 ? "16" : "4"));
    const std::uint64_t batch = view.rank == 3 ? codes.batch : 1;
    const std::uint64_t bytes =
        ((batch - 1) * batch_stride + (scale_rows - 1) * row_stride + row_elements) *
        size_of(dtype);
    require(bytes <= view.buffer.bytes, say() + " and need " + std::to_string(bytes) +
                                            " bytes, their buffer view has " +
                                            std::to_string(view.buffer.bytes));
    s.memory = view.buffer.sub(0, bytes);
    s.stride = u32("scales' row stride", row_stride);
    s.batch = u32("scales' batch stride", mx ? batch_stride / 4 : batch_stride);
    u32("the scales' size", scale_rows * row_stride);
    return s;
}

BufferView Operands::vector(const char* name, const TensorView& view, DType dtype,
                            std::uint64_t elements, std::uint64_t alignment) const {
    require(view.dtype == dtype && view.rank == 1 && view.extent[0] == elements &&
                view.is_contiguous(),
            std::string(name) + " is " + describe(view) + ", wanted is " + to_string(dtype) + " [" +
                std::to_string(elements) + "]");
    require(static_cast<bool>(view.buffer), std::string(name) + " has no memory");
    require(view.buffer.offset % alignment == 0,
            std::string(name) + " begins at byte " + std::to_string(view.buffer.offset) +
                " of its buffer, not at a multiple of " + std::to_string(alignment));
    return view.buffer.sub(0, view.num_bytes());
}

std::uint32_t Operands::stride4(const Matrix& m) const {
    u32("a matrix's size in groups of 4", 2 * m.rows * m.stride8);
    return 2 * m.stride8;
}

void Operands::require_blocks(const char* name, const Recipe& recipe, Blocks blocks) const {
    require(recipe.blocks == blocks, std::string(name) + " have the recipe " + describe(recipe) +
                                         ", wanted are " + to_string(blocks) + " blocks");
}

BufferView Operands::row_count_or(const TensorView& view, BufferView otherwise) const {
    require(view.rows_per_count == 0, "one row count is taken, not one for each " +
                                          std::to_string(view.rows_per_count) + " rows");
    return view.row_counts_or(otherwise);
}

} // namespace bellows::fp8
