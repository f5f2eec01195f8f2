// SPDX-License-Identifier: MIT
#pragma once

// The whole model in f64: MLA or GQA, dense FFN, MoE layers and their backward, on one process.
// Parameters and gradients go by the names of bellows::parameters(); everything that a device
// implementation might want to compare along the way is kept.

#include "verify/reference/balance.hpp"
#include "verify/reference/moe_layer.hpp"
#include "verify/reference/ops.hpp"

#include <bellows/shape/config.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace bellows::reference {

/// Values or gradients by parameter name, each row-major in the parameter's shape.
using Parameters = std::map<std::string, Vector>;
/// Per MoE layer the chosen experts [tokens, top_k].
using Routing = std::map<std::size_t, std::vector<std::int32_t>>;

struct Batch {
    std::size_t batch = 0;
    std::size_t seq = 0;
    std::vector<std::int32_t> tokens;  ///< [batch, seq]
    std::vector<std::int32_t> targets; ///< [batch, seq], -1: no loss there
    std::size_t rows() const { return batch * seq; }
};

// --- parts ---------------------------------------------------------------------------------------

/// The position of each row in its sequence.
std::vector<std::int64_t> positions(std::size_t batch, std::size_t seq);
/// The rotated part of heads whose first `offset` columns are not rotated.
RopeShape rope_shape(const ModelConfig& config, std::size_t rows, std::size_t heads,
                     std::size_t head_dim, std::size_t offset);
AttentionShape attention_shape(const ModelConfig& config, std::size_t batch, std::size_t seq);

/// One attention block on normalised input; y is what is added to the residual stream.
struct Mla {
    Vector q_a;        ///< [rows, q_lora_rank], before its norm; empty without query low-rank
    RmsNorm q_latent;  ///< of q_a
    Vector q;          ///< [rows, heads, nope | rope], rotated
    Vector kv_a;       ///< [rows, kv_lora_rank | rope], the key's part not rotated yet
    RmsNorm kv_latent; ///< of kv_a's first kv_lora_rank columns
    Vector k; ///< [rows, heads, nope | rope], rotated; the rope part is the same in all heads
    Vector v; ///< [rows, heads, v_head_dim]
    Attention attention;
    Vector y; ///< [rows, hidden]
};
Mla mla_forward(View x, const ModelConfig& config, const Parameters& parameters,
                const std::string& prefix, std::size_t batch, std::size_t seq);
/// Returns dx and sets the gradients of the parameters whose names begin with prefix.
Vector mla_backward(View dy, View x, const Mla& forward, const ModelConfig& config,
                    const Parameters& parameters, const std::string& prefix, std::size_t batch,
                    std::size_t seq, Parameters& gradients);

/// The same with grouped queries.
struct Gqa {
    Vector q_in, k_in;      ///< [rows, heads or kv_heads, head_dim], as projected
    RmsNorm q_norm, k_norm; ///< of each head's; empty without norms
    Vector q, k;            ///< rotated
    Vector v;               ///< [rows, kv_heads, head_dim]
    Attention attention;
    Vector y; ///< [rows, hidden]
};
Gqa gqa_forward(View x, const ModelConfig& config, const Parameters& parameters,
                const std::string& prefix, std::size_t batch, std::size_t seq);
/// Returns dx and sets the gradients of the parameters whose names begin with prefix.
Vector gqa_backward(View dy, View x, const Gqa& forward, const ModelConfig& config,
                    const Parameters& parameters, const std::string& prefix, std::size_t batch,
                    std::size_t seq, Parameters& gradients);

/// The weights of an MoE layer by the names under prefix ("model.layers.3.mlp.").
MoeWeights moe_weights(const ModelConfig& config, const Parameters& parameters,
                       const std::string& prefix);

// --- the model -----------------------------------------------------------------------------------

struct LayerForward {
    Vector x; ///< [rows, hidden]: the residual stream that enters the layer
    RmsNorm norm1;
    Mla attention; ///< or, with grouped queries,
    Gqa grouped;
    Vector middle; ///< x + y of either
    RmsNorm norm2;
    Vector gate_up; ///< dense layers: [rows, 2·dense_ffn]
    MoeForward moe; ///< MoE layers, one rank
    BalanceLoss balance;
    ZLoss z_loss;
    Vector y; ///< what leaves
};

/// A module of multi-token prediction, with its loss.
struct ModuleForward {
    std::vector<std::int32_t> tokens, targets; ///< [batch, seq], targets as Batch has them
    Vector embedded, state;                    ///< what enters, [rows, hidden] both
    RmsNorm embedding_norm, state_norm;
    Vector both; ///< [rows, embedding | state], normalised
    LayerForward layer;
    RmsNorm norm;
    Vector logits, dlogits; ///< the gradient is of the model's whole loss
    double loss = 0;        ///< cross-entropy, mean over the tokens that have a target, nats
};

struct ModelForward {
    double loss = 0; ///< cross-entropy, mean over the tokens that have a target, nats
    // Summed over the layers; the gradients include them.
    double balance_loss = 0; ///< of experts, devices and communication
    double z_loss = 0;
    std::vector<LayerForward> layers;
    RmsNorm final_norm;
    Vector logits; ///< [rows, vocabulary]
    Vector dlogits;
    std::vector<ModuleForward> modules;
    Routing routing;
};

/// routing: what each MoE layer takes instead of its router's choice, or null. mtp_weight: of the
/// mean of the modules' losses in the loss that gradients are of. A batch of a model with modules
/// has the next token as each target.
ModelForward model_forward(const ModelConfig& config, const Parameters& parameters,
                           const Batch& batch, const Routing* routing = nullptr,
                           double mtp_weight = 0.3);

struct ModelGrads {
    Parameters parameters;       ///< all but the router biases
    std::vector<Vector> dhidden; ///< [layers + 1]: of each layer's x, then of the last layer's y
};
ModelGrads model_backward(const ModelConfig& config, const Parameters& parameters,
                          const Batch& batch, const ModelForward& forward);

} // namespace bellows::reference
