// SPDX-License-Identifier: MIT
#include "app/options/config_text.hpp"

#include <bellows/base/error.hpp>

#include <map>
#include <sstream>
#include <string_view>

namespace bellows {

namespace {

const std::map<std::string_view, std::string_view> kModelComments = {
    {"vocabulary", "token ids, at least as many as the tokenizer has"},
    {"hidden", "width of the residual stream"},
    {"layers", "layers in all"},
    {"dense_layers", "the first of them, whose feed-forward network has no experts"},
    {"mtp_depth", "modules of multi-token prediction (MTP) behind the last layer"},
    {"attention", "\"mla\": multi-head latent attention; \"gqa\": grouped queries"},
    {"heads", "heads of attention, of the queries"},
    {"q_lora_rank", "width of the compressed queries; 0: queries are not compressed"},
    {"kv_lora_rank", "width of the compressed keys and values"},
    {"qk_nope_head_dim", "part of a head's query and key without position"},
    {"qk_rope_head_dim", "part that is rotated by its position"},
    {"v_head_dim", "a head's value"},
    {"latent_norm_eps", "of the norms of compressed queries, keys and values; 0: norm_eps"},
    {"kv_heads", "gqa: heads of the keys and values, a divisor of heads"},
    {"head_dim", "gqa: width of a head's query, key and value"},
    {"qk_norm", "gqa: whether each head's query and key are normalised"},
    {"rope_theta", "base of the rotation's frequencies"},
    {"rope_scaling", "for longer texts: \"none\", \"yarn\" or \"llama3\""},
    {"rope_factor", "how much longer texts may be than rope_original_context"},
    {"rope_original_context", "tokens of the texts before that"},
    {"rope_beta_fast", "yarn: turns in that context from which frequencies stay as they are"},
    {"rope_beta_slow", "yarn: turns up to which they are divided by rope_factor"},
    {"rope_truncate", "yarn: whether the borders between these are rounded to whole pairs"},
    {"rope_mscale", "yarn: factor of queries and keys, with rope_mscale_all_dim"},
    {"rope_mscale_all_dim", "yarn: factor of the products of queries and keys; 0: none"},
    {"rope_attention_factor", "yarn: factor of queries and keys without these; 0: by rope_factor"},
    {"rope_low_freq_factor", "llama3: turns up to which frequencies are divided by rope_factor"},
    {"rope_high_freq_factor", "llama3: turns from which they stay as they are"},
    {"max_context", "tokens that a text may have; 0: not known"},
    {"dense_ffn", "width of the feed-forward network of dense layers"},
    {"moe_ffn", "width of an expert"},
    {"routed_experts", "experts of a layer among which the router chooses"},
    {"shared_experts", "experts that every token takes"},
    {"top_k", "routed experts that a token takes"},
    {"n_group", "groups that the routed experts are divided into"},
    {"topk_group", "groups from which a token takes its experts"},
    {"group_score", "by which: \"max\" or \"top_two\" of its scores; \"auto\": by score_function"},
    {"score_function", "of the router: \"sigmoid\" or \"softmax\""},
    {"normalize_top_k", "whether the weights of a token's experts are made to sum to 1"},
    {"route_scale", "factor of these weights"},
    {"router_bias", "a bias per expert that takes part in the choice only"},
    {"bias_update_rate", "by which the biases move after each step towards an even load"},
    {"bias_update_steps", "steps after which the biases stay as they are; 0: they go on moving"},
    {"balance_loss",
     "what the balance losses count: \"sequence\", \"expert\", \"micro_batch\" or \"global\""},
    {"balance_loss_alpha", "weight of the loss that balances the experts"},
    {"device_loss_alpha", "weight of the loss that balances devices, groups of experts"},
    {"communication_loss_alpha", "weight of the loss that balances what tokens devices receive"},
    {"balance_devices", "devices of these two losses; 0: n_group"},
    {"router_z_loss", "weight of the mean square of the router logits' logsumexp"},
    {"capacity_factor", "training drops choices beyond so many times the mean load; 0: none"},
    {"capacity_of", "what has that load: \"device\" or \"expert\""},
    {"capacity_spares", "share of the sequences of which none is dropped"},
    {"norm_eps", "added under the root of RMSNorm"},
    {"tied_embeddings", "whether embedding and head share their weights"},
    {"init_std", "standard deviation of the first weights"},
    {"head_init_std", "the same of the head; 0: as init_std"},
};

const std::map<std::string_view, std::string_view> kTrainComments = {
    {"data", "text files and folders"},
    {"tokenizer", "\"bytes\", or a tokenizer's file or folder"},
    {"holdout", "share of the text, at its end, that is kept out of training"},
    {"eval_every",
     "steps from one look at the held-out text's loss to the next; 0: at the end only"},
    {"steps", "in total, resumed ones included"},
    {"seed", "of the weights and of the order of the data"},
    {"lr", "the highest learning rate, after the warm-up"},
    {"lr_min", "where the decay ends"},
    {"warmup_steps", "steps in which the learning rate rises to lr"},
    {"lr_schedule", "after the warm-up: \"cosine\", \"wsd\", \"step\" or \"constant\""},
    {"decay_start", "step up to which it stays at lr before it decays; 0: warmup_steps"},
    {"decay_steps", "step at which it has decayed to lr_min; 0: it stays"},
    {"lr_steps", "steps after which it is multiplied by a factor"},
    {"lr_factors", "the factors, or one for all"},
    {"beta1", "AdamW: decay of the first moment"},
    {"beta2", "AdamW: decay of the second moment"},
    {"adam_eps", "AdamW: added to the root of the second moment"},
    {"weight_decay", "AdamW: of matrices"},
    {"clip_norm", "longest gradient; a longer one is scaled down; 0: none is"},
    {"mtp_weight", "of the MTP modules' mean loss beside the model's"},
    {"mtp_late_weight", "the same from step mtp_late_from on"},
    {"mtp_late_from", "step from which mtp_late_weight holds; 0: none"},
    {"batch", "sequences per step, over all ranks"},
    {"batch_start", "the first step's batch, which grows to batch; 0: all steps have batch"},
    {"batch_increment", "by so many sequences at a time; 0: batch_start"},
    {"batch_ramp_steps", "the first steps, which have less than batch"},
    {"micro_batches", "per data-parallel rank, in a step of batch sequences"},
    {"seq", "tokens per sequence"},
    {"document_mask", "whether attention stays within documents where a sequence has several"},
    {"precision", "\"f32\", \"bf16\" or \"fp8\""},
    {"pipeline",
     "schedule of the pipeline: \"gpipe\", \"1f1b\", \"interleaved\", \"zb-h1\", \"zb-h2\", "
     "\"zb-v\", \"dualpipe\" or \"dualpipev\""},
    {"pairs", "how the pairs of dualpipe and dualpipev run: \"auto\", \"apart\" or a pattern"},
    {"pp", "ranks of the pipeline"},
    {"dp", "data-parallel ranks; 0: ranks / pp"},
    {"ep", "ranks that share one set of experts; 0: dp"},
    {"eplb_every", "steps from one placement of experts by their loads to the next; 0: none"},
    {"eplb_slots", "slots of a layer's experts, replicas among them; 0: as many as experts"},
    {"expert_sums", "\"ranked\", or \"per_choice\": the same bits wherever experts are"},
    {"device", "\"any\", \"gpu\", \"cpu\", an index or a UUID; several with commas between"},
    {"device_link", "\"auto\", \"off\" or \"host\": how ranks of a host exchange"},
    {"peak_tflops", "of a rank's device, to which its speed is compared; 0: it is measured"},
    {"checkpoint_every", "steps; 0: by time (checkpoint_minutes)"},
    {"checkpoint_minutes", "without checkpoint_every; 0: at the end only"},
    {"keep_checkpoints", "older ones are removed"},
    {"sample_tokens", "of the text that the finished model writes; 0: none"},
    {"tensorboard", "whether an event file of TensorBoard is written beside metrics.jsonl"},
    {"step_timeout", "seconds that a rank waits at most for its device or a peer that lives"},
};

void append(std::ostream& out, const std::string& toml,
            const std::map<std::string_view, std::string_view>& comments) {
    std::istringstream lines(toml);
    for (std::string line; std::getline(lines, line);) {
        const std::size_t end = line.find(" = ");
        if (end == std::string::npos) {
            out << line << "\n";
            continue;
        }
        const auto comment = comments.find(std::string_view(line).substr(0, end));
        if (comment == comments.end())
            throw Error(ErrorCode::Internal, "nothing says what the key " + line + " means");
        out << "\n# " << comment->second << "\n" << line << "\n";
    }
}

} // namespace

std::string commented_toml(const RunConfig& config, const std::string& name) {
    std::ostringstream out;
    out << "# All keys of " << in_quotes(name)
        << ". Keys may be left out; then they have their defaults.\n";
    append(out, to_toml(config.model), kModelComments);
    out << "\n";
    append(out, to_toml(config.train), kTrainComments);
    return out.str();
}

} // namespace bellows
