// SPDX-License-Identifier: MIT
// Dense matrix products: odd sizes, tails, gaps between rows, batches, accumulation, mixed storage.
#include "verify/checks/families.hpp"
#include "verify/checks/product_bound.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;
using reference::Vector;

enum class Form : std::uint8_t { Nt, Nn, Tn };

struct Shape {
    std::uint64_t batch, m, n, k, gap; ///< gap: elements between rows that are not the matrix's
    bool accumulate = false;           ///< in Depth::Full both ways
    Depth depth = Depth::Quick;
};

constexpr auto kShapes = std::to_array<Shape>({
    {0, 1, 1, 1, 0},
    {0, 3, 5, 7, 1, true},
    {0, 33, 31, 65, 0},
    {0, 64, 64, 64, 0, false, Depth::Full},
    {0, 17, 40, 128, 4, true},
    {0, 130, 36, 20, 8},
    {3, 9, 12, 16, 4},
    {2, 5, 3, 11, 1, false, Depth::Full},
    {0, 40, 8, 0, 0},
    {0, 96, 64, 80, 0},
    // What matrix units add: rows in groups of eight, also in a batch and with a tail.
    {3, 24, 40, 32, 8, false, Depth::Full},
    {0, 48, 32, 24, 0, false, Depth::Full},
    {0, 136, 72, 104, 8, false, Depth::Full},
});

/// Operands' values are exact in f16 or so small that it does not show in that numeric class.
struct Storages {
    DType a, b, d;
};

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

void check_shape(Check& check, const OpRig& rig, Form form, const Shape& s, const Storages& types,
                 bool accumulate) {
    const std::uint64_t batches = std::max<std::uint64_t>(s.batch, 1);
    check.begin_case(std::to_string(batches) + " x " + std::to_string(s.m) + " x " +
                     std::to_string(s.n) + " x " + std::to_string(s.k) + ", " +
                     bellows::to_string(types.a) + " by " + bellows::to_string(types.b) + " to " +
                     bellows::to_string(types.d) + (accumulate ? ", added" : ""));
    const auto a = OpRig::random(types.a, batches * s.m * s.k, 1 + s.m);
    const auto b = OpRig::random(types.b, batches * s.n * s.k, 2 + s.n);
    const auto before = OpRig::random(types.d, batches * s.m * s.n, 3);
    const bool a_by_k = form == Form::Tn, b_by_n = form == Form::Nt;
    const OpTensor a_t =
        matrix(rig, types.a, s.batch, a_by_k ? s.k : s.m, a_by_k ? s.m : s.k, s.gap);
    const OpTensor b_t =
        matrix(rig, types.b, s.batch, b_by_n ? s.n : s.k, b_by_n ? s.k : s.n, s.gap);
    const OpTensor d_t = matrix(rig, types.d, s.batch, s.m, s.n, s.gap);
    rig.write(a_t.view, a);
    rig.write(b_t.view, b);
    if (accumulate)
        rig.write(d_t.view, before);
    constexpr float kAlpha = 0.75f;
    rig.run([&](Recording& recording) {
        const auto op = form == Form::Nt   ? ops::gemm_nt
                        : form == Form::Nn ? ops::gemm_nn
                                           : ops::gemm_tn;
        op(recording, a_t, b_t, d_t, accumulate, kAlpha);
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
    if (accumulate) {
        reference::accumulate(expected, to_double(before));
        reference::accumulate(magnitudes, reference::absolute(to_double(before)));
    }
    const auto actual = rig.read(d_t);
    check.number("whole matrix", reference::calc_diff(actual, expected), 0, most_diff(types.d));
    check.elements("elements", actual, expected, {batches, s.m, s.n},
                   product_bound(s.k, magnitudes, types.d));
    check.untouched("gaps", rig.outside(d_t));
}

/// The shapes' products of one storage, every `stride`-th from `first` on.
void check_form(Check& check, const OpRig& rig, Depth depth, Form form, const Storages& types,
                std::size_t first = 0, std::size_t stride = 1) {
    for (std::size_t i = first; i < kShapes.size(); i += stride)
        for (const bool accumulate : {false, true})
            if (depth == Depth::Full ||
                (kShapes[i].depth <= depth && accumulate == kShapes[i].accumulate))
                check_shape(check, rig, form, kShapes[i], types, accumulate);
}

void check_pure(Check& check, const OpRig& rig, Depth depth, Form form, DType dtype) {
    check_form(check, rig, depth, form, {dtype, dtype, dtype});
    if (dtype == DType::BF16) // as weight gradients and logits are kept
        check_form(check, rig, depth, form, {dtype, dtype, DType::F32});
}

/// Drivers compile each mixture anew: a few shapes each.
struct Mixture {
    Storages types;
    std::size_t first, stride; ///< among the shapes
};

void check_mixed(Check& check, const OpRig& rig, Form form) {
    constexpr DType kF32 = DType::F32, kBf16 = DType::BF16;
    constexpr auto kMixtures = std::to_array<Mixture>({{{kBf16, kF32, kF32}, 1, 5},
                                                       {{kF32, kBf16, kF32}, 2, 5},
                                                       {{kF32, kF32, kBf16}, 1, 3},
                                                       {{kBf16, kF32, kBf16}, 2, 3},
                                                       {{kF32, kBf16, kBf16}, 3, 3}});
    for (const Mixture& mixture : kMixtures)
        check_form(check, rig, Depth::Full, form, mixture.types, mixture.first, mixture.stride);
}

} // namespace

void add_gemm_checks(std::vector<OpCheck>& checks, Depth depth) {
    constexpr auto kForms = std::to_array<std::pair<const char*, Form>>(
        {{"gemm nt", Form::Nt}, {"gemm nn", Form::Nn}, {"gemm tn", Form::Tn}});
    for (const DType dtype : {DType::F32, DType::BF16})
        for (const auto& [name, form] : kForms)
            checks.push_back({.group = "ops",
                              .what = with_storage(name, dtype),
                              .body =
                                  [=, how = form](Check& check, const OpRig& rig) {
                                      check_pure(check, rig, depth, how, dtype);
                                  },
                              .depends_on_gemm_class = dtype == DType::BF16});
    if (depth == Depth::Full)
        for (const auto& [name, form] : kForms)
            checks.push_back({.group = "ops",
                              .what = std::string(name) + " mixed",
                              .body = [how = form](Check& check, const OpRig& rig) {
                                  check_mixed(check, rig, how);
                              }});
}

} // namespace bellows::checks
