// SPDX-License-Identifier: MIT
#pragma once

// The shape of a language model of the DeepSeek, Llama or Qwen3 kind: a transformer with multi-head
// latent attention (MLA) or grouped-query attention (GQA), dense SwiGLU layers first and
// mixture-of-experts (MoE) layers after them, if there are any. A plain value, read from the
// `[model]` table of a TOML file; every rank reads the same one.
// Functions here touch no device and may be called from any thread.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// How the router turns logits into scores: independently (V3) or over all experts (V2).
enum class ScoreFunction : std::uint8_t { Sigmoid, Softmax };

/// What the groups that a token may use are chosen by: the highest score in a group (V2), or the
/// sum of its two highest (V3), each with the router's bias. Auto: TopTwo with sigmoid scores, Max
/// with softmax.
enum class GroupScore : std::uint8_t { Auto, Max, TopTwo };

/// Mla: keys and values come from a latent vector of the token (DeepSeek). Gqa: kv_heads heads of
/// keys and values, each used by heads / kv_heads heads of queries (Llama, Qwen3).
enum class AttentionKind : std::uint8_t { Mla, Gqa };

/// How rotary angles are stretched for texts longer than those of the first training. None: they
/// are not.
enum class RopeScaling : std::uint8_t { None, Yarn, Llama3 };

/// Which tokens and which choices the counts of the balance loss are of.
/// Sequence: each sequence; the top_k of the scores alone, without bias and groups (V3).
/// Expert: each sequence; the choices as they were made (V2).
/// MicroBatch: the micro-batch of the rank; the top_k of the scores alone.
/// Global: the rank's micro-batches of the step so far, this one included; the top_k of the scores
/// alone.
enum class BalanceLossKind : std::uint8_t { Sequence, Expert, MicroBatch, Global };

/// What the choices of a micro-batch are dropped beyond the capacity of: Device: a device of the
/// losses of devices (V2). Expert: an expert (Switch).
enum class CapacityOf : std::uint8_t { Device, Expert };

const char* to_string(ScoreFunction function) noexcept;
const char* to_string(GroupScore score) noexcept;
const char* to_string(BalanceLossKind kind) noexcept;
const char* to_string(CapacityOf of) noexcept;
const char* to_string(AttentionKind kind) noexcept;
const char* to_string(RopeScaling scaling) noexcept;

/// Field names are the keys of the `[model]` table. Sizes count elements.
struct ModelConfig {
    std::uint64_t vocabulary = 0;
    std::uint64_t hidden = 0;
    std::uint64_t layers = 0;       ///< in total
    std::uint64_t dense_layers = 0; ///< the first so many have a dense FFN instead of experts
    /// Modules of multi-token prediction (MTP) behind the head. The first predicts the token behind
    /// the next one, and each further module one token more. Each has a layer of its own, whose
    /// number follows on that of the last layer.
    std::uint64_t mtp_depth = 0;

    AttentionKind attention = AttentionKind::Mla;
    std::uint64_t heads = 0; ///< of queries
    // With MLA:
    std::uint64_t q_lora_rank = 0; ///< 0: one full query projection instead of the low-rank pair
    std::uint64_t kv_lora_rank = 0;
    std::uint64_t qk_nope_head_dim = 0; ///< per head, without position
    std::uint64_t qk_rope_head_dim = 0; ///< per head in q, shared by all heads in k; rotated
    std::uint64_t v_head_dim = 0;
    double latent_norm_eps = 0; ///< of the norms of latents; 0: norm_eps
    // With GQA:
    std::uint64_t kv_heads = 0; ///< of keys and of values; divides heads
    std::uint64_t head_dim = 0; ///< of queries, keys and values; rotated as a whole
    bool qk_norm = false;       ///< RMSNorm of every head's query and key before the rotation

    double rope_theta = 10000;
    RopeScaling rope_scaling = RopeScaling::None;
    double rope_factor = 1; ///< how much longer texts may be than rope_original_context
    std::uint64_t rope_original_context = 0; ///< tokens of the first training's texts
    // With YaRN:
    double rope_beta_fast = 32; ///< pairs that turn more often within that context keep their speed
    double rope_beta_slow = 1;  ///< pairs that turn less often are slowed down by rope_factor
    bool rope_truncate = true;  ///< the borders between them are whole numbers
    double rope_mscale = 0;     ///< both 0: queries and keys take 0.1 ln(rope_factor) + 1,
    double rope_mscale_all_dim = 0; ///< or rope_attention_factor; see rope_amplitude()
    double rope_attention_factor = 0;
    // With Llama-3's scaling: wave lengths of rope_original_context over these.
    double rope_low_freq_factor = 1;
    double rope_high_freq_factor = 4;
    std::uint64_t max_context = 0; ///< tokens a text may have, for who uses the model; 0: unknown

    std::uint64_t dense_ffn = 0;
    std::uint64_t moe_ffn = 0; ///< of one expert, routed or shared
    std::uint64_t routed_experts = 0;
    std::uint64_t shared_experts = 0; ///< fused into one FFN of shared_experts * moe_ffn
    std::uint64_t top_k = 0;          ///< routed experts per token
    std::uint64_t n_group = 1;        ///< experts are divided into so many equal groups ...
    std::uint64_t topk_group = 1;     ///< ... and a token may only use so many of them
    GroupScore group_score = GroupScore::Auto;
    ScoreFunction score_function = ScoreFunction::Sigmoid;
    bool normalize_top_k = true; ///< the chosen scores are divided by their sum
    double route_scale = 1;      ///< and multiplied by this
    bool router_bias = true;     ///< a bias per expert that takes part in the choice only
    double bias_update_rate = 0.001;
    std::uint64_t bias_update_steps = 0; ///< after so many steps the bias stays; 0: it never does

    /// Losses of the router (docs/balance.md): their gradients are added in the router's, and
    /// reported losses stay the cross-entropy alone. Each of them is off with a weight of 0.
    BalanceLossKind balance_loss = BalanceLossKind::Sequence;
    double balance_loss_alpha = 0;       ///< of the experts' loads
    double device_loss_alpha = 0;        ///< of the loads of devices, groups of experts
    double communication_loss_alpha = 0; ///< of the tokens that devices receive
    /// Experts are divided into so many devices for these two; 0: n_group. The number is the
    /// model's: it does not change with the ranks that train it.
    std::uint64_t balance_devices = 0;
    double router_z_loss = 0; ///< weight of the mean square of the logits' logsumexp
    /// In training, of a rank's micro-batch: choices beyond so many times the mean load are
    /// dropped, those of the lowest scores; 0: none ever is.
    double capacity_factor = 0;
    CapacityOf capacity_of = CapacityOf::Device;
    /// Share of the sequences whose choices are never dropped; they take their room first.
    double capacity_spares = 0;

    double norm_eps = 1e-6;
    bool tied_embeddings = false; ///< the output head is the embedding table
    double init_std = 0.02;       ///< of every matrix; gains start at 1, the router bias at 0
    double head_init_std = 0;     ///< of an untied output head, where it differs; 0: init_std

    bool operator==(const ModelConfig&) const = default;

    bool is_mla() const noexcept { return attention == AttentionKind::Mla; }
    /// Of one head's query, which is as long as its key.
    std::uint64_t qk_head_dim() const noexcept {
        return is_mla() ? qk_nope_head_dim + qk_rope_head_dim : head_dim;
    }
    /// Of one head's value.
    std::uint64_t value_head_dim() const noexcept { return is_mla() ? v_head_dim : head_dim; }
    /// How many elements of a head's query and key are rotated.
    std::uint64_t rope_head_dim() const noexcept { return is_mla() ? qk_rope_head_dim : head_dim; }
    /// Max or TopTwo.
    GroupScore group_score_used() const noexcept;
    /// Of the device and communication losses, and to how many of them a token goes at most.
    std::uint64_t devices_used() const noexcept;
    std::uint64_t devices_per_token() const noexcept;
    /// Experts are divided into so many equal groups, each with a capacity.
    std::uint64_t capacity_groups() const noexcept {
        return capacity_of == CapacityOf::Expert ? routed_experts : devices_used();
    }
    /// Choices that such a group takes of so many tokens.
    std::uint64_t capacity(std::uint64_t tokens) const noexcept;
    /// Whether a sequence is one of the capacity_spares, by its number in the run: the same in
    /// every layout.
    bool spares(std::uint64_t sequence) const noexcept;
    bool has_device_losses() const noexcept {
        return device_loss_alpha > 0 || communication_loss_alpha > 0;
    }
    bool has_balance_loss() const noexcept { return balance_loss_alpha > 0 || has_device_losses(); }
    /// Whether its counts are of single sequences, not of whole micro-batches.
    bool balances_sequences() const noexcept {
        return balance_loss == BalanceLossKind::Sequence || balance_loss == BalanceLossKind::Expert;
    }
    /// How many counts it takes for a run of tokens: of experts, of devices twice, of tokens.
    std::uint64_t balance_columns() const noexcept {
        return routed_experts + (has_device_losses() ? 2 * devices_used() : 0) +
               (balance_loss == BalanceLossKind::Global ? 1 : 0);
    }
    /// Whether counts of the scores alone may differ from those of the choices.
    bool limits_choices() const noexcept { return router_bias || topk_group < n_group; }
    double latent_eps() const noexcept { return latent_norm_eps > 0 ? latent_norm_eps : norm_eps; }
    std::uint64_t shared_ffn() const noexcept { return shared_experts * moe_ffn; }
    /// Layers with those of the MTP modules.
    std::uint64_t all_layers() const noexcept { return layers + mtp_depth; }
    /// Whether a layer has experts. A module's layer has, where any other layer has.
    bool is_moe(std::uint64_t layer) const noexcept {
        return dense_layers < layers && layer >= dense_layers;
    }
    std::uint64_t moe_layers() const noexcept {
        return dense_layers < layers ? all_layers() - dense_layers : 0;
    }
    /// Whether the last stage has the embedding, too: as its head, or for MTP modules.
    bool embedding_at_both_ends() const noexcept { return tied_embeddings || mtp_depth > 0; }
    /// What query·key products are multiplied with: 1/sqrt(qk_head_dim), with YaRN and
    /// rope_mscale_all_dim times the square of its amplitude (see rope.hpp).
    double attention_scale() const noexcept;
};

/// Checks every number against its range and against the others.
/// Throws Error{InvalidArgument} that names the field, its value and what would be accepted.
void validate(const ModelConfig& config);

/// Reads the `[model]` table of `text` and validates it. `source` names the text in errors, which
/// read `source:line: ...`. Top-level tables named in `other_tables` are left to other readers; any
/// other key, at the top or in `[model]`, throws Error{InvalidArgument} naming the nearest valid
/// one.
ModelConfig parse_model_config(std::string_view text, std::string_view source,
                               const std::vector<std::string>& other_tables = {"train"});

/// The same for a file of at most 1 MiB. Throws Error{Io} if it cannot be read.
ModelConfig load_model_config(const std::filesystem::path& file,
                              const std::vector<std::string>& other_tables = {"train"});

/// The `[model]` table with every field, which parse_model_config() reads back to an equal value.
std::string to_toml(const ModelConfig& config);

/// For the end of an error: `; did you mean "hidden"?` where a candidate becomes `word` by few
/// edits of single characters, else "; there are: ..." with all of them.
std::string suggestion(std::string_view word, const std::vector<std::string>& candidates);

} // namespace bellows
