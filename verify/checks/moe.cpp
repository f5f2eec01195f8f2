// SPDX-License-Identifier: MIT
// The placement of rows by expert, and their movement there and back with its gradients.
#include "verify/checks/families.hpp"

#include "verify/reference/router.hpp"

#include <bellows/engine/ops.hpp>

#include <algorithm>

namespace bellows::checks {

namespace {

using reference::to_double;

struct MoeCase {
    std::uint64_t tokens, top_k, experts, columns;
    std::uint32_t alignment;
    int absent_percent; ///< slots that are not here
    Depth depth = Depth::Quick;
};

constexpr auto kMoeCases = std::to_array<MoeCase>({
    {1, 1, 1, 4, 1, 0},
    {5, 2, 3, 8, 4, 20},
    {77, 3, 7, 20, 1, 30},
    {300, 6, 8, 40, 16, 25},
    {11, 2, 64, 12, 128, 50},
    {6, 2, 4, 8, 16, 100},
    {40, 3, 301, 8, 4, 10},
    {1500, 3, 130, 4, 1, 5}, // more slots than a workgroup places
    {4500, 4, 5, 4, 8, 10},
    {300, 2, 8, 36, 16, 0, Depth::Full},
    {9000, 4, 5, 4, 8, 10, Depth::Full},
});

struct MoeTensors {
    MoeTensors(const OpRig& rig, const MoeCase& c)
        : counts(rig.result(DType::U32, {c.experts})),
          offsets(rig.result(DType::U32, {c.experts + 1})),
          row_to_slot(rig.result(DType::I32,
                                 {ops::moe_capacity(c.tokens, c.top_k, c.experts, c.alignment)})),
          slot_to_row(rig.result(DType::I32, {c.tokens, c.top_k})),
          workspace(rig.workspace(ops::moe_layout_workspace_bytes(c.tokens, c.top_k, c.experts))),
          layout{counts, offsets, row_to_slot, slot_to_row, c.alignment} {}

    OpTensor counts, offsets, row_to_slot, slot_to_row;
    Buffer workspace;
    ops::MoeLayout layout;
};

std::string describe(const MoeCase& c) {
    return std::to_string(c.tokens) + " tokens, top " + std::to_string(c.top_k) + " of " +
           std::to_string(c.experts) + ", alignment " + std::to_string(c.alignment);
}

std::vector<std::int32_t> some_experts(const MoeCase& c) {
    auto ids = reference::random_indices(c.tokens * c.top_k, 11, c.experts);
    const auto absent = reference::random_indices(ids.size(), 12, 100);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = absent[i] < c.absent_percent ? -1 : ids[i];
    return ids;
}

/// The tensors of a layout against the reference's, each exactly.
void compare_layout(Check& check, const char* part, const OpRig& rig, const MoeTensors& t,
                    const reference::Permutation& expected) {
    check.exact(part, rig.read<std::uint64_t>(t.counts), expected.counts);
    check.exact(part, rig.read<std::uint64_t>(t.offsets), expected.starts);
    check.exact(part, rig.read<std::int64_t>(t.slot_to_row), expected.row_of_slot);
    std::vector<std::int64_t> slot_of_row(t.row_to_slot.view.extent[0], -1);
    for (std::size_t slot = 0; slot < expected.row_of_slot.size(); ++slot)
        if (const std::int64_t row = expected.row_of_slot[slot]; row >= 0)
            slot_of_row[static_cast<std::size_t>(row)] = static_cast<std::int64_t>(slot);
    check.exact(part, rig.read<std::int64_t>(t.row_to_slot), slot_of_row);
}

/// The placement of all tokens, and of half of them by a count on the device.
void check_placement(Check& check, const OpRig& rig, const MoeCase& c) {
    check.begin_case(describe(c));
    auto ids = some_experts(c);
    const std::uint64_t half = c.tokens / 2;
    const OpTensor ids_t = rig.tensor(DType::I32, {c.tokens, c.top_k}, ids);
    const OpTensor count = rig.tensor(DType::U32, {1}, std::vector<std::uint64_t>{half});
    const MoeTensors all(rig, c), part(rig, c);
    rig.run([&](Recording& recording) {
        ops::moe_layout(recording, ids_t, all.layout, all.workspace.view());
        ops::moe_layout(recording, ids_t.view.with_row_count(count.view.buffer), part.layout,
                        part.workspace.view());
    });
    compare_layout(check, "all tokens", rig, all,
                   reference::make_permutation(ids, c.top_k, c.experts, c.alignment));
    std::fill(ids.begin() + static_cast<std::ptrdiff_t>(half * c.top_k), ids.end(), -1);
    compare_layout(check, "half of the tokens", rig, part,
                   reference::make_permutation(ids, c.top_k, c.experts, c.alignment));
}

void check_rows(Check& check, const OpRig& rig, DType dtype, const MoeCase& c) {
    check.begin_case(describe(c));
    const auto ids = some_experts(c);
    const auto permutation = reference::make_permutation(ids, c.top_k, c.experts, c.alignment);
    const std::uint64_t capacity = ops::moe_capacity(c.tokens, c.top_k, c.experts, c.alignment);
    const auto x = OpRig::random(dtype, c.tokens * c.columns, 1);
    const auto y = OpRig::random(dtype, capacity * c.columns, 2);
    const auto before = OpRig::random(dtype, c.tokens * c.columns, 3);
    const auto weights = reference::random_f32(c.tokens * c.top_k, 4, 0, 1);
    const OpTensor ids_t = rig.tensor(DType::I32, {c.tokens, c.top_k}, ids);
    const OpTensor x_t = rig.tensor(dtype, {c.tokens, c.columns}, x);
    const OpTensor y_t = rig.tensor(dtype, {capacity, c.columns}, y);
    const OpTensor weights_t = rig.tensor(DType::F32, {c.tokens, c.top_k}, weights);
    const OpTensor rows = rig.result(dtype, {capacity, c.columns});
    const OpTensor d_rows = rig.result(dtype, {capacity, c.columns});
    const OpTensor plain = rig.result(dtype, {c.tokens, c.columns});
    const OpTensor added = rig.tensor(dtype, {c.tokens, c.columns}, before);
    const OpTensor tree = rig.tensor(dtype, {c.tokens, c.columns}, before);
    const OpTensor d_weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor row_weights = rig.result(DType::F32, {capacity});
    const OpTensor slot_weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const MoeTensors t(rig, c);
    rig.run([&](Recording& recording) {
        ops::moe_layout(recording, ids_t, t.layout, t.workspace.view());
        ops::moe_gather(recording, x_t, t.layout, {}, rows);
        ops::moe_gather(recording, x_t, t.layout, weights_t, d_rows);
        ops::moe_unpermute(recording, y_t, t.layout, {}, plain, false);
        ops::moe_unpermute(recording, y_t, t.layout, weights_t, added, true);
        ops::moe_unpermute(recording, y_t, t.layout, weights_t, tree, true, ids_t);
        ops::moe_weights_dgrad(recording, y_t, t.layout, x_t, d_weights);
        ops::moe_scalars_to_rows(recording, weights_t, t.layout, row_weights);
        ops::moe_scalars_to_slots(recording, row_weights, t.layout, slot_weights);
    });

    const std::uint64_t used = permutation.rows();
    const auto head = [&](const char* part, const OpTensor& tensor) {
        const TensorView existing = tensor.view.rows(0, used);
        check.untouched(part, rig.outside(tensor, existing));
        return rig.read(existing);
    };
    const auto xd = to_double(x), wd = to_double(weights);
    auto yd = to_double(y);
    yd.resize(used * c.columns);
    check.exact("gather", head("gather", rows), reference::permute(xd, permutation, c.columns));
    const auto expected = reference::unpermute_input_grad(xd, yd, wd, permutation, c.columns);
    check.elements("gather with weights", head("gather with weights", d_rows), expected.drows,
                   {used, c.columns}, storage_bound(dtype, 1));
    const auto terms = static_cast<double>(c.top_k), columns = static_cast<double>(c.columns);
    check.elements("unpermute", rig.read(plain),
                   reference::unpermute(yd, {}, permutation, c.columns), {c.tokens, c.columns},
                   storage_bound(dtype, terms, terms));
    auto sum = reference::unpermute(yd, wd, permutation, c.columns);
    reference::accumulate(sum, to_double(before));
    check.elements("unpermute along a tree", rig.read(tree), sum, {c.tokens, c.columns},
                   storage_bound(dtype, terms + 1, terms + 1));
    check.elements("unpermute", rig.read(added), sum, {c.tokens, c.columns},
                   storage_bound(dtype, terms + 1, terms + 1));
    check.elements("gradient of the weights", rig.read(d_weights), expected.dweights,
                   {c.tokens, c.top_k}, storage_bound(DType::F32, columns, columns));
    std::vector<float> present = weights;
    for (std::size_t i = 0; i < present.size(); ++i)
        present[i] = ids[i] < 0 ? 0.0f : present[i];
    check.exact("scalars", rig.read(slot_weights), present);
}

} // namespace

void add_moe_checks(std::vector<OpCheck>& checks, Depth depth) {
    checks.push_back({"ops", "moe placement", [depth](Check& check, const OpRig& rig) {
                          for (const MoeCase& c : kMoeCases)
                              if (c.depth <= depth)
                                  check_placement(check, rig, c);
                      }});
    add_table(checks, depth, "moe rows", kMoeCases, check_rows);
}

} // namespace bellows::checks
