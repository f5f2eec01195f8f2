// SPDX-License-Identifier: MIT
#include <bellows/shape/flops.hpp>
#include <bellows/shape/parameters.hpp>

namespace bellows {

namespace {

constexpr double kPerElement = 2; // a multiplication and an addition

/// Modules of multi-token prediction use the head once more each.
double passes_of_head(const ModelConfig& config) {
    return 1 + static_cast<double>(config.mtp_depth);
}

/// The part that a matrix belongs to; none for the embedding, which is looked up.
double FlopsByPart::* part_of(const ModelConfig& config, const ParameterInfo& matrix) {
    switch (matrix.kind) {
    case ParameterKind::Attention:
        return &FlopsByPart::attention_projections;
    case ParameterKind::Router:
        return &FlopsByPart::router;
    case ParameterKind::Expert:
        return &FlopsByPart::experts;
    case ParameterKind::Ffn:
        return config.is_moe(static_cast<std::uint64_t>(matrix.layer))
                   ? &FlopsByPart::shared_experts
                   : &FlopsByPart::dense_ffn;
    case ParameterKind::Head:
        return &FlopsByPart::head;
    case ParameterKind::Projection:
        return &FlopsByPart::mtp_projections;
    case ParameterKind::Embedding:
    case ParameterKind::Norm:
    case ParameterKind::RouterBias:
        break;
    }
    return nullptr;
}

/// Of how many of a token's kind of uses a matrix takes part in one.
double uses_of(const ModelConfig& config, const ParameterInfo& matrix) {
    if (matrix.kind == ParameterKind::Expert)
        return static_cast<double>(config.top_k) / static_cast<double>(config.routed_experts);
    return matrix.kind == ParameterKind::Head ? passes_of_head(config) : 1;
}

double keys_of(std::uint64_t length) noexcept {
    return static_cast<double>(length) * (static_cast<double>(length) + 1) / 2;
}

} // namespace

double mean_visible_keys(std::uint64_t length) noexcept {
    return mean_visible_keys(std::span(&length, 1));
}

double mean_visible_keys(std::span<const std::uint64_t> document_lengths) noexcept {
    double keys = 0, tokens = 0;
    for (const std::uint64_t length : document_lengths) {
        keys += keys_of(length);
        tokens += static_cast<double>(length);
    }
    return tokens > 0 ? keys / tokens : 0;
}

FlopsByPart forward_flops(const ModelConfig& config, double visible_keys, LayerTable kinds) {
    FlopsByPart flops;
    for (const ParameterInfo& info : parameters(config, kinds))
        if (double FlopsByPart::* const part = part_of(config, info);
            part != nullptr && info.shape.size() == 2)
            flops.*part += kPerElement * uses_of(config, info) * static_cast<double>(info.size());
    if (config.tied_embeddings)
        flops.head = kPerElement * passes_of_head(config) * static_cast<double>(config.vocabulary) *
                     static_cast<double>(config.hidden);
    for (const PlacedLayer& placed : placed_layers(config, 0, 1, kinds))
        flops.attention_core += placed.kind->other_flops(config, visible_keys);
    return flops;
}

double training_flops(const FlopsByPart& forward) noexcept {
    return 3 * forward.total();
}

double hardware_training_flops(const FlopsByPart& forward) noexcept {
    return 3 * forward.matrices() + 3.5 * forward.attention_core;
}

double training_flops_per_token(const ModelConfig& config, std::uint64_t sequence) {
    return training_flops_per_token(config, sequence, layer_kinds());
}

double training_flops_per_token(const ModelConfig& config, std::uint64_t sequence,
                                LayerTable kinds) {
    return training_flops(forward_flops(config, mean_visible_keys(sequence), kinds));
}

} // namespace bellows
