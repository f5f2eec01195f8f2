// SPDX-License-Identifier: MIT
#pragma once

// The last layer of a model: logits = W * RMSNorm(x), and the softmax cross-entropy against the
// targets with its gradient. Nodes: HEAD(F), HEAD(B), HEAD(W); HEAD(W) adds to ParameterStore's
// gradients and reads the slot's x as well. Logits are f32 whatever the activations' type. A module
// of multi-token prediction ends with such a layer, too, with a norm of its own and the model's
// matrix; there nodes are MTP_HEAD(F) and so on. One thread at a time.

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace bellows {

/// The caller owns the tensors.
struct HeadSlotDesc {
    std::string name;   ///< e.g. "head slot 1"
    TensorView x;       ///< [tokens, hidden] in the activations' type
    TensorView dx;      ///< out, by HEAD(B): gradient of x
    TensorView targets; ///< [tokens] u32; ops::kIgnoreTarget: no loss there
    /// Out, by HEAD(F): [2] f32 whose sum is the loss in nats, summed over the tokens that have a
    /// target, unscaled.
    TensorView loss;
    /// Of the gradient, usually 1 / (tokens with a target in the global batch): then the sum of the
    /// gradients of all micro-batches and ranks is that of the mean loss.
    float scale = 1;
    /// [1] f32, which the gradient is multiplied with, too, when HEAD(F) runs; left out: 1.
    TensorView factor{};
    /// An MTP module takes RMSNorm(x): its input-gradient node runs before HEAD(B) and leaves its
    /// gradient there, to which HEAD(B) adds.
    bool module_behind = false;
};

struct HeadSlotParts {
    std::unique_ptr<LayerSlot> slot;
    /// RMSNorm(x), written by HEAD(F), and its gradient: both [tokens, hidden] in the activations'
    /// type, in the slot's memory.
    TensorView normed, normed_gradient;
};

class Head final {
public:
    /// All must outlive it and its slots. The matrix is the embedding's where config says so.
    /// module: the number of an MTP module's layer, which it ends; without: of the model.
    Head(const ModelConfig& config, ParameterStore& parameters, LayerScratch& scratch,
         std::optional<std::uint64_t> module = std::nullopt);
    ~Head();

    HeadSlotParts create_slot(const HeadSlotDesc& desc) const;
    /// A slot with HEAD(F) alone, which writes logits: [rows of x, vocabulary] f32.
    std::unique_ptr<LayerSlot> create_logits_slot(const std::string& name, const TensorView& x,
                                                  const TensorView& logits) const;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
