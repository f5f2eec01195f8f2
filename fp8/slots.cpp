// SPDX-License-Identifier: MIT
#include "slots.hpp"

#include "operands.hpp"

#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::fp8 {

namespace {

/// A tensor of rows by words.
struct Rows {
    BufferView memory;
    std::uint64_t words = 0, ld = 0;
    bool half_row = false; ///< the last word is there by half
};

Rows rows_of(const Operands& operands, const char* name, const TensorView& view,
             std::uint64_t padding = 1) {
    const std::uint64_t element = size_of(view.dtype);
    const std::uint64_t row_bytes = round_up(view.extent[1], padding) * element;
    operands.require(view.stride[1] == 1 && view.stride[0] * element % 4 == 0 &&
                         view.buffer.offset % 4 == 0,
                     std::string(name) + " is " + describe(view) +
                         ", whose rows must begin at multiples of 4 bytes to be copied");
    return {view.buffer, div_up(row_bytes, 4), view.stride[0] * element / 4, row_bytes % 4 != 0};
}

/// share: 0 puts rows back.
void move(Recording& recording, const Operands& operands, const GroupedRows& grouped,
          const Rows& from, const Rows& to, std::uint32_t share, bool accumulate) {
    const ops::GroupTiles& list = grouped.tiles;
    const auto in_fours = [](const Rows& rows) {
        return rows.words % 4 == 0 && rows.ld % 4 == 0 && rows.memory.offset % 16 == 0;
    };
    const bool wide = share != 0 && !from.half_row && in_fours(from) && in_fours(to);
    recording.dispatch_indirect(
        kernels::Fp8MoveRows{
            .constants = {.local_size = recording.device().info().is_cpu ? 8u : 128u,
                          .wide = wide ? 1u : 0u},
            .tiles = list.tiles,
            .ends = list.rows.ends.buffer,
            .slots = grouped.slots.buffer,
            .source = from.memory,
            .result = to.memory,
            .tile_rows = list.tile_rows,
            .words = operands.u32("words of a row", from.words),
            .from_ld = operands.u32("words of a row", from.ld),
            .to_ld = operands.u32("words of a row", to.ld),
            .half_row = from.half_row ? 1u : 0u,
            .share = share,
            .accumulate = accumulate ? 1u : 0u},
        list.grid(list.columns[0], false));
}

bool has_row_scales(const Quantized& q) {
    return q.recipe.blocks == Blocks::Rows128 || q.recipe.blocks == Blocks::MX32;
}

std::uint64_t scale_words(const Quantized& q, std::uint64_t columns) {
    return has_row_scales(q) ? div_up(columns, 128) : 0;
}

std::uint64_t copy_bytes(const TensorView& like, std::uint64_t rows) {
    return round_up(rows * round_up(like.extent[1], 16) * size_of(like.dtype), 256);
}

/// Takes its memory from the front of `memory`.
BufferView take(BufferView& memory, std::uint64_t bytes) {
    const BufferView part = memory.sub(0, bytes);
    memory = memory.sub(bytes, memory.bytes - bytes);
    return part;
}

TensorView copy_of(const TensorView& like, std::uint64_t rows, BufferView& memory) {
    TensorView copy = like;
    copy.buffer = take(memory, copy_bytes(like, rows));
    copy.extent[0] = rows;
    copy.stride = {round_up(like.extent[1], 16), 1};
    return copy;
}

} // namespace

bool by_slots(const Product& p) {
    return p.rows != nullptr && (p.rows->slots_per_a_row != 0 || p.rows->d_by_slot ||
                                 p.rows->layout.form == GroupLayout::Form::Ids);
}

std::string why_not_copied(const Product& p) {
    if (p.rows->slots_per_a_row == 0 || !p.a.quantized || has_row_scales(*p.a.quantized) ||
        p.a.quantized->recipe.blocks == Blocks::PerTensor)
        return "";
    return "a's scales stand for several rows, which go into different groups";
}

Operand with_rows(const Operand& a, std::uint64_t rows) {
    Operand result = a;
    result.values.extent[0] = rows;
    if (result.quantized)
        result.quantized->codes.extent[0] = rows;
    return result;
}

std::uint64_t copies_bytes(const Operand& a, const Operand& b, std::uint64_t rows, bool of_d) {
    std::uint64_t bytes = copy_bytes(a.values, rows);
    if (a.quantized)
        bytes += round_up(4 * rows * scale_words(*a.quantized, a.values.extent[1]), 256);
    const std::uint64_t n = std::max(b.values.extent[1], b.values.extent[2]);
    return bytes + (of_d ? round_up(rows * round_up(n, 16) * 4, 256) : 0);
}

InGroups::InGroups(Recording& recording, const char* op, const Product& p, bool of_d,
                   BufferView memory)
    : op_(op), by_slots_(p), rows_(*p.rows), product_(p), of_d_(of_d && p.rows->d_by_slot) {
    const Operands operands(op);
    const std::uint64_t rows = rows_.layout.rows;
    rows_.slots_per_a_row = 0;
    if (of_d_ || !rows_.d_by_slot) {
        rows_.slots = {};
        rows_.d_by_slot = false;
    }
    product_.rows = &rows_;
    if (p.rows->slots_per_a_row != 0) {
        const auto gather = [&](const Rows& from, const Rows& to) {
            move(recording, operands, *p.rows, from, to, p.rows->slots_per_a_row, false);
        };
        const TensorView a = copy_of(p.a.values, rows, memory);
        const std::uint64_t padding = p.a.quantized ? 16 : 1;
        gather(rows_of(operands, "a", p.a.values, padding), rows_of(operands, "a", a, padding));
        product_.a.values = a;
        if (p.a.quantized)
            product_.a.quantized->codes = a;
        if (const std::uint64_t words =
                p.a.quantized ? scale_words(*p.a.quantized, a.extent[1]) : 0;
            words != 0) {
            TensorView& scales = product_.a.quantized->scales;
            const std::uint64_t each = 4 / size_of(scales.dtype); // in a word
            const Rows from{scales.buffer, words, scales.stride[0] / each};
            scales.buffer = take(memory, round_up(4 * rows * words, 256));
            scales.extent[0] = rows;
            scales.stride = {words * each, 1};
            gather(from, {scales.buffer, words, words});
        }
    }
    if (of_d_) {
        product_.d = copy_of(p.d, rows, memory);
        product_.accumulate = false;
    }
}

void InGroups::put_back(Recording& recording) const {
    if (!of_d_)
        return;
    const Operands operands(op_);
    move(recording, operands, *by_slots_.rows, rows_of(operands, "d", product_.d),
         rows_of(operands, "d", by_slots_.d), 0, by_slots_.accumulate);
}

} // namespace bellows::fp8
