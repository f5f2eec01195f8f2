// SPDX-License-Identifier: MIT
#pragma once

// What the tests of dense products share: operands by form and shape, and a product's check against
// f64 products of the same dequantised operands.

#include "fp8/gemm_rig.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace bellows::testing {

class Fp8DenseTest : public Fp8GemmTest {
protected:
    struct Shape {
        std::uint64_t m, n, k, batch = 0; ///< batch 0: two dimensions
    };

    static std::vector<std::uint64_t> extents(std::uint64_t batch, std::uint64_t rows,
                                              std::uint64_t columns) {
        return batch == 0 ? std::vector<std::uint64_t>{rows, columns}
                          : std::vector<std::uint64_t>{batch, rows, columns};
    }
    static Input make_a(GemmForm form, const Kind& kind, const Shape& s) {
        return form == GemmForm::TN ? input(kind, extents(s.batch, s.k, s.m), s.m + 1)
                                    : input(kind, extents(s.batch, s.m, s.k), s.m + 1);
    }
    static Input make_b(GemmForm form, const Kind& kind, const Shape& s) {
        return form == GemmForm::NT ? input(kind, extents(s.batch, s.n, s.k), s.n + 2)
                                    : input(kind, extents(s.batch, s.k, s.n), s.n + 2);
    }

    static void record(Recording& r, GemmForm form, const Input& a, const Input& b,
                       const TensorView& d, bool accumulate, const Buffer& scratch) {
        const auto gemm = form == GemmForm::NT   ? fp8::gemm_nt
                          : form == GemmForm::NN ? fp8::gemm_nn
                                                 : fp8::gemm_tn;
        gemm(r, *a.operand, *b.operand, d, accumulate, scratch.view(), way_);
    }

    static std::vector<double> product(GemmForm form, const std::vector<double>& a,
                                       const std::vector<double>& b, const Shape& s) {
        std::vector<double> all;
        const std::uint64_t batches = std::max<std::uint64_t>(s.batch, 1);
        for (std::uint64_t i = 0; i < batches; ++i) {
            const auto at = reference::View(a).subspan(i * s.m * s.k, s.m * s.k);
            const auto bt = reference::View(b).subspan(i * s.n * s.k, s.n * s.k);
            const auto d = form == GemmForm::NT   ? reference::gemm_nt(at, bt, s.m, s.n, s.k)
                           : form == GemmForm::NN ? reference::gemm_nn(at, bt, s.m, s.n, s.k)
                                                  : reference::gemm_tn(at, bt, s.m, s.n, s.k);
            all.insert(all.end(), d.begin(), d.end());
        }
        return all;
    }

    static void check(GemmForm form, const Input& a, const Input& b, const Shape& s, DType storage,
                      bool accumulate = false) {
        const OpTensor d = padded(storage, extents(s.batch, s.m, s.n));
        const auto before = random(storage, d.view.num_elements(), 3);
        if (accumulate)
            write(d.view, before);
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) { record(r, form, a, b, d, accumulate, scratch); });
        auto expected = product(form, a.values, b.values, s);
        auto magnitudes =
            product(form, reference::absolute(a.values), reference::absolute(b.values), s);
        if (accumulate) {
            reference::accumulate(expected, reference::to_double(before));
            reference::accumulate(magnitudes, reference::absolute(reference::to_double(before)));
        }
        expect_product(read(d.view), expected, magnitudes, {s.m, s.n}, s.k, storage);
        expect_untouched(rig().outside(d), "between D's rows");
    }
};

inline constexpr GemmForm kForms[] = {GemmForm::NT, GemmForm::NN, GemmForm::TN};
inline const char* const kFormNames[] = {"nt", "nn", "tn"};

/// Just those elements are NaN of which `where` says so, given row and column.
template <class Where>
void expect_nans(const std::vector<float>& values, std::uint64_t columns, const Where& where) {
    for (std::uint64_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(std::isnan(values[i]), where(i / columns, i % columns))
            << i / columns << ", " << i % columns << ": " << values[i];
}

/// Operands whose rows' scales differ by so many powers of two along k, block by block.
inline std::vector<float> steep(std::uint64_t rows, std::uint64_t columns, int spread, bool by_row,
                                std::uint64_t seed) {
    test::Random random(seed);
    std::vector<float> x(rows * columns);
    for (std::uint64_t i = 0; i < x.size(); ++i) {
        const std::uint64_t k = by_row ? i / columns : i % columns;
        const int down = static_cast<int>((k / 128 * 7 + i % 3) % 3) * spread / 2;
        x[i] = static_cast<float>(std::ldexp(random.uniform(-1, 1), -down));
    }
    return x;
}

} // namespace bellows::testing
