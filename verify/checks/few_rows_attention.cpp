// SPDX-License-Identifier: MIT
// Products of few rows around latent attention against f64: its parts put together ahead of W_UV,
// and its queries.
#include "verify/checks/few_rows_rig.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using namespace few_rows;
using fp8::FewRowsForm;
using reference::to_double;
using reference::Vector;

struct PartsCase {
    Kind kind;
    std::uint64_t n, k, heads;
    std::array<std::uint32_t, 4> parts; ///< of each row
    std::uint64_t rows;
    fp8::FewRowsCut cut = {};
    Depth depth = Depth::Quick;
};

constexpr auto kPartsCases = std::to_array<PartsCase>({
    {Kind::Values, 5, 24, 3, {2}, 1},
    {Kind::Values, 12, 136, 2, {1, 0, 9, 3}, 4, {8, 2, 4}},
    {Kind::Values, 12, 24, 2, {19, 3, 2}, 3, {8, 2, 8}}, // shares of parts, some without one
    {Kind::PowersOfTwo, 34, 128, 2, {8, 17}, 2},
    {Kind::Values, 128, 512, 16, {65, 33}, 2, {}, Depth::Full},
});

/// What attention left in parts, by the heads' weights.
void check_parts(Check& check, const OpRig& rig, DType act, const PartsCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows of " + std::to_string(c.heads) + " heads " +
                     by(c.n, c.k));
    const FewRowsWeights w = make_weights(rig, act, c.kind, c.heads, c.n, c.k);
    std::vector<std::uint32_t> plan;
    std::uint64_t partials = 2; // what nobody has before them
    for (std::uint64_t r = 0; r < c.rows; ++r) {
        plan.push_back(static_cast<std::uint32_t>(partials));
        plan.push_back(c.parts[r]);
        partials += c.parts[r];
    }
    const auto x = OpRig::random(act, c.rows * c.heads * c.k, 1);
    const auto sums = reference::random_f32(partials * c.heads * c.k, 2),
               logs = reference::random_f32(partials * c.heads, 3, -20, 20);
    const OpTensor x_t = rig.tensor(act, {c.rows, c.heads, c.k}, x),
                   plan_t = rig.tensor(DType::U32, {c.rows, 2}, plan),
                   sums_t = rig.tensor(DType::F32, {partials, c.heads, c.k}, sums),
                   logs_t = rig.tensor(DType::F32, {partials, c.heads}, logs);
    const std::uint64_t wide = round_up(c.n, 4) + 4;
    const OpTensor y = rig.head(act, {c.rows, c.heads, wide}, c.n);
    const auto of_batch = [](TensorView view) {
        std::swap(view.extent[0], view.extent[1]);
        std::swap(view.stride[0], view.stride[1]);
        return view;
    };
    rig.run([&](Recording& r) {
        fp8::few_rows_nt(
            r, of_batch(x_t), w.operand, of_batch(y.view),
            {.parts = {.rows = plan_t, .sums = sums_t, .log_of_sums = logs_t}, .cut = c.cut});
    });
    std::vector<Bounded> expected;
    for (std::uint64_t r = 0; r < c.rows; ++r)
        for (std::uint64_t h = 0; h < c.heads; ++h) {
            Vector row(c.k), magnitude(c.k);
            double total = 0;
            for (std::uint64_t i = 0; i < c.parts[r] && c.parts[r] > 1; ++i) {
                const std::uint64_t at = (plan[2 * r] + i) * c.heads + h;
                const double power = std::exp2(static_cast<double>(logs[at]));
                total += power;
                for (std::uint64_t j = 0; j < c.k; ++j) {
                    row[j] += power * static_cast<double>(sums[at * c.k + j]);
                    magnitude[j] += power * std::abs(static_cast<double>(sums[at * c.k + j]));
                }
            }
            for (std::uint64_t j = 0; j < c.k; ++j) {
                row[j] = c.parts[r] == 1 ? static_cast<double>(x[(r * c.heads + h) * c.k + j])
                                         : (total == 0 ? 0 : row[j] / total);
                magnitude[j] = total == 0 ? 0 : magnitude[j] / total;
            }
            // Powers of two of differences up to 40 may be off by 3 + 2 * 40 ulp.
            for (std::uint64_t i = 0; i < c.n; ++i) {
                const std::uint64_t at = (h * c.n + i) * c.k;
                Bounded e = dot(row, 0, w.values, at, c.k);
                for (std::uint64_t j = 0; j < c.k; ++j)
                    e.error += (2 * 83 + 2 * static_cast<double>(c.parts[r])) *
                               reference::kF32Epsilon * magnitude[j] * std::abs(w.values[at + j]);
                expected.push_back(e);
            }
        }
    compare(check, "product", rig.read(y.view), expected, act);
    check.untouched("product", rig.outside(y, y.view));
}

struct QueryCase {
    std::uint64_t rows, heads, nope, rope, latent;
    Depth depth = Depth::Quick;
};

constexpr auto kQueryCases = std::to_array<QueryCase>({
    {1, 2, 8, 4, 16},
    {3, 3, 12, 8, 24},
    {8, 2, 64, 16, 136},
    {5, 1, 20, 0, 64},
    {1, 16, 128, 64, 512, Depth::Full},
});

void check_queries(Check& check, const OpRig& rig, DType act, const QueryCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows, " + std::to_string(c.heads) + " heads " +
                     by(c.nope, c.latent));
    constexpr std::uint64_t kPositions = 9, kGap = 8;
    const std::uint64_t of_q = c.nope + c.rope, of_y = c.latent + c.rope;
    const auto q = OpRig::random(act, c.rows * c.heads * of_q, 1),
               w = OpRig::random(act, c.heads * c.nope * c.latent, 2);
    const auto table = reference::random_f32(kPositions * std::max<std::uint64_t>(c.rope, 1), 3);
    const auto positions = reference::random_indices(c.rows, 4, kPositions);
    const OpTensor q_t = rig.tensor(act, {c.rows, c.heads, of_q}, q),
                   table_t =
                       rig.tensor(DType::F32, {kPositions, c.rope / 2, 2},
                                  std::vector<float>(table.begin(),
                                                     table.begin() + static_cast<std::ptrdiff_t>(
                                                                         kPositions * c.rope))),
                   positions_t = rig.tensor(DType::U32, {c.rows}, positions),
                   y = rig.result(act, {c.rows, c.heads, of_y});
    // A part of wider rows of weights.
    const OpTensor w_t = rig.head(act, {c.heads, c.nope, c.latent + kGap}, c.latent);
    rig.write(w_t.view, w);
    rig.run([&](Recording& r) { ops::mla_queries(r, q_t, w_t, table_t, positions_t, y); });
    const Vector qd = to_double(q), wd = to_double(w);
    std::vector<Bounded> expected;
    for (std::uint64_t r = 0; r < c.rows; ++r)
        for (std::uint64_t h = 0; h < c.heads; ++h) {
            const std::uint64_t at = (r * c.heads + h) * of_q;
            for (std::uint64_t i = 0; i < c.latent; ++i) {
                Vector column;
                for (std::uint64_t k = 0; k < c.nope; ++k)
                    column.push_back(wd[(h * c.nope + k) * c.latent + i]);
                expected.push_back(dot(qd, at, column, 0, c.nope));
            }
            for (std::uint64_t i = 0; i < c.rope; ++i) {
                const std::uint64_t angle =
                    static_cast<std::uint64_t>(positions[r]) * c.rope + i / 2 * 2;
                const double cosine = static_cast<double>(table[angle]),
                             sine = static_cast<double>(table[angle + 1]),
                             even = qd[at + c.nope + i / 2 * 2],
                             odd = qd[at + c.nope + i / 2 * 2 + 1];
                const double value =
                    i % 2 == 0 ? even * cosine - odd * sine : even * sine + odd * cosine;
                expected.push_back(
                    {value, 4 * reference::kF32Epsilon * (std::abs(even) + std::abs(odd))});
            }
        }
    compare(check, "queries", rig.read(y.view), expected, act);
}

} // namespace

void add_few_rows_attention_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "few rows by attention's parts", kPartsCases, check_parts);
    add_table(checks, depth, "few rows of latent queries", kQueryCases, check_queries);
}

} // namespace bellows::checks
