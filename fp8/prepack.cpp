// SPDX-License-Identifier: MIT
#include "native.hpp"
#include "operands.hpp"
#include "packed.hpp"

#include <bellows/fp8/gemm.hpp>

#include <algorithm>

namespace bellows::fp8 {

std::uint64_t prepacked_bytes(const Device& device, const Quantized& b, GemmForm form,
                              Variant variant) {
    if (variant == Variant::Native)
        return why_not_native(device).empty() ? native_ahead_bytes(b, form) : 0;
    return variant == Variant::Packed ? packed_ahead_bytes(device, b) : 0;
}

Operand prepack(Recording& recording, const Quantized& b, GemmForm form, BufferView memory,
                Variant variant) {
    return prepack(recording, b, form, memory, 0,
                   std::max<std::uint64_t>(extents_of(b.codes).batch, 1), variant);
}

Operand prepack(Recording& recording, const Quantized& b, GemmForm form, BufferView memory,
                std::uint64_t first, std::uint64_t count, Variant variant) {
    const Operands operands("prepack");
    const Device& device = recording.device();
    const Extents extents = extents_of(b.codes);
    const std::uint64_t batch = std::max<std::uint64_t>(extents.batch, 1);
    operands.require(first <= batch && count <= batch - first,
                     "groups [" + std::to_string(first) + ", +" + std::to_string(count) +
                         ") of b, which is " + describe(Operand(b)));
    operands.require(form != GemmForm::TN, "operands of tn change from product to product");
    const std::uint64_t bytes = prepacked_bytes(device, b, form, variant);
    const std::string lacking = why_not(device, variant);
    operands.require(bytes != 0, lacking.empty()
                                     ? std::string("products of the variant ") +
                                           to_string(variant) + " read these weights as they stand"
                                     : lacking);
    operands.workspace(memory, bytes);
    Operand result(b);
    result.prepacked = Prepacked{memory, form, variant};
    if (extents.rows == 0 || extents.columns == 0 || count == 0)
        return result;
    if (variant == Variant::Native)
        turn_ahead(recording, operands, b, memory, first, count);
    else
        pack_ahead(recording, operands, b, form, memory, first, count);
    return result;
}

} // namespace bellows::fp8
