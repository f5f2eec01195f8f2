// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

SlotShape slot_shape(const ParameterStore& parameters, std::uint64_t tokens, std::uint64_t seq,
                     bool training) {
    return {.tokens = tokens,
            .seq = seq,
            .activation = parameters.activation(),
            .linear = parameters.linear_precision(),
            .training = training,
            .f32_scales = parameters.has_f32_scales()};
}

SlotShape slot_shape(const ParameterStore& parameters, const SlotDesc& desc) {
    return slot_shape(parameters, desc.tokens, desc.seq, desc.tensors.training());
}

RecordedSlot::RecordedSlot(const char* kind, const ModelConfig& config, const SlotShape& shape,
                           Device& device, LayerScratch& scratch, std::string name,
                           ExchangeHandle* rows)
    : shape_(shape), device_(device), scratch_(scratch), name_(std::move(name)) {
    const LayerKind& declaration = layer_kind(kind);
    for (const BufferInfo& info : declaration.buffers(config, shape)) {
        if (info.rows == RowCount::Received)
            continue;
        if (info.rows == RowCount::Fixed)
            kept_.emplace(info.name, make(info));
        else if (rows != nullptr)
            kept_.emplace(info.name, make_rows(info, *rows));
        else
            throw Error(ErrorCode::Internal,
                        name_ + ": rows arrive for " + info.name + ", but there is no exchange");
    }
    declared_ = declaration.nodes(config, shape);
}

BufferView RecordedSlot::make_memory(const std::string& what, std::uint64_t bytes,
                                     MemoryCategory category) {
    return buffers_
        .emplace_back(device_, BufferDesc{.name = name_ + " " + what,
                                          .bytes = std::max<std::uint64_t>(bytes, 16),
                                          .category = category})
        .view();
}

RecordedSlot::Kept RecordedSlot::make(const BufferInfo& info) {
    const BufferView memory = make_memory(info.name, info.bytes(0), info.category);
    if (info.storage == Storage::Plain)
        return {TensorView::contiguous(memory, info.dtype, info.extents), {}};
    const fp8::Recipe& recipe = info.storage == Storage::Fp8Rows ? kRowsRecipe : kColumnsRecipe;
    return {{}, fp8::make_quantized(memory, recipe, {info.extents[0], info.extents[1]})};
}

/// Codes have memory for the rows that arrive, as have the scales of rows; those of columns for all
/// that could.
RecordedSlot::Kept RecordedSlot::make_rows(const BufferInfo& info, ExchangeHandle& rows) {
    const std::uint64_t columns = info.extents.at(1);
    if (info.storage == Storage::Plain)
        return {rows.add_row_tensor(info.name, info.dtype, columns, info.category), {}};
    const std::uint64_t pitch = fp8::codes_shape({1, columns}).stride[0];
    const bool by_row = info.storage == Storage::Fp8Rows;
    const fp8::Recipe& recipe = by_row ? kRowsRecipe : kColumnsRecipe;
    TensorView codes =
        rows.add_row_tensor(info.name, fp8::dtype_of(recipe.format), pitch, info.category);
    codes.extent[1] = columns;
    const std::string scales = info.name + " scales";
    if (by_row) {
        fp8::Quantized kept;
        kept.recipe = recipe;
        kept.codes = codes;
        kept.scales = rows.add_row_tensor(
            scales, DType::F32, fp8::scales_shape(recipe, {1, columns}).extent[1], info.category);
        return {{}, kept};
    }
    const std::uint64_t capacity = rows.capacity();
    return {{},
            fp8::make_quantized(
                codes.buffer,
                make_memory(scales, fp8::scales_bytes(recipe, {capacity, columns}, info.groups),
                            info.category),
                recipe, {capacity, columns}, rows.expert_offsets())};
}

const RecordedSlot::Kept& RecordedSlot::kept(const std::string& name) const {
    const auto found = kept_.find(name);
    if (found == kept_.end())
        throw Error(ErrorCode::Internal, name_ + ": no tensor is declared as " + name);
    return found->second;
}

const TensorView& RecordedSlot::tensor(const std::string& name) const {
    const Kept& found = kept(name);
    if (found.codes)
        throw Error(ErrorCode::Internal, name_ + ": " + name + " is declared as codes");
    return found.values;
}

LinearRows RecordedSlot::rows(const std::string& name) const {
    const Kept& found = kept(name);
    return found.codes ? LinearRows(*found.codes) : LinearRows(found.values);
}

const fp8::Quantized& RecordedSlot::codes(const std::string& name) const {
    const Kept& found = kept(name);
    if (!found.codes)
        throw Error(ErrorCode::Internal, name_ + ": " + name + " is not declared as codes");
    return *found.codes;
}

KeptSwiglu RecordedSlot::swiglu(const std::string& prefix) const {
    if (!fp8())
        return {tensor(prefix + "gate and up"), tensor(prefix + "inner")};
    KeptSwiglu kept(shape_.activation, codes(prefix + "gate and up"));
    if (has(prefix + "gate and up gradient"))
        kept.keep_gradient(codes(prefix + "gate and up gradient"));
    return kept;
}

BufferView RecordedSlot::workspace(const char* what, std::uint64_t bytes) {
    return make_memory(what, bytes, MemoryCategory::Scratch);
}

NodeInfo RecordedSlot::next_node(const std::string& name) {
    if (recorded_ == declared_.size() || declared_[recorded_].name != name)
        throw Error(ErrorCode::Internal, name_ + ": " + name + " is not the next declared node");
    return declared_[recorded_++];
}

void RecordedSlot::record(const std::string& name, const LayerScratch::Work& work) {
    const NodeInfo node = next_node(name);
    add_recording(node, scratch_.record(node, name_ + " " + name, work));
}

void RecordedSlot::add_exchange(const char* name, std::function<TimePoint()> submit) {
    add_node({next_node(name), [submit = std::move(submit)](auto) { return submit(); }});
}

} // namespace bellows
