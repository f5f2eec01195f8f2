// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <algorithm>
#include <utility>

namespace bellows {

TensorView RecordedSlot::keep(const char* what, DType dtype,
                              std::initializer_list<std::uint64_t> extents,
                              MemoryCategory category) {
    std::uint64_t bytes = size_of(dtype);
    for (const std::uint64_t extent : extents)
        bytes *= extent;
    buffers_.emplace_back(device_, BufferDesc{.name = name_ + " " + what,
                                              .bytes = std::max<std::uint64_t>(bytes, 16),
                                              .category = category});
    return buffers_.back().tensor(dtype, extents);
}

LinearRows RecordedSlot::keep_rows(const char* what, const ParameterStore& parameters,
                                   std::uint64_t rows, std::uint64_t columns) {
    if (parameters.linear_precision() != LinearPrecision::Fp8)
        return keep(what, parameters.activation(), {rows, columns});
    const std::uint64_t bytes = fp8::quantized_bytes(kRowsRecipe, {rows, columns});
    return fp8::make_quantized(keep(what, DType::U8, {bytes}).buffer, kRowsRecipe, {rows, columns});
}

fp8::Quantized RecordedSlot::keep_gradient(const char* what, std::uint64_t rows,
                                           std::uint64_t columns) {
    const std::uint64_t bytes = fp8::quantized_bytes(kColumnsRecipe, {rows, columns});
    return fp8::make_quantized(keep(what, DType::U8, {bytes}, MemoryCategory::DeferredWgrad).buffer,
                               kColumnsRecipe, {rows, columns});
}

KeptSwiglu RecordedSlot::keep_swiglu(const ParameterStore& parameters, std::uint64_t rows,
                                     std::uint64_t ffn, bool training) {
    const DType act = parameters.activation();
    if (parameters.linear_precision() != LinearPrecision::Fp8)
        return {keep("gate and up", act, {rows, 2 * ffn}), keep("inner", act, {rows, ffn})};
    KeptSwiglu kept(act, *keep_rows("gate and up", parameters, rows, 2 * ffn).codes);
    if (training)
        kept.keep_gradient(keep_gradient("gate and up gradient", rows, 2 * ffn));
    return kept;
}

void RecordedSlot::record(NodeKind kind, const char* name, const LayerScratch::Work& work) {
    Node node{.name = name, .kind = kind};
    Recording made = scratch_.record(node, name_ + " " + name, work);
    add_recording(std::move(node), std::move(made));
}

} // namespace bellows
