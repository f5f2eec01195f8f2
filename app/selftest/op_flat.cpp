// SPDX-License-Identifier: MIT
// Ops on any number of elements: element-wise ones, sums, the gradient norm's clip, AdamW.
#include "app/selftest/suite.hpp"

#include "reference/optimizer.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::selftest {

namespace {

using reference::to_double;

void check_elementwise(Check& check, const OpRig& rig, DType dtype) {
    for (const std::uint64_t count : {1u, 2u, 3u, 4u, 1023u, 8190u, 70001u}) {
        check.begin_case(std::to_string(count) + " elements");
        const auto a = OpRig::random(dtype, count, 1), b = OpRig::random(dtype, count, 2);
        const OpTensor a_t = rig.tensor(dtype, {count}, a), b_t = rig.tensor(dtype, {count}, b);
        const OpTensor scaled = rig.result(dtype, {count + 8}),
                       sum = rig.result(dtype, {count + 8});
        rig.run([&](Recording& recording) {
            ops::scale(recording, a_t, scaled.view.rows(0, count), 0.375f);
            ops::add(recording, a_t, b_t, sum.view.rows(0, count), 2, -3);
        });
        reference::Vector expected_scaled, expected_sum;
        for (std::size_t i = 0; i < count; ++i) {
            expected_scaled.push_back(0.375 * a[i]);
            expected_sum.push_back(2.0 * a[i] - 3.0 * b[i]);
        }
        check.elements("scale", rig.read(scaled.view.rows(0, count)), expected_scaled, {},
                       storage_bound(dtype, 1));
        check.elements("add", rig.read(sum.view.rows(0, count)), expected_sum, {},
                       storage_bound(dtype, 2, 5));
        check.untouched_from("scale", rig.read(scaled), count);
        check.untouched_from("add", rig.read(sum), count);
    }
}

void check_sums(Check& check, const OpRig& rig, DType dtype) {
    for (const std::uint64_t count : {1u, 3u, 4097u, 70001u}) {
        check.begin_case(std::to_string(count) + " elements");
        const auto x = OpRig::random(dtype, count, 1);
        // Behind the tensor stand NaNs, which would show.
        const OpTensor longer = rig.result(dtype, {count + 8});
        const TensorView x_t = longer.view.rows(0, count);
        rig.write(x_t, x);
        const std::uint64_t partials = ops::num_partials(count);
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
}

void check_clip(Check& check, const OpRig& rig) {
    const auto x = reference::random_f32(5000, 1);
    const OpTensor x_t = rig.tensor(DType::F32, {x.size()}, x);
    const std::uint64_t partials = ops::num_partials(x.size());
    const OpTensor parts = rig.result(DType::F32, {partials}), square = rig.result(DType::F32, {2});
    const auto xd = to_double(x);
    const double norm = reference::global_norm({xd});
    for (const float most : {1.0f, 1000.0f, 0.0f}) {
        check.begin_case("norm at most " + std::to_string(most));
        const OpTensor clip = rig.result(DType::F32, {2});
        rig.run([&](Recording& recording) {
            ops::sum_squares_partials(recording, x_t, parts);
            ops::sum_pairs(recording, parts, square, {});
            ops::clip_coefficient(recording, square, clip, most);
        });
        const auto actual = rig.read<double>(clip);
        check.number("coefficient", actual[0],
                     reference::clip_factor(norm, static_cast<double>(most)), 1e-6);
        check.number("norm", actual[1], norm, 1e-6 * norm);
    }
}

void check_adamw(Check& check, const OpRig& rig, DType moments) {
    for (const std::uint64_t count : {1u, 3u, 4094u, 10001u}) {
        check.begin_case(std::to_string(count) + " elements");
        const ops::AdamwOptions options;
        reference::Vector weight = to_double(reference::random_f32(count, 1));
        reference::Vector m(count, 0), v(count, 0);
        const OpTensor weight_t = rig.tensor(DType::F32, {count}, weight);
        const OpTensor m_t = rig.tensor(moments, {count}, m), v_t = rig.tensor(moments, {count}, v);
        const OpTensor gradient_t = rig.result(DType::F32, {count});
        const OpTensor copy = rig.result(DType::BF16, {count});
        const OpTensor scalars = rig.result(DType::F32, {3});
        const OpTensor clip = rig.tensor(DType::F32, {2}, std::vector<float>{0.5f, 1});
        Recording recording(rig.device(), QueueRole::Compute, "adamw");
        ops::adamw(recording, weight_t, gradient_t, m_t, v_t, copy, scalars, clip, options);
        for (std::uint64_t step = 1; step <= 2; ++step) {
            const double lr = 1e-2 / static_cast<double>(step);
            const auto gradient = reference::random_f32(count, 10 + step);
            rig.write(gradient_t.view, gradient);
            const auto numbers = ops::adamw_scalars(options, lr, step);
            rig.write(scalars.view, std::vector<float>(numbers.begin(), numbers.end()));
            rig.device().submit(recording).wait();
            reference::Vector g = to_double(gradient);
            for (double& value : g)
                value *= 0.5;
            reference::adamw_step(weight, g, m, v,
                                  {.lr = lr,
                                   .beta1 = options.beta1,
                                   .beta2 = options.beta2,
                                   .eps = options.eps,
                                   .weight_decay = options.weight_decay},
                                  step);
            check.elements("first moment", rig.read(m_t), m, {}, storage_bound(moments, 16, 1));
            check.elements("second moment", rig.read(v_t), v, {}, storage_bound(moments, 16));
            // A step is lr times about 1; bf16 moments change it by their rounding.
            const double rounding = moments == DType::BF16 ? 0.02 : 0;
            const auto actual = rig.read(weight_t);
            check.elements("weight", actual, weight, {},
                           reference::within(lr * (rounding + 1e-5), 4 * reference::kF32Epsilon));
            m = to_double(rig.read(m_t)); // from here on with the moments as they were stored
            v = to_double(rig.read(v_t));
            weight = to_double(actual);
            std::vector<float> rounded;
            for (const float value : actual)
                rounded.push_back(reference::round_to_bf16(value));
            check.exact("bf16 copy", rig.read(copy), rounded);
        }
    }
}

} // namespace

void add_flat_checks(std::vector<OpCheck>& checks) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const auto add = [&](const char* name, void (*body)(Check&, const OpRig&, DType)) {
            checks.push_back(
                {"ops", with_storage(name, dtype),
                 [dtype, body](Check& check, const OpRig& rig) { body(check, rig, dtype); }});
        };
        add("scale, add", check_elementwise);
        add("sums", check_sums);
        add("adamw", check_adamw);
    }
    checks.push_back({"ops", "clip", check_clip});
}

} // namespace bellows::selftest
