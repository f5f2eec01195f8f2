// SPDX-License-Identifier: MIT
// The placement of rows by expert: refusals, and the forms of the kernel that gathers.

#include "support/op_test.hpp"

#include <bellows/kernels/kernels.hpp>

#include <bit>
#include <tuple>

namespace bellows {
namespace {

using testing::OpTensor;

class OpsMoe : public testing::OpTest {};

TEST_F(OpsMoe, TooSmallACapacityIsRefused) {
    const std::uint64_t tokens = 10, top_k = 2, experts = 4;
    const std::uint32_t alignment = 8;
    const std::uint64_t capacity = ops::moe_capacity(tokens, top_k, experts, alignment);
    const OpTensor counts = result(DType::U32, {experts});
    const OpTensor offsets = result(DType::U32, {experts + 1});
    const OpTensor row_to_slot = result(DType::I32, {capacity});
    const OpTensor slot_to_row = result(DType::I32, {tokens, top_k});
    const Buffer scratch = workspace(ops::moe_layout_workspace_bytes(tokens, top_k, experts));
    const OpTensor ids = result(DType::I32, {tokens, top_k});
    ops::MoeLayout layout{counts, offsets, row_to_slot, slot_to_row, alignment};
    Recording recording(device(), QueueRole::Compute, "refused");
    layout.row_to_slot = row_to_slot.view.rows(0, capacity - 1);
    EXPECT_THROW(ops::moe_layout(recording, ids, layout, scratch.view()), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
    layout.row_to_slot = row_to_slot.view;
    ops::moe_layout(recording, ids, layout, scratch.view());
    EXPECT_GT(recording.num_operations(), 0u);
}

std::vector<std::uint32_t> bits(const std::vector<float>& values) {
    std::vector<std::uint32_t> words;
    for (const float value : values)
        words.push_back(std::bit_cast<std::uint32_t>(value));
    return words;
}

/// Blocks that are counted already are placed in one dispatch, with a value of each slot, as the
/// two of a layout and that of its scalars place them.
TEST_F(OpsMoe, CountedBlocksAndValuesArePlacedTheSame) {
    for (const std::uint64_t tokens : {300u, 1000u}) {
        const std::uint64_t top_k = 3, experts = 5, slots = tokens * top_k;
        const std::uint64_t capacity = ops::moe_capacity(tokens, top_k, experts, 8);
        std::vector<std::int64_t> chosen;
        for (std::uint64_t slot = 0; slot < slots; ++slot)
            chosen.push_back(static_cast<std::int64_t>(slot * slot % (experts + 2)) - 1);
        const OpTensor ids = tensor(DType::I32, {tokens, top_k}, chosen);
        const OpTensor values =
            tensor(DType::F32, {tokens, top_k}, random(DType::F32, slots, 2, 0.1, 1));
        const Buffer counts = workspace(ops::moe_layout_workspace_bytes(tokens, top_k, experts));
        const auto placed = [&](const auto& record) {
            const OpTensor rows = result(DType::U32, {experts}),
                           offsets = result(DType::U32, {experts + 1}),
                           row_to_slot = result(DType::I32, {capacity}),
                           slot_to_row = result(DType::I32, {tokens, top_k}),
                           of_rows = result(DType::F32, {capacity});
            run([&](Recording& r) {
                record(r, ops::MoeLayout{rows, offsets, row_to_slot, slot_to_row, 8}, of_rows);
            });
            const std::uint32_t used = read<std::uint32_t>(offsets).back();
            std::vector<float> some = read(of_rows);
            some.resize(used);
            return std::tuple(read<std::uint32_t>(rows), read<std::uint32_t>(offsets),
                              read<std::int32_t>(row_to_slot), read<std::int32_t>(slot_to_row),
                              some);
        };
        std::size_t alone = 0, together = 0;
        const auto expected =
            placed([&](Recording& r, const ops::MoeLayout& layout, const OpTensor& of_rows) {
                ops::moe_layout(r, ids, layout, counts.view());
                alone = r.num_operations();
                ops::moe_scalars_to_rows(r, values, layout, of_rows);
            });
        const auto counted =
            placed([&](Recording& r, const ops::MoeLayout& layout, const OpTensor& of_rows) {
                ops::moe_layout(r, ids, layout, counts.view(),
                                {.counted = true, .slot_values = values, .row_values = of_rows});
                together = r.num_operations();
            });
        EXPECT_EQ(counted, expected);
        EXPECT_EQ(together, 1u);
        EXPECT_EQ(alone, slots > 2048 ? 2u : 1u);
    }
}

/// Constants of MoeGather.
struct Form {
    std::uint32_t local_size, row_per_workgroup, wide, by_token, at_once = 4, parts = 1, slots = 8;
};

/// All that the form writes: rows of tokens, padding, and what stays as it was behind them.
TEST_F(OpsMoe, EveryFormGathersTheSame) {
    const std::uint64_t tokens = 75, top_k = 3, experts = 7, columns = 72;
    const std::uint64_t capacity = ops::moe_capacity(tokens, top_k, experts, 8);
    std::vector<std::int64_t> chosen;
    for (std::uint64_t slot = 0; slot < tokens * top_k; ++slot)
        chosen.push_back(slot % 5 == 0 ? -1 : static_cast<std::int64_t>((slot * slot) % experts));
    const OpTensor ids = tensor(DType::I32, {tokens, top_k}, chosen);
    const OpTensor weights =
        tensor(DType::F32, {tokens, top_k}, random(DType::F32, tokens * top_k, 2, 0.1, 1));
    const OpTensor counts = result(DType::U32, {experts}),
                   offsets = result(DType::U32, {experts + 1}),
                   row_to_slot = result(DType::I32, {capacity}),
                   slot_to_row = result(DType::I32, {tokens, top_k});
    const Buffer scratch = workspace(ops::moe_layout_workspace_bytes(tokens, top_k, experts));
    const ops::MoeLayout layout{counts, offsets, row_to_slot, slot_to_row, 8};
    run([&](Recording& r) { ops::moe_layout(r, ids, layout, scratch.view()); });
    for (const DType dtype : {DType::F32, DType::BF16})
        for (const bool weighted : {false, true}) {
            const OpTensor x = tensor(dtype, {tokens, columns}, random(dtype, tokens * columns, 1));
            const auto gathered = [&](const Form& form) {
                const OpTensor rows = result(dtype, {capacity, columns});
                using K = kernels::MoeGather;
                run([&](Recording& r) {
                    r.dispatch(
                        K{.variant = dtype == DType::BF16 ? K::Variant::bf16 : K::Variant::f32,
                          .constants = {form.local_size, form.row_per_workgroup, form.wide,
                                        form.by_token, form.at_once, form.slots},
                          .x = x.view.buffer,
                          .row_to_slot = layout.row_to_slot.buffer,
                          .slot_to_row = layout.slot_to_row.buffer,
                          .weights = weights.view.buffer,
                          .row_count = layout.row_count(),
                          .out_rows = rows.view.buffer,
                          .rows = static_cast<std::uint32_t>(capacity),
                          .tokens = static_cast<std::uint32_t>(tokens),
                          .units = static_cast<std::uint32_t>(columns / 4 / form.wide),
                          .top_k = static_cast<std::uint32_t>(top_k),
                          .has_weights = weighted ? 1u : 0u},
                        {11, form.parts});
                });
                return bits(read(rows));
            };
            const OpTensor expected = result(dtype, {capacity, columns});
            run([&](Recording& r) {
                ops::moe_gather(r, x, layout, weighted ? weights.view : TensorView{}, expected);
            });
            for (const Form& form :
                 {Form{8, 0, 1, 0}, Form{8, 0, 1, 1}, Form{8, 1, 1, 1}, Form{32, 1, 1, 0},
                  Form{32, 1, 1, 1}, Form{64, 1, 2, 1}, Form{8, 1, 1, 1, 2, 3},
                  Form{8, 1, 2, 1, 1, 2}, Form{8, 1, 1, 1, 4, 1, 1}, Form{8, 1, 1, 1, 4, 1, 2}}) {
                if (form.wide == 2 && dtype == DType::F32)
                    continue;
                SCOPED_TRACE(std::string(to_string(dtype)) + (weighted ? ", weighted, " : ", ") +
                             std::to_string(form.local_size) + " invocations" +
                             (form.by_token != 0 ? ", by token" : ""));
                EXPECT_EQ(gathered(form), bits(read(expected)));
            }
        }
}

/// Of tokens with more and fewer rows than an invocation loads at once, and without any.
TEST_F(OpsMoe, EveryFormSumsTheSame) {
    const std::uint64_t tokens = 21, experts = 12, columns = 72;
    for (const std::uint64_t top_k : {1u, 6u, 11u})
        for (const DType dtype : {DType::F32, DType::BF16})
            for (const bool weighted : {false, true}) {
                std::vector<std::int64_t> places;
                for (std::uint64_t slot = 0; slot < tokens * top_k; ++slot)
                    places.push_back(slot % 5 == 0 || slot / top_k == 3
                                         ? -1
                                         : static_cast<std::int64_t>(slot * 7 % experts));
                const OpTensor slot_to_row = tensor(DType::I32, {tokens, top_k}, places);
                const OpTensor rows =
                    tensor(dtype, {experts, columns}, random(dtype, experts * columns, 3));
                const OpTensor weights = tensor(DType::F32, {tokens, top_k},
                                                random(DType::F32, tokens * top_k, 4, 0.1, 1));
                const auto sums = [&](std::uint32_t ahead, std::uint32_t wide) {
                    const OpTensor x =
                        tensor(dtype, {tokens, columns}, random(dtype, tokens * columns, 5));
                    using K = kernels::MoeUnpermute;
                    const auto units = static_cast<std::uint32_t>(columns / 4 / wide);
                    run([&](Recording& r) {
                        r.dispatch(
                            K{.variant = dtype == DType::BF16 ? K::Variant::bf16 : K::Variant::f32,
                              .constants = {8, 1, wide, 0, ahead},
                              .rows = rows.view.buffer,
                              .slot_to_row = slot_to_row.view.buffer,
                              .topk_ids = slot_to_row.view.buffer,
                              .weights = weights.view.buffer,
                              .out_tokens = x.view.buffer,
                              .tokens = static_cast<std::uint32_t>(tokens),
                              .units = units,
                              .top_k = static_cast<std::uint32_t>(top_k),
                              .has_weights = weighted ? 1u : 0u,
                              .accumulate = 1},
                            ahead > 1 ? Groups{(units + 7) / 8, 5} : Groups{5});
                    });
                    return bits(read(x));
                };
                const auto expected = sums(1, 1);
                EXPECT_EQ(sums(8, 1), expected);
                EXPECT_EQ(sums(4, 1), expected);
                if (dtype == DType::BF16) {
                    EXPECT_EQ(sums(8, 2), expected);
                }
            }
}

} // namespace
} // namespace bellows
