// SPDX-License-Identifier: MIT
// MoE permutation against the f64 reference: the placement exactly, the movement of rows and its
// gradients within one rounding of the storage type.

#include "reference/router.hpp"
#include "support/op_test.hpp"

#include <numeric>

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct MoeCase {
    const char* name;
    std::uint64_t tokens, top_k, experts, columns;
    std::uint32_t alignment;
    int absent_percent; ///< slots that are not here
    DType dtype;
};

const MoeCase kMoeCases[] = {
    {"one_row", 1, 1, 1, 4, 1, 0, DType::F32},
    {"tiny", 5, 2, 3, 8, 4, 20, DType::F32},
    {"odd", 77, 3, 7, 20, 1, 30, DType::F32},
    {"several_blocks", 300, 2, 8, 36, 16, 0, DType::F32},
    {"large_blocks", 9000, 4, 5, 4, 8, 10, DType::F32},
    {"empty_experts", 11, 2, 64, 12, 128, 50, DType::F32},
    {"nothing_here", 6, 2, 4, 8, 16, 100, DType::F32},
    {"tiny_bf16", 5, 2, 3, 8, 4, 20, DType::BF16},
    {"several_blocks_bf16", 300, 6, 8, 40, 16, 25, DType::BF16},
};

class OpsMoe : public testing::OpTest, public ::testing::WithParamInterface<MoeCase> {
protected:
    struct Layout {
        OpTensor counts, offsets, row_to_slot, slot_to_row;
        Buffer workspace;
        ops::MoeLayout layout;
    };
    static Layout make_layout(std::uint64_t tokens, std::uint64_t top_k, std::uint64_t experts,
                              std::uint32_t alignment) {
        Layout l;
        l.counts = result(DType::U32, {experts});
        l.offsets = result(DType::U32, {experts + 1});
        l.row_to_slot = result(DType::I32, {ops::moe_capacity(tokens, top_k, experts, alignment)});
        l.slot_to_row = result(DType::I32, {tokens, top_k});
        l.workspace = workspace(ops::moe_layout_workspace_bytes(tokens, top_k, experts));
        l.layout = {l.counts, l.offsets, l.row_to_slot, l.slot_to_row, alignment};
        return l;
    }
    static std::vector<std::int32_t> random_ids(const MoeCase& c) {
        auto ids = test::random_indices(c.tokens * c.top_k, 11, c.experts);
        const auto absent = test::random_indices(ids.size(), 12, 100);
        for (std::size_t i = 0; i < ids.size(); ++i) {
            ids[i] = absent[i] < c.absent_percent ? -1 : ids[i];
        }
        return ids;
    }
    static void expect_layout(const Layout& l, const reference::Permutation& expected) {
        EXPECT_EQ(read<std::uint64_t>(l.counts), expected.counts);
        EXPECT_EQ(read<std::uint64_t>(l.offsets), expected.starts);
        EXPECT_EQ(read<std::int64_t>(l.slot_to_row), expected.row_of_slot);
        std::vector<std::int64_t> slot_of_row(l.row_to_slot.view.extent[0], -1);
        for (std::size_t slot = 0; slot < expected.row_of_slot.size(); ++slot) {
            if (expected.row_of_slot[slot] >= 0) {
                slot_of_row[static_cast<std::size_t>(expected.row_of_slot[slot])] =
                    static_cast<std::int64_t>(slot);
            }
        }
        EXPECT_EQ(read<std::int64_t>(l.row_to_slot), slot_of_row);
    }
};

TEST_P(OpsMoe, PlacementIsTheReferences) {
    const MoeCase c = GetParam();
    const auto ids = random_ids(c);
    const OpTensor ids_t = tensor(DType::I32, {c.tokens, c.top_k}, ids);
    const Layout l = make_layout(c.tokens, c.top_k, c.experts, c.alignment);
    run([&](Recording& recording) {
        ops::moe_layout(recording, ids_t, l.layout, l.workspace.view());
    });
    expect_layout(l, reference::make_permutation(ids, c.top_k, c.experts, c.alignment));
}

TEST_P(OpsMoe, TokenCountOnTheDeviceCutsTheRest) {
    const MoeCase c = GetParam();
    auto ids = random_ids(c);
    const std::uint64_t tokens = c.tokens / 2;
    OpTensor ids_t = tensor(DType::I32, {c.tokens, c.top_k}, ids);
    const OpTensor count = tensor(DType::U32, {1}, std::vector<std::uint64_t>{tokens});
    const Layout l = make_layout(c.tokens, c.top_k, c.experts, c.alignment);
    run([&](Recording& recording) {
        ops::moe_layout(recording, ids_t.view.with_row_count(count.view.buffer), l.layout,
                        l.workspace.view());
    });
    std::fill(ids.begin() + static_cast<std::ptrdiff_t>(tokens * c.top_k), ids.end(), -1);
    expect_layout(l, reference::make_permutation(ids, c.top_k, c.experts, c.alignment));
}

TEST_P(OpsMoe, RowsGoThereAndBack) {
    const MoeCase c = GetParam();
    const auto ids = random_ids(c);
    const auto permutation = reference::make_permutation(ids, c.top_k, c.experts, c.alignment);
    const std::uint64_t capacity = ops::moe_capacity(c.tokens, c.top_k, c.experts, c.alignment);
    const auto x = random(c.dtype, c.tokens * c.columns, 1);
    const auto y = random(c.dtype, capacity * c.columns, 2);
    const auto before = random(c.dtype, c.tokens * c.columns, 3);
    const auto weights = test::random_f32(c.tokens * c.top_k, 4, 0, 1);
    const OpTensor ids_t = tensor(DType::I32, {c.tokens, c.top_k}, ids);
    const OpTensor x_t = tensor(c.dtype, {c.tokens, c.columns}, x);
    const OpTensor y_t = tensor(c.dtype, {capacity, c.columns}, y);
    const OpTensor weights_t = tensor(DType::F32, {c.tokens, c.top_k}, weights);
    const OpTensor rows = result(c.dtype, {capacity, c.columns});
    const OpTensor d_rows = result(c.dtype, {capacity, c.columns});
    const OpTensor plain = result(c.dtype, {c.tokens, c.columns});
    const OpTensor added = tensor(c.dtype, {c.tokens, c.columns}, before);
    const OpTensor d_weights = result(DType::F32, {c.tokens, c.top_k});
    const OpTensor row_weights = result(DType::F32, {capacity});
    const OpTensor slot_weights = result(DType::F32, {c.tokens, c.top_k});
    const Layout l = make_layout(c.tokens, c.top_k, c.experts, c.alignment);
    run([&](Recording& recording) {
        ops::moe_layout(recording, ids_t, l.layout, l.workspace.view());
        ops::moe_gather(recording, x_t, l.layout, {}, rows);
        ops::moe_gather(recording, x_t, l.layout, weights_t, d_rows);
        ops::moe_unpermute(recording, y_t, l.layout, {}, plain, false);
        ops::moe_unpermute(recording, y_t, l.layout, weights_t, added, true);
        ops::moe_weights_dgrad(recording, y_t, l.layout, x_t, d_weights);
        ops::moe_scalars_to_rows(recording, weights_t, l.layout, row_weights);
        ops::moe_scalars_to_slots(recording, row_weights, l.layout, slot_weights);
    });

    const std::uint64_t used = permutation.rows();
    const auto head = [&](std::vector<float> values) {
        for (std::size_t i = used * c.columns; i < values.size(); ++i) {
            EXPECT_TRUE(testing::untouched(values[i])) << "element " << i << " behind the rows";
        }
        values.resize(used * c.columns);
        return values;
    };
    const auto xd = to_double(x), wd = to_double(weights);
    auto yd = to_double(y);
    yd.resize(used * c.columns);
    EXPECT_TRUE(elements_match(head(read(rows)), reference::permute(xd, permutation, c.columns),
                               {used, c.columns}, test::within(0, 0)));
    const auto expected = reference::unpermute_input_grad(xd, yd, wd, permutation, c.columns);
    EXPECT_TRUE(elements_match(head(read(d_rows)), expected.drows, {used, c.columns},
                               storage_bound(c.dtype, 1)));
    const auto terms = static_cast<double>(c.top_k);
    EXPECT_TRUE(elements_match(read(plain), reference::unpermute(yd, {}, permutation, c.columns),
                               {c.tokens, c.columns}, storage_bound(c.dtype, terms, terms)));
    auto sum = reference::unpermute(yd, wd, permutation, c.columns);
    reference::accumulate(sum, to_double(before));
    EXPECT_TRUE(elements_match(read(added), sum, {c.tokens, c.columns},
                               storage_bound(c.dtype, terms + 1, terms + 1)));
    EXPECT_TRUE(elements_match(
        read(d_weights), expected.dweights, {c.tokens, c.top_k},
        storage_bound(DType::F32, static_cast<double>(c.columns), static_cast<double>(c.columns))));
    std::vector<float> present = weights;
    for (std::size_t i = 0; i < present.size(); ++i) {
        present[i] = ids[i] < 0 ? 0.0f : present[i];
    }
    EXPECT_EQ(read(slot_weights), present);
}

INSTANTIATE_TEST_SUITE_P(Table, OpsMoe, ::testing::ValuesIn(kMoeCases),
                         [](const auto& test) { return std::string(test.param.name); });

using OpsMoeRules = OpsMoe;

TEST_F(OpsMoeRules, TooSmallACapacityIsRefused) {
    Layout l = make_layout(10, 2, 4, 8);
    l.layout.row_to_slot = l.layout.row_to_slot.rows(0, 24);
    const OpTensor ids = result(DType::I32, {10, 2});
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::moe_layout(recording, ids, l.layout, l.workspace.view()), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
