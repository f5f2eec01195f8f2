// SPDX-License-Identifier: MIT
// Dense and grouped matrix products: odd sizes, tails, gaps between rows, batches, accumulation,
// empty groups.
#include "app/selftest/suite.hpp"

#include "reference/gemm.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>

#include <array>

namespace bellows::selftest {

namespace {

using reference::to_double;
using reference::Vector;

enum class Form : std::uint8_t { Nt, Nn, Tn };

struct Shape {
    std::uint64_t batch, m, n, k, gap; ///< gap: elements between rows that are not the matrix's
    bool accumulate;
};

constexpr std::array<Shape, 8> kShapes = {{{0, 1, 1, 1, 0, false},
                                           {0, 3, 5, 7, 1, true},
                                           {0, 33, 31, 65, 0, false},
                                           {0, 96, 64, 80, 0, false},
                                           {0, 17, 40, 128, 4, true},
                                           {0, 130, 36, 20, 8, false},
                                           {3, 9, 12, 16, 4, false},
                                           {0, 40, 8, 0, 0, false}}};

/// [batch,] rows, columns of rows that are `gap` longer (an even number for bf16).
OpTensor matrix(const OpRig& rig, DType dtype, std::uint64_t batch, std::uint64_t rows,
                std::uint64_t columns, std::uint64_t gap) {
    std::uint64_t ld = columns + gap;
    ld += dtype == DType::BF16 ? ld % 2 : 0;
    OpTensor whole = rig.result(dtype, {std::max<std::uint64_t>(batch, 1), rows, ld});
    whole.view = ops::slice(whole.view, 2, 0, columns);
    if (batch == 0) {
        whole.view.rank = 2;
        whole.view.extent = {rows, columns, 0, 0};
        whole.view.stride = {ld, 1, 0, 0};
    }
    return whole;
}

Vector product(Form form, reference::View a, reference::View b, const Shape& s) {
    return form == Form::Nt   ? reference::gemm_nt(a, b, s.m, s.n, s.k)
           : form == Form::Nn ? reference::gemm_nn(a, b, s.m, s.n, s.k)
                              : reference::gemm_tn(a, b, s.m, s.n, s.k);
}

/// The sums' error by the magnitudes of their terms, and one rounding to the result's storage.
auto product_bound(std::uint64_t terms, Vector magnitudes, DType storage) {
    return reference::sum_bound(terms + 2, std::move(magnitudes),
                                storage == DType::BF16 ? 1.01 * reference::kBf16Epsilon
                                                       : reference::kF32Epsilon);
}

double most_diff(DType storage) {
    return storage == DType::BF16 ? 1.5e-5 : 1e-9;
}

void check_shape(Check& check, const OpRig& rig, Form form, const Shape& s, DType operands,
                 DType to) {
    const std::uint64_t batches = std::max<std::uint64_t>(s.batch, 1);
    check.begin_case(std::to_string(batches) + " x " + std::to_string(s.m) + " x " +
                     std::to_string(s.n) + " x " + std::to_string(s.k) + " to " +
                     bellows::to_string(to));
    const auto a = OpRig::random(operands, batches * s.m * s.k, 1 + s.m);
    const auto b = OpRig::random(operands, batches * s.n * s.k, 2 + s.n);
    const auto before = OpRig::random(to, batches * s.m * s.n, 3);
    const bool a_by_k = form == Form::Tn, b_by_n = form == Form::Nt;
    const OpTensor a_t =
        matrix(rig, operands, s.batch, a_by_k ? s.k : s.m, a_by_k ? s.m : s.k, s.gap);
    const OpTensor b_t =
        matrix(rig, operands, s.batch, b_by_n ? s.n : s.k, b_by_n ? s.k : s.n, s.gap);
    const OpTensor d_t = matrix(rig, to, s.batch, s.m, s.n, s.gap);
    rig.write(a_t.view, a);
    rig.write(b_t.view, b);
    if (s.accumulate)
        rig.write(d_t.view, before);
    constexpr float kAlpha = 0.75f;
    rig.run([&](Recording& recording) {
        const auto op = form == Form::Nt   ? ops::gemm_nt
                        : form == Form::Nn ? ops::gemm_nn
                                           : ops::gemm_tn;
        op(recording, a_t, b_t, d_t, s.accumulate, kAlpha);
    });
    Vector expected, magnitudes;
    const Vector ad = to_double(a), bd = to_double(b);
    const Vector aa = reference::absolute(ad), ba = reference::absolute(bd);
    for (std::uint64_t i = 0; i < batches; ++i) {
        const auto part = [&](const Vector& all, std::uint64_t size) {
            return reference::View(all).subspan(i * size, size);
        };
        for (const double value : product(form, part(ad, s.m * s.k), part(bd, s.n * s.k), s))
            expected.push_back(kAlpha * value);
        for (const double value : product(form, part(aa, s.m * s.k), part(ba, s.n * s.k), s))
            magnitudes.push_back(kAlpha * value);
    }
    if (s.accumulate) {
        reference::accumulate(expected, to_double(before));
        reference::accumulate(magnitudes, reference::absolute(to_double(before)));
    }
    const auto actual = rig.read(d_t);
    check.number("whole matrix", reference::calc_diff(actual, expected), 0, most_diff(to));
    check.elements("elements", actual, expected, {batches, s.m, s.n},
                   product_bound(s.k, magnitudes, to));
    const std::uint64_t ld = d_t.view.stride[d_t.view.rank - 2];
    const auto all = rig.read(TensorView::contiguous(d_t.buffer.view(), to, {batches * s.m, ld}));
    for (std::size_t i = 0; i < all.size(); ++i)
        if (i % ld >= s.n && !untouched(all[i]))
            check.that("gaps", false, "column " + std::to_string(i % ld) + " of D was written");
}

void check_form(Check& check, const OpRig& rig, Form form, DType dtype) {
    for (const Shape& shape : kShapes) {
        check_shape(check, rig, form, shape, dtype, dtype);
        if (dtype == DType::BF16) // as weight gradients and logits are kept
            check_shape(check, rig, form, shape, dtype, DType::F32);
    }
}

struct Groups {
    std::vector<std::uint32_t> rows; ///< per group
    std::uint64_t n, k;
};

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

void check_groups(Check& check, const OpRig& rig, const Groups& c, DType dtype) {
    const std::uint64_t groups = c.rows.size(), capacity = 256;
    check.begin_case(std::to_string(groups) + " groups, N " + std::to_string(c.n) + ", K " +
                     std::to_string(c.k));
    std::vector<std::uint32_t> offsets(groups + 1, 0);
    for (std::size_t g = 0; g < groups; ++g)
        offsets[g + 1] = offsets[g] + c.rows[g];
    const std::uint64_t rows = offsets.back();
    const auto x_values = OpRig::random(dtype, rows * c.k, 1);
    const auto dy_values = OpRig::random(dtype, rows * c.n, 2);
    const auto w_values = OpRig::random(dtype, groups * c.n * c.k, 3);
    // What stands behind the rows is NaN and must neither be used nor change.
    const OpTensor x = rig.result(dtype, {capacity, c.k}), dy = rig.result(dtype, {capacity, c.n});
    rig.write(x.view.rows(0, rows), x_values);
    rig.write(dy.view.rows(0, rows), dy_values);
    const OpTensor w = rig.tensor(dtype, {groups, c.n, c.k}, w_values);
    const OpTensor offsets_t = rig.tensor(DType::U32, {groups + 1}, offsets);
    const OpTensor y = rig.result(dtype, {capacity, c.n}), dx = rig.result(dtype, {capacity, c.k});
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
    const auto head = [&](std::vector<float> values, std::uint64_t columns) {
        values.resize(rows * columns);
        return values;
    };
    const auto all_y = rig.read(y), all_dx = rig.read(dx);
    check.elements("forward (nt)", head(all_y, c.n), expected.y, {rows, c.n},
                   product_bound(c.k, magnitudes.y, dtype));
    check.elements("input gradient (nn)", head(all_dx, c.k), expected.dx, {rows, c.k},
                   product_bound(c.n, magnitudes.dx, dtype));
    check.elements("weight gradient (tn)", rig.read(dw), expected.dw, {groups, c.n, c.k},
                   product_bound(rows, magnitudes.dw, DType::F32));
    check.untouched_from("forward (nt)", all_y, rows * c.n);
    check.untouched_from("input gradient (nn)", all_dx, rows * c.k);
}

} // namespace

std::string with_storage(const char* name, DType dtype) {
    return std::string(name) + " " + bellows::to_string(dtype);
}

void add_gemm_checks(std::vector<OpCheck>& checks) {
    constexpr std::array<std::pair<const char*, Form>, 3> kForms = {
        {{"gemm nt", Form::Nt}, {"gemm nn", Form::Nn}, {"gemm tn", Form::Tn}}};
    for (const DType dtype : {DType::F32, DType::BF16})
        for (const auto& [name, form] : kForms)
            checks.push_back({"ops", with_storage(name, dtype),
                              [dtype, how = form](Check& check, const OpRig& rig) {
                                  check_form(check, rig, how, dtype);
                              }});
}

void add_grouped_gemm_checks(std::vector<OpCheck>& checks) {
    for (const DType dtype : {DType::F32, DType::BF16})
        checks.push_back(
            {"ops", with_storage("grouped gemm", dtype), [dtype](Check& check, const OpRig& rig) {
                 const bool bf16 = dtype == DType::BF16;
                 const std::vector<Groups> cases = {
                     {{1}, 4, 4},
                     {{0, 0, 0}, 8, 12},
                     {{5, 0, 33, 1, 0, 64}, 36, 20},
                     {{17, 100, 0, 3}, bf16 ? 14u : 13u, bf16 ? 10u : 9u},
                     {{0, 16, 48, 7}, 64, 40}};
                 for (const Groups& groups : cases)
                     check_groups(check, rig, groups, dtype);
             }});
}

} // namespace bellows::selftest
