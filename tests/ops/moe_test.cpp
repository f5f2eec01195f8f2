// SPDX-License-Identifier: MIT
// The placement of rows by expert: refusals.

#include "support/op_test.hpp"

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

} // namespace
} // namespace bellows
