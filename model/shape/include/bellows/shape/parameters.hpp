// SPDX-License-Identifier: MIT
#pragma once

// The canonical list of a model's parameters. Checkpoints, sharding, initial values and the
// optimiser all follow this list, so that a parameter has one name, one shape and one place in
// every layout of ranks. Pure functions of the configuration: every rank gets the same list.

#include <bellows/shape/config.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows {

enum class ParameterKind : std::uint8_t {
    Embedding,  ///< [vocabulary, hidden]; also the head when embeddings are tied
    Head,       ///< [vocabulary, hidden]
    Norm,       ///< an RMSNorm gain; layer -1: the final norm
    Attention,  ///< a projection of the attention
    Ffn,        ///< a dense layer's FFN or the shared experts
    Expert,     ///< one routed expert's matrix; expert() tells which
    Projection, ///< [hidden, 2 hidden]: of an MTP module
    Router,     ///< [routed_experts, hidden]
    RouterBias, ///< [routed_experts]; moved by the balance rule, never by a gradient
};

const char* to_string(ParameterKind kind) noexcept;

/// Matrices are [out_features, in_features] row-major: y = x * transpose(W). A `gate_up_proj` holds
/// the gate's ffn rows first, then the up projection's.
struct ParameterInfo {
    std::string name; ///< stable, e.g. "model.layers.3.mlp.experts.5.down_proj.weight"
    std::vector<std::uint64_t> shape; ///< [out, in], or [size] for gains and biases
    ParameterKind kind = ParameterKind::Attention;
    std::int64_t layer = -1;  ///< -1: embedding, final norm, head
    std::int64_t expert = -1; ///< global index of a routed expert, else -1
    double init_mean = 0;
    double init_std = 0;
    bool weight_decay = false; ///< matrices: yes; gains and biases: no
    /// The last stage has the embedding as well: it is the head, too, or MTP modules use it.
    bool tied = false;
    /// It is tied, and one rank has both ends of the model: each end has a gradient of its own
    /// there, and the optimiser takes their sum (parameters_of_rank()).
    bool both_ends = false;

    std::uint64_t size() const noexcept;
    bool trainable() const noexcept { return kind != ParameterKind::RouterBias; }
};

/// Whether a store keeps it in f32 whatever the activations are: gains and router biases.
bool kept_in_f32(const ParameterInfo& info) noexcept;

/// What weights are to linear layers: those of attention, FFNs and experts.
bool is_linear(const ParameterInfo& info) noexcept;

/// All parameters in the order of the forward pass: embedding; per layer input norm, attention,
/// second norm, FFN or router, experts ascending, shared experts; final norm; head unless tied;
/// per MTP module norms of the embedding and of the state, projection, its layer, last norm.
std::vector<ParameterInfo> parameters(const ModelConfig& config);

struct ParameterCount {
    std::uint64_t total = 0;     ///< everything a checkpoint holds, router biases included
    std::uint64_t active = 0;    ///< what one token uses: total without unchosen experts
    std::uint64_t embedding = 0; ///< table and head
    std::uint64_t attention_per_layer = 0; ///< projections and the gains on the latents
    std::uint64_t dense_ffn_per_layer = 0;
    std::uint64_t expert = 0;        ///< one routed expert
    std::uint64_t moe_per_layer = 0; ///< routed and shared experts, router, bias
};

ParameterCount count_parameters(const ModelConfig& config);

/// Floating-point operations of forward and backward per token in sequences of the given length: 6
/// per active matrix element plus causal attention; recomputation, norms and the embedding do not
/// count. flops.hpp has them by part.
double training_flops_per_token(const ModelConfig& config, std::uint64_t sequence);

/// A parameter's values before the first step: a function of its name and the seed alone, hence the
/// same in every layout of ranks and, being integer arithmetic, on every machine. Approximately
/// normal (a sum of twelve uniforms, so within six standard deviations). Size: info.size().
std::vector<float> initial_values(const ParameterInfo& info, std::uint64_t seed);
/// Elements first .. first + values.size() of them.
void fill_initial_values(const ParameterInfo& info, std::uint64_t seed, std::span<float> values,
                         std::uint64_t first = 0);

} // namespace bellows
