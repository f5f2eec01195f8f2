// SPDX-License-Identifier: MIT
// The clip of the gradients' norm and AdamW.
#include "verify/checks/families.hpp"

#include "verify/reference/optimizer.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

/// The norm of two tensors.
void check_clip(Check& check, const OpRig& rig) {
    const auto a = reference::random_f32(5000, 1), b = reference::random_f32(77, 2);
    const OpTensor a_t = rig.tensor(DType::F32, {a.size()}, a);
    const OpTensor b_t = rig.tensor(DType::F32, {b.size()}, b);
    const std::uint64_t first = ops::num_partials(a.size()), rest = ops::num_partials(b.size());
    const OpTensor partials = rig.result(DType::F32, {first + rest});
    const OpTensor square = rig.result(DType::F32, {2});
    const auto ad = to_double(a), bd = to_double(b);
    const double norm = reference::global_norm({ad, bd});
    for (const float most : {1.0f, 1000.0f, 0.0f}) {
        check.begin_case("norm at most " + std::to_string(most));
        const OpTensor clip = rig.result(DType::F32, {2});
        rig.run([&](Recording& recording) {
            ops::sum_squares_partials(recording, a_t, partials.view.rows(0, first));
            ops::sum_squares_partials(recording, b_t, partials.view.rows(first, rest));
            ops::sum_pairs(recording, partials, square, {});
            ops::clip_coefficient(recording, square, clip, most);
        });
        const auto actual = rig.read<double>(clip);
        const bool clips = most == 1; // otherwise 1, exactly
        check.number("coefficient", actual[0],
                     reference::clip_factor(norm, static_cast<double>(most)), clips ? 1e-6 : 0);
        check.number("norm", actual[1], norm, 1e-6 * norm);
    }
}

struct AdamwCase {
    std::uint64_t count;
    bool copy = true; ///< a bf16 copy of the weights
    bool clip = true; ///< gradients times a number on the device
    Depth depth = Depth::Quick;
};

constexpr auto kAdamwCases = std::to_array<AdamwCase>({
    {1},
    {3},
    {4094},
    {10001},
    {1, false, false, Depth::Full},
    {7, true, true, Depth::Full},
    {4096, true, false, Depth::Full},
    {10001, false, true, Depth::Full},
});

void check_adamw(Check& check, const OpRig& rig, DType moments, const AdamwCase& c) {
    check.begin_case(std::to_string(c.count) + " elements");
    const ops::AdamwOptions options;
    reference::Vector weight = to_double(reference::random_f32(c.count, 1));
    reference::Vector m(c.count, 0), v(c.count, 0);
    const OpTensor weight_t = rig.tensor(DType::F32, {c.count}, weight);
    const OpTensor m_t = rig.tensor(moments, {c.count}, m), v_t = rig.tensor(moments, {c.count}, v);
    const OpTensor gradient_t = rig.result(DType::F32, {c.count});
    const OpTensor copy = rig.result(DType::BF16, {c.count});
    const OpTensor scalars = rig.result(DType::F32, {3});
    const OpTensor clip = rig.tensor(DType::F32, {2}, std::vector<float>{0.5f, 1});
    Recording recording(rig.device(), QueueRole::Compute, "adamw");
    ops::adamw(recording, weight_t, gradient_t, m_t, v_t, c.copy ? copy.view : TensorView{},
               scalars, c.clip ? clip.view : TensorView{}, options);
    for (std::uint64_t step = 1; step <= 3; ++step) {
        const double lr = 1e-2 / static_cast<double>(step);
        const auto gradient = reference::random_f32(c.count, 10 + step);
        rig.write(gradient_t.view, gradient);
        const auto numbers = ops::adamw_scalars(options, lr, step);
        rig.write(scalars.view, std::vector<float>(numbers.begin(), numbers.end()));
        rig.device().submit(recording).wait();
        reference::Vector g = to_double(gradient);
        for (double& value : g)
            value *= c.clip ? 0.5 : 1;
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
        if (c.copy)
            check.exact("bf16 copy", rig.read(copy), rounded);
    }
}

} // namespace

void add_optimizer_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "adamw", kAdamwCases, check_adamw);
    checks.push_back({"ops", "clip", check_clip});
}

} // namespace bellows::checks
