// SPDX-License-Identifier: MIT
#include "operands.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::fp8 {

namespace {

constexpr const char* kOp = "fp8::transpose_codes";

Matrix codes_of(const Operands& operands, const char* name, const TensorView& codes) {
    const Format format = codes.dtype == DType::F8E5M2 ? Format::E5M2 : Format::E4M3;
    operands.require(!codes.row_count,
                     std::string(name) + " have a row count, which is not looked at");
    return operands.codes(name, {codes, {}, {.format = format}, {}}, true);
}

void transpose(Recording& recording, const Operands& operands, const Matrix& x, const Matrix& y,
               std::uint64_t y_columns, std::uint32_t groups, BufferView group_offsets) {
    if (x.empty())
        return;
    const bool cpu = recording.device().info().is_cpu;
    const std::uint32_t local_size = cpu ? 8 : 128, lanes_x = cpu ? 4 : 16;
    const std::uint64_t units = div_up(y_columns, 16);
    recording.dispatch(
        kernels::Fp8TransposeCodes{.constants = {.local_size = local_size, .lanes_x = lanes_x},
                                   .x = x.memory,
                                   .group_offsets = group_offsets,
                                   .y = y.memory,
                                   .rows = operands.u32("rows", x.rows),
                                   .columns = operands.u32("columns", x.columns),
                                   .x_stride8 = x.stride8,
                                   .x_batch8 = x.batch8,
                                   .y_units = operands.u32("columns", units),
                                   .y_stride8 = y.stride8,
                                   .y_batch8 = y.batch8,
                                   .groups = groups},
        {operands.grid("columns", div_up(x.columns, 4 * lanes_x)),
         operands.grid("rows", div_up(units, std::uint64_t{local_size / lanes_x})),
         operands.grid("the batch", x.batch)});
}

} // namespace

void transpose_codes(Recording& recording, const TensorView& codes, const TensorView& transposed) {
    const Operands operands(kOp);
    const Matrix x = codes_of(operands, "the codes", codes),
                 y = codes_of(operands, "the transposed codes", transposed);
    operands.require(codes.dtype == transposed.dtype && codes.rank == transposed.rank &&
                         x.batch == y.batch && x.rows == y.columns && x.columns == y.rows,
                     "the codes are " + describe(codes) + ", the transposed codes " +
                         describe(transposed));
    transpose(recording, operands, x, y, x.rows, 0, x.memory);
}

void transpose_codes(Recording& recording, const Quantized& columns, const TensorView& transposed) {
    const Operands operands(kOp);
    operands.require_blocks("the codes", columns.recipe, Blocks::Columns128);
    const Matrix x = codes_of(operands, "the codes", columns.codes),
                 y = codes_of(operands, "the transposed codes", transposed);
    const std::uint32_t groups = operands.groups(columns);
    const Shape shape = transposed_shape(columns.recipe, {x.rows, x.columns}, groups);
    operands.require(x.batch == 1 && columns.codes.dtype == transposed.dtype &&
                         y.rows == shape.extent[0] && y.columns == shape.extent[1],
                     "the codes are " + describe(columns.codes) + ", the transposed codes " +
                         describe(transposed) + ", wanted are [" + std::to_string(shape.extent[0]) +
                         ", " + std::to_string(shape.extent[1]) + "]");
    transpose(recording, operands, x, y, y.columns, groups,
              operands.group_offsets_or(columns, x.memory));
}

} // namespace bellows::fp8
