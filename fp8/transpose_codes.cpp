// SPDX-License-Identifier: MIT
#include "operands.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::fp8 {

namespace {

Matrix codes_of(const Operands& operands, const char* name, const TensorView& codes) {
    const Format format = codes.dtype == DType::F8E5M2 ? Format::E5M2 : Format::E4M3;
    operands.require(!codes.row_count,
                     std::string(name) + " have a row count, which is not looked at");
    return operands.codes(name, {codes, {}, {.format = format}, {}}, true);
}

} // namespace

void transpose_codes(Recording& recording, const TensorView& codes, const TensorView& transposed) {
    const Operands operands("fp8::transpose_codes");
    const Matrix x = codes_of(operands, "the codes", codes),
                 y = codes_of(operands, "the transposed codes", transposed);
    operands.require(codes.dtype == transposed.dtype && codes.rank == transposed.rank &&
                         x.batch == y.batch && x.rows == y.columns && x.columns == y.rows,
                     "the codes are " + describe(codes) + ", the transposed codes " +
                         describe(transposed));
    if (x.empty())
        return;
    const bool cpu = recording.device().info().is_cpu;
    const std::uint32_t local_size = cpu ? 8 : 128, lanes_x = cpu ? 4 : 16;
    recording.dispatch(
        kernels::Fp8TransposeCodes{.constants = {.local_size = local_size, .lanes_x = lanes_x},
                                   .x = x.memory,
                                   .y = y.memory,
                                   .rows = operands.u32("rows", x.rows),
                                   .columns = operands.u32("columns", x.columns),
                                   .x_stride8 = x.stride8,
                                   .x_batch8 = x.batch8,
                                   .y_stride8 = y.stride8,
                                   .y_batch8 = y.batch8},
        {operands.grid("columns", div_up(x.columns, 4 * lanes_x)),
         operands.grid("rows", div_up(x.rows, 16 * (local_size / lanes_x))),
         operands.grid("the batch", x.batch)});
}

} // namespace bellows::fp8
