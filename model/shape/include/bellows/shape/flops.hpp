// SPDX-License-Identifier: MIT
#pragma once

// The floating-point operations that a model's formula takes, by part of the model. An element of a
// matrix takes two of them per token in the forward pass, a multiplication and an addition. Norms,
// rotations, softmax, the choice of experts and the look-up of embeddings do not count. These are
// pure functions of the configuration.

#include <bellows/shape/config.hpp>
#include <bellows/shape/layer.hpp>

#include <cstdint>
#include <span>

namespace bellows {

/// Floating-point operations of one token, or of a second, by part.
struct FlopsByPart {
    double attention_projections = 0; ///< of all layers: queries, keys, values, output
    double attention_core = 0;        ///< scores, and sums of values by them
    double router = 0;
    double experts = 0; ///< routed ones: the top_k that a token goes to
    double shared_experts = 0;
    double dense_ffn = 0;
    double head = 0;            ///< of the model and of each MTP module
    double mtp_projections = 0; ///< of the MTP modules: what makes the inputs of their layers

    double total() const noexcept { return matrices() + attention_core; }
    /// Returns what is products with weights.
    double matrices() const noexcept {
        return attention_projections + router + experts + shared_experts + dense_ffn + head +
               mtp_projections;
    }
    bool operator==(const FlopsByPart&) const = default;
};

/// Returns how many keys a token sees on average: its own and those before it in its document,
/// (length + 1) / 2. Of documents packed into one sequence this is the sum of length (length + 1) /
/// 2 over the documents, divided by the number of tokens. 0 without tokens.
double mean_visible_keys(std::uint64_t length) noexcept;
double mean_visible_keys(std::span<const std::uint64_t> document_lengths) noexcept;

/// Returns the operations of the forward pass per token, where a token sees so many keys.
/// mean_visible_keys(sequence) counts causal attention; a token that saw the whole sequence would
/// see `sequence` keys.
FlopsByPart forward_flops(const ModelConfig& config, double visible_keys,
                          LayerTable kinds = layer_kinds());

/// Returns the model FLOPs of training per token: three times the forward pass, as a product's two
/// gradients take as many operations each as the product. Work that is done again for the backward
/// pass does not count.
double training_flops(const FlopsByPart& forward) noexcept;

/// Returns the hardware FLOPs of training per token with flash attention, whose gradients take five
/// products for the two of the forward pass, as scores are computed again: 3 times the matrices and
/// 3.5 times the attention core. Other work that is done again does not count here, either.
double hardware_training_flops(const FlopsByPart& forward) noexcept;

} // namespace bellows
