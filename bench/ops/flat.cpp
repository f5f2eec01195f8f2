// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"

namespace bellows::bench {

Workload elementwise(OpData& data, const Sizes& s, DType act, int part) {
    const std::uint64_t count = s.tokens * s.hidden;
    const DType other = act == DType::F32 ? DType::BF16 : DType::F32;
    const TensorView a = data.random(act, {count}), b = data.random(act, {count}),
                     y = data.empty(act, {count}), converted = data.empty(other, {count});
    const auto verify = [=, &data]() -> std::string {
        const auto as = data.read(a), bs = data.read(b);
        const auto ys = data.read(part == 1 ? converted : y);
        for (const std::uint64_t i : samples(count)) {
            const double expected[] = {as[i] + bs[i], as[i], 3 * as[i], as[i]};
            const std::string wrong =
                compare("y", i, ys[i], expected[part], part == 1 ? 8e-3 : tolerance(act));
            if (!wrong.empty())
                return wrong;
        }
        return "";
    };
    const Workload work[] = {
        {[=](Recording& r) { ops::add(r, a, b, y); }, verify, bytes_of({a, b, y}), 0},
        {[=](Recording& r) { ops::cast(r, a, converted); }, verify, bytes_of({a, converted}), 0},
        {[=](Recording& r) { ops::scale(r, a, y, 3); }, verify, bytes_of({a, y}), 0},
        {[=](Recording& r) { ops::copy(r, a, y); }, verify, bytes_of({a, y}), 0},
    };
    return work[part];
}

Workload transpose(OpData& data, const Sizes& s, DType act, int) {
    const std::uint64_t batch = 4, rows = s.ffn, columns = s.hidden;
    const TensorView x = data.random(act, {batch, rows, columns}),
                     y = data.empty(act, {batch, columns, rows});
    const auto verify = [=, &data]() -> std::string {
        const auto xs = data.read(x), ys = data.read(y);
        for (const std::uint64_t i : samples(xs.size())) {
            const std::uint64_t g = i / (rows * columns), row = i / columns % rows,
                                column = i % columns;
            const std::string wrong =
                compare("y", i, ys[(g * columns + column) * rows + row], xs[i], 0);
            if (!wrong.empty())
                return wrong;
        }
        return "";
    };
    return {[=](Recording& r) { ops::transpose(r, x, y); }, verify, bytes_of({x, y}), 0};
}

Workload reduction(OpData& data, const Sizes& s, DType act, int part) {
    const std::uint64_t count = s.tokens * s.hidden;
    const TensorView x = data.random(act, {count}, 0, 1),
                     partials = data.empty(DType::F32, {ops::num_partials(count)}),
                     sum = data.values({2}, {16, 0}), clip = data.empty(DType::F32, {2});
    const BufferView scratch = data.bytes(ops::sum_pairs_workspace_bytes(partials.extent[0]));
    const auto verify = [=, &data]() -> std::string {
        const auto xs = data.read(x), sums = data.read(sum), clips = data.read(clip);
        if (part == 2) // the norm is 4, allowed is 1
            return compare("clip", 0, clips[0], 0.25, 1e-6);
        double expected = 0;
        for (const double value : xs)
            expected += part == 0 ? value * value : value;
        return compare("sum", 0, sums[0] + sums[1], expected, 1e-5);
    };
    const Workload work[] = {
        {[=](Recording& r) {
             ops::sum_squares_partials(r, x, partials);
             ops::sum_pairs(r, partials, sum, scratch);
         },
         verify, bytes_of({x}), 0},
        {[=](Recording& r) {
             ops::sum_partials(r, x, partials);
             ops::sum_pairs(r, partials, sum, scratch);
         },
         verify, bytes_of({x}), 0},
        {[=](Recording& r) { ops::clip_coefficient(r, sum, clip, 1); }, verify,
         bytes_of({sum, clip}), 0},
    };
    return work[part];
}

Workload adamw(OpData& data, const Sizes& s, DType moments, int) {
    const std::uint64_t count = s.hidden * s.hidden * 4;
    const TensorView weight = data.random(DType::F32, {count}),
                     gradient = data.random(DType::F32, {count}, 0.5, 1),
                     m = data.random(moments, {count}, 0, 0),
                     v = data.random(moments, {count}, 0, 0),
                     copy = data.empty(DType::BF16, {count});
    const ops::AdamwOptions options{.weight_decay = 0};
    const auto numbers = ops::adamw_scalars(options, 1e-3, 1);
    const TensorView scalars = data.values({3}, {numbers.begin(), numbers.end()});
    const double before = data.read(weight)[0];
    // The first step of every element is lr downhill.
    const auto verify = [=, &data]() -> std::string {
        return compare("weight", 0, data.read(weight)[0], before - 1e-3, 1e-6);
    };
    return {
        [=](Recording& r) { ops::adamw(r, weight, gradient, m, v, copy, scalars, {}, options); },
        verify, 2 * bytes_of({weight, m, v}) + bytes_of({gradient, copy}), 0};
}

} // namespace bellows::bench
