// SPDX-License-Identifier: MIT
#include "native.hpp"
#include "operands.hpp"

#include <bellows/fp8/route.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::fp8 {

namespace {

using Kernel = kernels::HopperRoute;

constexpr std::uint64_t kMostHidden = 8192, kWarpColumns = 256;
constexpr std::uint64_t kMostExperts = 256, kMostGroups = 32, kMostTopK = 64;

bool begins_at_16(const TensorView& view) {
    return view.buffer.offset % 16 == 0 && view.stride[view.rank - 1] == 1 &&
           (view.rank == 1 || view.stride[0] * size_of(view.dtype) % 16 == 0);
}

std::string describe_all(const Route& r) {
    return "x is " + describe(r.x) + ", gain is " + describe(r.gain) + ", gate is " +
           describe(r.gate);
}

} // namespace

std::string why_not_route(const Device& device, const Route& r, std::uint64_t top_k) {
    const std::string lacking =
        device.why_not(Kernel::info(), static_cast<std::uint32_t>(Kernel::Variant::bf16));
    if (!lacking.empty())
        return lacking;
    if (r.x.rank != 2 || r.x.dtype != DType::BF16 || !begins_at_16(r.x) || r.gate.rank != 2 ||
        r.gate.dtype != DType::BF16 || !begins_at_16(r.gate) || r.gain.rank != 1 ||
        (r.gain.dtype != DType::BF16 && r.gain.dtype != DType::F32) || !begins_at_16(r.gain))
        return describe_all(r) + "; it takes bf16 that begins at multiples of 16 bytes";
    const std::uint64_t hidden = r.x.extent[1], experts = r.gate.extent[0];
    if (r.gate.extent[1] != hidden || r.gain.extent[0] != hidden || hidden > kMostHidden ||
        hidden % kWarpColumns != 0)
        return describe_all(r) + "; it takes multiples of 256 columns up to 8192";
    const ops::RouterOptions& o = r.options;
    return experts > 0 && experts <= kMostExperts && o.groups >= 1 && o.groups <= kMostGroups &&
                   experts % o.groups == 0 && o.group_top_k >= 1 && o.group_top_k <= o.groups &&
                   top_k >= 1 && top_k <= kMostTopK &&
                   top_k <= experts / o.groups * o.group_top_k && r.shared <= kMostTopK &&
                   (!r.bias.buffer ||
                    (r.bias.rank == 1 && r.bias.extent[0] == experts && r.bias.dtype == DType::F32))
               ? ""
               : std::to_string(top_k) + " of " + std::to_string(experts) + " experts in " +
                     std::to_string(o.groups) + " groups";
}

void route(Recording& recording, const Route& r, const Quantized& codes, const TensorView& ids,
           const TensorView& weights) {
    const Operands operands("fp8::route");
    operands.require(ids.rank == 2 && ids.extent[1] > r.shared,
                     "ids are " + describe(ids) + ", of which " + std::to_string(r.shared) +
                         " are shared experts'");
    const std::uint64_t top_k = ids.extent[1] - r.shared;
    const std::string lacking = why_not_route(recording.device(), r, top_k);
    operands.require(lacking.empty(), lacking);
    const std::uint64_t tokens = r.x.extent[0], hidden = r.x.extent[1];
    const auto list = [&](const TensorView& view, DType dtype) {
        return view.rank == 2 && view.dtype == dtype && view.extent[0] == tokens &&
               view.extent[1] == ids.extent[1] && view.stride[1] == 1 &&
               view.stride[0] == view.extent[1];
    };
    operands.require(list(ids, DType::I32) && list(weights, DType::F32),
                     "ids are " + describe(ids) + ", weights are " + describe(weights) + ", x is " +
                         describe(r.x));
    operands.require(codes.recipe.format == Format::E4M3 &&
                         codes.recipe.blocks == Blocks::Rows128 && codes.codes.rank == 2 &&
                         codes.codes.extent[0] == tokens && codes.codes.extent[1] == hidden,
                     "codes are " + describe(Operand(codes)) + ", x is " + describe(r.x));
    if (tokens == 0)
        return;
    const ops::RouterOptions& o = r.options;
    Kernel kernel;
    kernel.variant = Kernel::Variant::bf16;
    kernel.x = r.x.buffer;
    kernel.gain = r.gain.buffer;
    kernel.gate = r.gate.buffer;
    kernel.bias = r.bias.buffer ? r.bias.buffer : r.x.buffer;
    kernel.row_count = operands.row_count_or(r.x, r.x.buffer);
    kernel.codes = codes.codes.buffer;
    kernel.scales = codes.scales.buffer;
    kernel.ids = ids.buffer;
    kernel.weights = weights.buffer;
    kernel.hidden = operands.u32("hidden", hidden);
    kernel.experts = operands.u32("experts", r.gate.extent[0]);
    kernel.top_k = operands.u32("top_k", top_k);
    kernel.for_all = r.shared;
    kernel.x_ld = operands.u32("the stride of x", r.x.stride[0]);
    kernel.gate_ld = operands.u32("the stride of gate", r.gate.stride[0]);
    kernel.codes_ld = operands.u32("the stride of codes", codes.codes.stride[0]);
    kernel.scales_ld = operands.u32("the stride of scales", codes.scales.stride[0]);
    kernel.has_bias = r.bias.buffer ? 1 : 0;
    kernel.has_count = r.x.row_count ? 1 : 0;
    kernel.gain_f32 = r.gain.dtype == DType::F32 ? 1 : 0;
    kernel.powers = codes.recipe.rule == ScaleRule::PowerOfTwo ? 1 : 0;
    kernel.softmax = o.score == ops::RouterOptions::Score::Softmax ? 1 : 0;
    kernel.normalise = o.normalise ? 1 : 0;
    kernel.groups = o.groups;
    kernel.group_top_k = o.group_top_k;
    kernel.group_score_top = o.group_score_top;
    kernel.eps = r.eps;
    kernel.route_scale = o.route_scale;
    recording.dispatch(kernel, {operands.grid("tokens", tokens), 1, 1});
}

} // namespace bellows::fp8
