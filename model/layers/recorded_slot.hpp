// SPDX-License-Identifier: MIT
#pragma once

// What the slots of layers that run on one device share: every node is one recording, tensors that
// live from node to node belong to the slot, all else stands in the stage's scratch. Used by the
// layers' own .cpp files.

#include "kept_swiglu.hpp"

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>

#include <initializer_list>
#include <string>
#include <vector>

namespace bellows {

class RecordedSlot : public LayerSlot {
protected:
    RecordedSlot(Device& device, LayerScratch& scratch, std::string name)
        : device_(device), scratch_(scratch), name_(std::move(name)) {}

    /// A tensor of this slot.
    TensorView keep(const char* what, DType dtype, std::initializer_list<std::uint64_t> extents,
                    MemoryCategory category = MemoryCategory::Activations);
    /// What enters linear layers and is kept for their weight gradients: FP8 rows where these
    /// compute in FP8.
    LinearRows keep_rows(const char* what, const ParameterStore& parameters, std::uint64_t rows,
                         std::uint64_t columns);
    /// A gradient in 128 x 1 blocks, kept from the input-gradient node to the weight-gradient one.
    fp8::Quantized keep_gradient(const char* what, std::uint64_t rows, std::uint64_t columns);
    KeptSwiglu keep_swiglu(const ParameterStore& parameters, std::uint64_t rows, std::uint64_t ffn,
                           bool training);
    /// Records `work` as the node `name`.
    void record(NodeKind kind, const char* name, const LayerScratch::Work& work);

private:
    Device& device_;
    LayerScratch& scratch_;
    std::string name_;
    std::vector<Buffer> buffers_;
};

} // namespace bellows
