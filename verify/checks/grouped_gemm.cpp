// SPDX-License-Identifier: MIT
// Grouped matrix products, forward and both gradients: empty groups, tails, mixed storage.
#include "verify/checks/families.hpp"
#include "verify/checks/product_bound.hpp"

#include <bellows/engine/gemm.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;
using reference::Vector;

struct Groups {
    std::vector<std::uint32_t> rows; ///< per group
    std::uint64_t n, k;
    Depth depth = Depth::Quick;
};

const std::vector<Groups>& group_cases() {
    static const std::vector<Groups> cases = {
        {{1}, 4, 4},
        {{0, 0, 0}, 8, 12},
        {{5, 0, 33, 1, 0, 64}, 36, 20},
        {{17, 100, 0, 3}, 13, 9},
        {{17, 100, 0, 3}, 14, 10},
        {{0, 16, 48, 7}, 64, 40},
        {{1, 0, 130, 40, 0}, 136, 72, Depth::Full},
    };
    return cases;
}

/// The rows' products, forward, input gradient and weight gradient, group by group.
struct Expected {
    Vector y, dx, dw;
};

Expected expected_of(const Groups& c, const Vector& x, const Vector& dy, const Vector& w) {
    Expected expected;
    const auto append = [](Vector& to, const Vector& from) {
        to.insert(to.end(), from.begin(), from.end());
    };
    std::size_t first = 0;
    for (std::size_t g = 0; g < c.rows.size(); ++g) {
        const std::size_t rows = c.rows[g];
        const auto xg = reference::View(x).subspan(first * c.k, rows * c.k);
        const auto dyg = reference::View(dy).subspan(first * c.n, rows * c.n);
        const auto wg = reference::View(w).subspan(g * c.n * c.k, c.n * c.k);
        append(expected.y, reference::gemm_nt(xg, wg, rows, c.n, c.k));
        append(expected.dx, reference::gemm_nn(dyg, wg, rows, c.k, c.n));
        append(expected.dw, reference::gemm_tn(dyg, xg, c.n, c.k, rows));
        first += rows;
    }
    return expected;
}

void check_groups(Check& check, const OpRig& rig, const Groups& c, DType act, DType weight) {
    const std::uint64_t groups = c.rows.size(), capacity = 256;
    check.begin_case(std::to_string(groups) + " groups, N " + std::to_string(c.n) + ", K " +
                     std::to_string(c.k));
    std::vector<std::uint32_t> offsets(groups + 1, 0);
    for (std::size_t g = 0; g < groups; ++g)
        offsets[g + 1] = offsets[g] + c.rows[g];
    const std::uint64_t rows = offsets.back();
    const auto x_values = OpRig::random(act, rows * c.k, 1);
    const auto dy_values = OpRig::random(act, rows * c.n, 2);
    const auto w_values = OpRig::random(weight, groups * c.n * c.k, 3);
    // What stands behind the rows is NaN and must neither be used nor change.
    const OpTensor x = rig.result(act, {capacity, c.k}), dy = rig.result(act, {capacity, c.n});
    rig.write(x.view.rows(0, rows), x_values);
    rig.write(dy.view.rows(0, rows), dy_values);
    const OpTensor w = rig.tensor(weight, {groups, c.n, c.k}, w_values);
    const OpTensor offsets_t = rig.tensor(DType::U32, {groups + 1}, offsets);
    const OpTensor y = rig.result(act, {capacity, c.n}), dx = rig.result(act, {capacity, c.k});
    const OpTensor dw = rig.result(DType::F32, {groups, c.n, c.k});
    const Buffer scratch = rig.workspace(ops::group_tiles_bytes(rig.device(), capacity, groups));
    rig.run([&](Recording& recording) {
        const ops::GroupTiles tiles =
            ops::make_group_tiles(recording, offsets_t, capacity, {c.n, c.k, 0, 0}, scratch.view());
        ops::grouped_gemm_nt(recording, x, w, y, tiles);
        ops::grouped_gemm_nn(recording, dy, w, dx, tiles);
        ops::grouped_gemm_tn(recording, dy, x, dw, offsets_t);
    });
    const Vector xd = to_double(x_values), dyd = to_double(dy_values), wd = to_double(w_values);
    const Expected expected = expected_of(c, xd, dyd, wd);
    const Expected magnitudes =
        expected_of(c, reference::absolute(xd), reference::absolute(dyd), reference::absolute(wd));
    const TensorView y_rows = y.view.rows(0, rows), dx_rows = dx.view.rows(0, rows);
    check.elements("forward (nt)", rig.read(y_rows), expected.y, {rows, c.n},
                   product_bound(c.k, magnitudes.y, act));
    check.elements("input gradient (nn)", rig.read(dx_rows), expected.dx, {rows, c.k},
                   product_bound(c.n, magnitudes.dx, act));
    check.elements("weight gradient (tn)", rig.read(dw), expected.dw, {groups, c.n, c.k},
                   product_bound(rows, magnitudes.dw, DType::F32));
    check.untouched("forward (nt)", rig.outside(y, y_rows));
    check.untouched("input gradient (nn)", rig.outside(dx, dx_rows));
}

/// Rows of bf16 begin at words.
bool fits(const Groups& c, DType act) {
    return act == DType::F32 || (c.n % 2 == 0 && c.k % 2 == 0);
}

} // namespace

void add_grouped_gemm_checks(std::vector<OpCheck>& checks, Depth depth) {
    const auto add = [&](std::string name, DType act, DType weight) {
        checks.push_back({.group = "ops",
                          .what = std::move(name),
                          .body =
                              [=](Check& check, const OpRig& rig) {
                                  for (const Groups& groups : group_cases())
                                      if (groups.depth <= depth && fits(groups, act))
                                          check_groups(check, rig, groups, act, weight);
                              },
                          .depends_on_gemm_class = weight == DType::BF16});
    };
    for (const DType dtype : {DType::F32, DType::BF16})
        add(with_storage("grouped gemm", dtype), dtype, dtype);
    if (depth == Depth::Full)
        add("grouped gemm bf16 by f32", DType::BF16, DType::F32);
}

} // namespace bellows::checks
