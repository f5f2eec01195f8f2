// SPDX-License-Identifier: MIT
#pragma once

// This is what the slots of all layers share. A slot makes the tensors and the nodes that its kind
// of layer declares (shape/layer.hpp): the layer asks for tensors by their names, and gives each
// declared node its work, in the order of the declaration. A compute node is one recording; what
// lives from node to node belongs to the slot, all else stands in the stage's scratch. Used by the
// layers' own .cpp files.

#include "kept_swiglu.hpp"

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/shape/layer.hpp>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// Returns the shape of a slot with so many tokens in sequences of `seq`.
SlotShape slot_shape(const ParameterStore& parameters, std::uint64_t tokens, std::uint64_t seq,
                     bool training);
SlotShape slot_shape(const ParameterStore& parameters, const SlotDesc& desc);

class RecordedSlot : public LayerSlot {
protected:
    /// kind: the name of its declaration. rows: makes the tensors whose rows arrive, in layers that
    /// have such.
    RecordedSlot(const char* kind, const ModelConfig& config, const SlotShape& shape,
                 Device& device, LayerScratch& scratch, std::string name,
                 ExchangeHandle* rows = nullptr);

    const SlotShape& shape() const noexcept { return shape_; }
    bool fp8() const noexcept { return shape_.fp8(); }
    bool has(const std::string& tensor) const { return kept_.count(tensor) != 0; }
    /// Returns a declared tensor that is not FP8. This and the next ones throw Error{Internal} if
    /// none of that name is declared.
    const TensorView& tensor(const std::string& name) const;
    /// Returns a declared tensor, FP8 or not.
    LinearRows rows(const std::string& name) const;
    /// Returns a declared tensor that is FP8.
    const fp8::Quantized& codes(const std::string& name) const;
    /// Returns the SwiGLU whose tensors' names begin with `prefix`.
    KeptSwiglu swiglu(const std::string& prefix) const;

    /// Records `work` as the next declared node, which has that name.
    void record(const std::string& name, const LayerScratch::Work& work);
    /// Hands the next declared node, one of the exchange, in by `submit`.
    void add_exchange(const char* name, std::function<TimePoint()> submit);

    /// Makes memory of this slot whose size depends on the device: no declaration can know it.
    BufferView workspace(const char* what, std::uint64_t bytes);

private:
    struct Kept {
        TensorView values;
        std::optional<fp8::Quantized> codes;
    };

    BufferView make_memory(const std::string& what, std::uint64_t bytes, MemoryCategory category);
    Kept make(const BufferInfo& info);
    Kept make_rows(const BufferInfo& info, ExchangeHandle& rows);
    const Kept& kept(const std::string& name) const;
    NodeInfo next_node(const std::string& name);

    SlotShape shape_;
    Device& device_;
    LayerScratch& scratch_;
    std::string name_;
    std::vector<Buffer> buffers_;
    std::map<std::string, Kept> kept_;
    std::vector<NodeInfo> declared_;
    std::size_t recorded_ = 0; ///< of declared_
};

} // namespace bellows
