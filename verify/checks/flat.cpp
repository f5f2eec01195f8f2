// SPDX-License-Identifier: MIT
// Ops on any number of elements: scale, add, cast, sums, copies of bytes; and transposition.
#include "verify/checks/families.hpp"

#include "verify/reference/compare.hpp"
#include "verify/reference/ops.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

struct FlatCase {
    std::uint64_t count;
    Depth depth = Depth::Quick;
};

constexpr auto kElementwiseCases = std::to_array<FlatCase>(
    {{1}, {2}, {3}, {4}, {1023}, {8190}, {70001}, {4096, Depth::Full}, {4097, Depth::Full}});

void check_elementwise(Check& check, const OpRig& rig, DType dtype, const FlatCase& c) {
    check.begin_case(std::to_string(c.count) + " elements");
    const auto a = OpRig::random(dtype, c.count, 1), b = OpRig::random(dtype, c.count, 2);
    const OpTensor a_t = rig.tensor(dtype, {c.count}, a), b_t = rig.tensor(dtype, {c.count}, b);
    const auto longer = [&](DType to) { return rig.head(to, {c.count + 8}, c.count); };
    const DType other = dtype == DType::F32 ? DType::BF16 : DType::F32;
    const OpTensor scaled = longer(dtype), sum = longer(dtype), same = longer(dtype);
    const OpTensor converted = longer(other);
    rig.run([&](Recording& recording) {
        ops::scale(recording, a_t, scaled, 0.375f);
        ops::add(recording, a_t, b_t, sum, 2, -3);
        ops::cast(recording, a_t, same);
        ops::cast(recording, a_t, converted);
        ops::add(recording, a_t, b_t, a_t);
    });
    reference::Vector expected_scaled, expected_sum, in_place;
    std::vector<float> rounded;
    for (std::size_t i = 0; i < c.count; ++i) {
        expected_scaled.push_back(0.375 * a[i]);
        expected_sum.push_back(2.0 * a[i] - 3.0 * b[i]);
        in_place.push_back(static_cast<double>(a[i]) + b[i]);
        rounded.push_back(reference::round_to_bf16(a[i]));
    }
    check.elements("scale", rig.read(scaled), expected_scaled, {}, storage_bound(dtype, 1));
    check.elements("add", rig.read(sum), expected_sum, {}, storage_bound(dtype, 2, 5));
    check.elements("add in place", rig.read(a_t), in_place, {}, storage_bound(dtype, 1));
    check.exact("cast", rig.read(same), a);
    check.exact("cast", rig.read(converted), rounded);
    check.untouched("scale", rig.outside(scaled));
    check.untouched("add", rig.outside(sum));
    check.untouched("cast", rig.outside(same));
    check.untouched("cast", rig.outside(converted));
}

/// Words of every pattern, which no copy may take for numbers.
void check_copied_bytes(Check& check, const OpRig& rig) {
    for (const std::uint64_t units : {1u, 3u, 511u, 20'001u}) {
        check.begin_case(std::to_string(16 * units) + " bytes");
        const std::uint64_t words = 4 * units;
        std::vector<std::int64_t> values;
        for (std::uint64_t i = 0; i < words; ++i)
            values.push_back(static_cast<std::int64_t>(i * 0x9E3779B1u & 0xFFFFFFFFu));
        const OpTensor from = rig.tensor(DType::U32, {words}, values);
        const OpTensor to = rig.head(DType::F32, {words + 8}, words);
        const BufferView written = to.view.buffer.sub(0, 4 * words);
        rig.run(
            [&](Recording& recording) { ops::copy_bytes(recording, from.view.buffer, written); });
        check.exact("copy_bytes",
                    rig.read<std::int64_t>(TensorView::contiguous(written, DType::U32, {words})),
                    values);
        check.untouched("copy_bytes", rig.outside(to));
    }
}

constexpr auto kSumCases = std::to_array<FlatCase>({{1},
                                                    {3},
                                                    {4097},
                                                    {70001},
                                                    {2, Depth::Full},
                                                    {4, Depth::Full},
                                                    {1023, Depth::Full},
                                                    {4096, Depth::Full},
                                                    {8190, Depth::Full}});

void check_sums(Check& check, const OpRig& rig, DType dtype, const FlatCase& c) {
    check.begin_case(std::to_string(c.count) + " elements");
    const auto x = OpRig::random(dtype, c.count, 1);
    // Behind the tensor stand NaNs, which would show.
    const OpTensor x_t = rig.head(dtype, {c.count + 8}, c.count);
    rig.write(x_t.view, x);
    const std::uint64_t partials = ops::num_partials(c.count);
    const OpTensor sums = rig.result(DType::F32, {partials}),
                   squares = rig.result(DType::F32, {partials});
    const OpTensor sum = rig.result(DType::F32, {2}), square = rig.result(DType::F32, {2});
    const Buffer scratch = rig.workspace(ops::sum_pairs_workspace_bytes(partials));
    rig.run([&](Recording& recording) {
        ops::sum_partials(recording, x_t, sums);
        ops::sum_squares_partials(recording, x_t, squares);
        ops::sum_pairs(recording, sums, sum, scratch.view());
        ops::sum_pairs(recording, squares, square, scratch.view());
    });
    double expected_sum = 0, expected_square = 0, absolute = 0;
    for (const double value : to_double(x)) {
        expected_sum += value;
        expected_square += value * value;
        absolute += std::abs(value);
    }
    const auto pair = [&](const OpTensor& t) {
        const auto p = rig.read<double>(t);
        return p[0] + p[1];
    };
    // Within a chunk of 4096 the error of an f32 sum; between chunks none.
    const double epsilon = 1100 * reference::kF32Epsilon;
    check.number("sum", pair(sum), expected_sum, epsilon * absolute);
    check.number("squares", pair(square), expected_square, epsilon * expected_square);
}

struct TransposeCase {
    std::uint64_t batch, rows, columns;
    Depth depth = Depth::Quick;
};

constexpr auto kTransposeCases = std::to_array<TransposeCase>(
    {{1, 4, 4}, {1, 8, 204}, {3, 68, 36}, {1, 300, 4, Depth::Full}, {2, 132, 516, Depth::Full}});

/// Between rows of both stands what is left alone.
void check_transpose(Check& check, const OpRig& rig, DType dtype, const TransposeCase& c) {
    check.begin_case(std::to_string(c.batch) + " x " + by(c.rows, c.columns));
    const std::uint64_t matrix = c.rows * c.columns;
    const auto x = OpRig::random(dtype, c.batch * matrix, 1);
    const OpTensor x_t = rig.head(dtype, {c.batch, c.rows, c.columns + 4}, c.columns),
                   y = rig.head(dtype, {c.batch, c.columns, c.rows + 8}, c.rows),
                   single = rig.result(dtype, {c.columns, c.rows});
    rig.write(x_t.view, x);
    TensorView first = x_t.view;
    first.rank = 2;
    first.extent = {c.rows, c.columns};
    first.stride = {c.columns + 4, 1};
    rig.run([&](Recording& recording) {
        ops::transpose(recording, x_t, y);
        ops::transpose(recording, first, single);
    });
    std::vector<float> expected(x.size());
    for (std::uint64_t g = 0; g < c.batch; ++g)
        for (std::uint64_t row = 0; row < c.rows; ++row)
            for (std::uint64_t column = 0; column < c.columns; ++column)
                expected[g * matrix + column * c.rows + row] =
                    x[g * matrix + row * c.columns + column];
    check.exact("batch", rig.read(y), expected);
    check.untouched("batch", rig.outside(y));
    expected.resize(matrix);
    check.exact("matrix", rig.read(single), expected);
}

} // namespace

void add_flat_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "scale, add, cast", kElementwiseCases, check_elementwise);
    add_table(checks, depth, "sums", kSumCases, check_sums);
    checks.push_back({"ops", "copy_bytes", check_copied_bytes});
    add_table(checks, depth, "transpose", kTransposeCases, check_transpose);
}

} // namespace bellows::checks
