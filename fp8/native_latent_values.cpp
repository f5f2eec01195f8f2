// SPDX-License-Identifier: MIT
#include "native.hpp"
#include "operands.hpp"

#include <bellows/fp8/latent_values.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::fp8 {

namespace {

using Kernel = kernels::HopperLatentValues;

constexpr std::uint64_t kValues = 128, kMostLatent = 512;

bool begins_at_16(const TensorView& view) {
    bool at_16 = view.dtype == DType::BF16 && view.rank == 3 && view.buffer.offset % 16 == 0 &&
                 view.stride[2] == 1;
    for (std::uint32_t i = 0; i < 2 && at_16; ++i)
        at_16 = view.stride[i] % 8 == 0;
    return at_16;
}

/// Rows of a workgroup: as few as still leave each processor one.
std::uint64_t rows_at_once(const Device& device, std::uint64_t rows, std::uint64_t heads) {
    constexpr std::uint64_t kFewest = 8, kMost = 32, kUsual = 132;
    const std::uint64_t processors =
        device.info().processors != 0 ? device.info().processors : kUsual;
    std::uint64_t at_once = kFewest;
    while (at_once < kMost && div_up(rows, at_once) * heads > processors)
        at_once *= 2;
    return at_once;
}

} // namespace

std::string why_not_latent_values(const Device& device, const TensorView& sums,
                                  const TensorView& weights, const Quantized& codes) {
    const std::string lacking =
        device.why_not(Kernel::info(), static_cast<std::uint32_t>(Kernel::Variant::rows_8));
    if (!lacking.empty())
        return lacking;
    const auto all = [&] {
        return "sums are " + describe(sums) + ", weights are " + describe(weights) +
               ", codes are " + describe(Operand(codes));
    };
    if (!begins_at_16(sums) || !begins_at_16(weights))
        return all() + "; it takes bf16 that begins at multiples of 16 bytes";
    const std::uint64_t rows = sums.extent[0], heads = sums.extent[1], latent = sums.extent[2];
    return weights.extent[0] == heads && weights.extent[1] == kValues &&
                   weights.extent[2] == latent && latent % 128 == 0 && latent > 0 &&
                   latent <= kMostLatent && codes.codes.rank == 2 &&
                   codes.codes.extent[0] == rows && codes.codes.extent[1] == heads * kValues &&
                   codes.recipe.format == Format::E4M3 && codes.recipe.blocks == Blocks::Rows128
               ? ""
               : all() + "; it takes 128 values of a head and latents of 128 to 512";
}

void latent_values(Recording& recording, const ops::PagedParts& parts, const TensorView& sums,
                   const TensorView& weights, const Quantized& codes) {
    const Operands operands("fp8::latent_values");
    const std::string lacking = why_not_latent_values(recording.device(), sums, weights, codes);
    operands.require(lacking.empty(), lacking);
    const std::uint64_t rows = sums.extent[0], heads = sums.extent[1], latent = sums.extent[2];
    const TensorView& p = parts.sums;
    operands.require(p.rank == 3 && p.dtype == DType::F32 && p.extent[1] == heads &&
                         p.extent[2] == latent && p.buffer.offset % 16 == 0 &&
                         parts.log_of_sums.num_elements() == p.extent[0] * heads &&
                         parts.rows.num_elements() >= 2 * rows && parts.rows.buffer.offset % 8 == 0,
                     "parts are " + describe(p) + " of " + describe(parts.rows) + ", sums are " +
                         describe(sums));
    if (rows == 0 || heads == 0)
        return;
    const std::uint64_t at_once = rows_at_once(recording.device(), rows, heads);
    Kernel kernel;
    kernel.variant = at_once == 8    ? Kernel::Variant::rows_8
                     : at_once == 16 ? Kernel::Variant::rows_16
                                     : Kernel::Variant::rows_32;
    kernel.parts = parts.rows.buffer;
    kernel.partial = p.buffer;
    kernel.partial_lse = parts.log_of_sums.buffer;
    kernel.sums = sums.buffer;
    kernel.weights = weights.buffer;
    kernel.codes = codes.codes.buffer;
    kernel.scales = codes.scales.buffer;
    kernel.rows = operands.u32("rows", rows);
    kernel.heads = operands.u32("heads", heads);
    kernel.latent = operands.u32("latent", latent);
    kernel.sums_row = operands.u32("the stride of sums", sums.stride[0]);
    kernel.sums_head = operands.u32("the stride of sums", sums.stride[1]);
    kernel.weights_row = operands.u32("the stride of weights", weights.stride[1]);
    kernel.weights_head = operands.u32("the stride of weights", weights.stride[0]);
    kernel.codes_ld = operands.u32("the stride of codes", codes.codes.stride[0]);
    kernel.scales_ld = operands.u32("the stride of scales", codes.scales.stride[0]);
    kernel.powers = codes.recipe.rule == ScaleRule::PowerOfTwo ? 1 : 0;
    recording.dispatch(
        kernel, {operands.grid("rows", div_up(rows, at_once)), operands.grid("heads", heads), 1});
}

} // namespace bellows::fp8
