# SPDX-License-Identifier: MIT
"""Makes tiny random models of every architecture that Bellows reads, as transformers saves them,
with what transformers computes of them: tests/checkpoint/hf was made by this.

Usage: make_hf_models.py OUT [NAME ...]   needs torch, transformers (5.24 was used) and safetensors

OUT/<name>/ is a Hugging Face folder. Its reference.safetensors holds, computed in f32:
  tokens [2, 13]   two prompts of 12 tokens and what follows them
  logits [2, 12, vocabulary]
  loss []          mean cross-entropy of the tokens after the first, nats
  greedy [128]     the likeliest tokens after the first prompt
  mtp_losses [modules]   the same of each module of multi-token prediction, where there are some
  rows.<tensor>, columns.<tensor>   sums of the loss's gradient over each row and column of a
                   matrix; gradient.<tensor>: of a gain; names as transformers has them in memory.
                   With modules the loss is `loss` plus 0.3 times the mean of theirs
"""

import json
import math
import os
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, PROMPT, GREEDY = 64, 12, 128
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1}
MLA = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
           num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
           v_head_dim=16, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
           num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=256)
GQA = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
           num_key_value_heads=2, head_dim=16, intermediate_size=48, max_position_embeddings=256)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

MODELS = {
    "v2-lite": ("deepseek_v2", MLA | dict(
        q_lora_rank=None, n_shared_experts=2, topk_method="greedy", n_group=1, topk_group=1,
        rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707})),
    "v2": ("deepseek_v2", MLA | dict(
        q_lora_rank=24, n_shared_experts=1, topk_method="group_limited_greedy", n_group=4,
        topk_group=2, routed_scaling_factor=4.0,
        rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.5})),
    "v3": ("deepseek_v3", MLA | dict(
        q_lora_rank=24, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0})),
    "v3-mtp": ("deepseek_v3", MLA | dict(
        q_lora_rank=24, n_shared_experts=1, n_group=2, topk_group=1, moe_intermediate_size=8,
        n_routed_experts=4, num_nextn_predict_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "moonlight": ("deepseek_v3", MLA | dict(
        q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1, rms_norm_eps=1e-2,
        routed_scaling_factor=2.446, num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0})),
    "v3-fp8": ("deepseek_v3", MLA | dict(
        hidden_size=136, q_lora_rank=24, n_shared_experts=1, n_group=2, topk_group=1, moe_intermediate_size=136, n_routed_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "llama": ("llama", GQA | dict(rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
                                  rms_norm_eps=1e-5)),
    "llama3-tied": ("llama", GQA | dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "odd-vocabulary": ("llama", GQA | dict(
        vocab_size=61, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "odd-tied": ("qwen3", GQA | dict(
        vocab_size=59, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3": ("qwen3", GQA | dict(rope_parameters=YARN | {"rope_theta": 1000000.0})),
    "qwen3-moe": ("qwen3_moe", GQA | dict(
        moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        mlp_only_layers=[0], rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
}
OLD_SPELLING = {"v2-lite", "v3", "llama3-tied", "qwen3-moe"}
SHARDED = {"v3", "qwen3-moe"}
FUSED = {"moonlight"}
F32 = {"llama"}


def fill(model, generator):
    for name, parameter in list(model.named_parameters()) + list(model.named_buffers()):
        if "inv_freq" in name:
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            values = 0.1 * values
        elif parameter.dim() == 1:
            values = 1 + 0.2 * values
        else:
            values = values / math.sqrt(parameter.shape[-1])
        parameter.data = values


def is_linear(name):
    return name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")


def quantise(weight):
    """Codes and multipliers of 128 x 128 blocks, ragged at the edges."""
    rows, columns = weight.shape
    scales = torch.ones(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[128 * i:128 * i + 128, 128 * j:128 * j + 128]
            scales[i, j] = block.abs().max() / 448
            codes[128 * i:128 * i + 128, 128 * j:128 * j + 128] = \
                (block / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantise(codes, scales):
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * spread[:codes.shape[0], :codes.shape[1]]


def stored(tensors, name, fp8):
    """Tensors as the file has them, and what they stand for in f32."""
    out, values = {}, {}
    for key, tensor in tensors.items():
        if fp8 and is_linear(key):
            codes, scales = quantise(tensor)
            out[key], out[key + "_scale_inv"] = codes, scales
            values[key] = dequantise(codes, scales)
        elif name in F32 or key.endswith("e_score_correction_bias"):
            out[key] = values[key] = tensor.float()
        else:
            out[key] = tensor.bfloat16()
            values[key] = out[key].float()
    return out, values


def fuse(tensors, layers, experts):
    """The names that transformers 5 has in memory."""
    out = dict(tensors)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        if prefix + "0.gate_proj.weight" not in out:
            continue
        take = lambda matrix: [out.pop(f"{prefix}{e}.{matrix}.weight") for e in range(experts)]
        gate, up, down = take("gate_proj"), take("up_proj"), take("down_proj")
        out[prefix + "gate_up_proj"] = torch.stack([torch.cat(p) for p in zip(gate, up)])
        out[prefix + "down_proj"] = torch.stack(down)
    return out


def write(folder, tensors, sharded):
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    if not sharded:
        save_file(tensors, folder + "/model.safetensors", metadata={"format": "pt"})
        return
    os.remove(folder + "/model.safetensors")
    names, index = sorted(tensors), {}
    for shard in range(2):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[shard::2]}
        save_file(part, folder + "/" + file, metadata={"format": "pt"})
        index |= {name: file for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    with open(folder + "/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, file)


def respell(config):
    """As files from before transformers 5 say it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if kind == "yarn":
        rope["type"] = kind
        rope["factor"] = int(rope["factor"])
    else:
        rope["rope_type"] = kind
    config["rope_scaling"] = None if kind == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "bfloat16")


def rewrite_config(name, folder, fp8):
    with open(folder + "/config.json") as file:
        config = json.load(file)
    config["dtype"] = "float32" if name in F32 else "bfloat16"
    if name in OLD_SPELLING:
        respell(config)
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3",
                                         "activation_scheme": "dynamic",
                                         "weight_block_size": [128, 128]}
    with open(folder + "/config.json", "w") as file:
        json.dump(config, file, indent=1)


def add_mtp(tensors, layers, hidden):
    """Some tensors of a module that predicts a further token, too few to compute it."""
    prefix = f"model.layers.{layers}."
    tensors[prefix + "enorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors[prefix + "eh_proj.weight"] = torch.ones(hidden, 2 * hidden, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def check_scale(model):
    """transformers before 2026-07 left mscale_all_dim out of deepseek_v2's softmax scale."""
    config = model.config
    if config.model_type not in ("deepseek_v2", "deepseek_v3"):
        return
    rope = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
    found = model.model.layers[0].self_attn.scaling
    assert abs(found - scale) < 1e-9, f"this transformers scales by {found}, not {scale}"


class Predictor(torch.nn.Module):
    """A module of multi-token prediction as DeepSeek-V3 has it: names are those of its folders."""

    def __init__(self, config, layer):
        super().__init__()
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = v3.DeepseekV3RMSNorm(hidden, eps)
        self.hnorm = v3.DeepseekV3RMSNorm(hidden, eps)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = v3.DeepseekV3DecoderLayer(config, layer)
        self.shared_head = torch.nn.ModuleDict({"norm": v3.DeepseekV3RMSNorm(hidden, eps)})

    def forward(self, embedded, state, rotation):
        both = torch.cat([self.enorm(embedded), self.hnorm(state)], -1)
        length = state.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)[None, None]
        out = self.layer(self.eh_proj(both), attention_mask=mask, position_embeddings=rotation)
        return self.shared_head["norm"](out)

    def named(self, prefix):
        return {prefix + name.removeprefix("layer."): value for name, value in
                list(self.named_parameters()) + list(self.named_buffers())}


def make_predictors(config, generator):
    predictors = []
    for k in range(getattr(config, "num_nextn_predict_layers", None) or 0):
        predictor = Predictor(config, config.num_hidden_layers + k).float().eval()
        fill(predictor, generator)
        for parameter in predictor.parameters():
            parameter.data = parameter.data.bfloat16().float()
        predictors.append(predictor)
    return predictors


def predictor_tensors(model, predictors):
    """As the files have them: experts apart, each module with the embedding and the head."""
    out = {}
    for k, predictor in enumerate(predictors):
        prefix = f"model.layers.{model.config.num_hidden_layers + k}."
        for name, value in predictor.named(prefix).items():
            kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            if ".mlp.experts." not in name:
                out[name] = value.detach().to(kind)
                continue
            for expert, matrix in enumerate(value.detach().to(kind)):
                start = f"{prefix}mlp.experts.{expert}."
                if name.endswith("down_proj"):
                    out[start + "down_proj.weight"] = matrix
                else:
                    out[start + "gate_proj.weight"], out[start + "up_proj.weight"] = matrix.chunk(2)
        out[prefix + "embed_tokens.weight"] = model.model.embed_tokens.weight.detach().bfloat16()
        out[prefix + "shared_head.head.weight"] = model.lm_head.weight.detach().bfloat16()
    return out


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def predictor_losses(model, predictors, tokens, state):
    """tokens [batch, length + 1], state [batch, length, hidden] behind the model's last norm."""
    length = state.shape[1]
    rotation = model.model.rotary_emb(state, torch.arange(length)[None])
    losses = []
    for k, predictor in enumerate(predictors):
        later = torch.nn.functional.pad(tokens[:, k + 1:], (0, k), "replicate")
        state = predictor(model.model.embed_tokens(later), state, rotation)
        logits = model.lm_head(state)[:, :length - k - 1]
        losses.append(cross_entropy(logits, tokens[:, k + 2:]))
    return losses


def reference(model, predictors, generator):
    tokens = torch.randint(model.config.vocab_size, (2, PROMPT + 1), generator=generator)
    state = model.model(tokens[:, :-1]).last_hidden_state
    logits = model.lm_head(state)
    loss = cross_entropy(logits, tokens[:, 1:])
    out = {"tokens": tokens.int(), "logits": logits.detach(), "loss": loss.detach()}
    parameters = dict(model.named_parameters())
    if predictors:
        losses = torch.stack(predictor_losses(model, predictors, tokens, state))
        out["mtp_losses"] = losses.detach()
        loss = loss + 0.3 * losses.mean()
        for k, predictor in enumerate(predictors):
            parameters |= predictor.named(f"model.layers.{model.config.num_hidden_layers + k}.")
    loss.backward()
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dim() == 1:
            out["gradient." + name] = gradient
        else:
            out["rows." + name] = gradient.sum(-1)
            out["columns." + name] = gradient.sum(-2)
    text = tokens[0, :-1]
    with torch.no_grad():
        for _ in range(GREEDY):
            text = torch.cat([text, model(text[None]).logits[0, -1].argmax()[None]])
    out["greedy"] = text[PROMPT:].int()
    return {key: tensor.contiguous() for key, tensor in out.items()}


def make(name, kind, options, folder):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(kind, **options)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    fill(model, generator)
    model.tie_weights()
    fp8 = name.endswith("fp8")
    model.save_pretrained(folder)
    tensors, values = stored(load_file(folder + "/model.safetensors"), name, fp8)
    # What the file says, read by transformers itself.
    plain = folder + ".plain"
    model.save_pretrained(plain)
    write(plain, values, False)
    model, found = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    model.set_experts_implementation("eager")
    shutil.rmtree(plain)
    model = model.eval()
    check_scale(model)
    if name in FUSED:
        tensors = fuse(tensors, config.num_hidden_layers, config.n_routed_experts)
    if name == "v3":
        add_mtp(tensors, config.num_hidden_layers, config.hidden_size)
    predictors = make_predictors(config, generator)
    tensors |= predictor_tensors(model, predictors)
    write(folder, tensors, name in SHARDED)
    rewrite_config(name, folder, fp8)
    save_file(reference(model, predictors, generator), folder + "/reference.safetensors")
    generation = folder + "/generation_config.json"
    if os.path.exists(generation):
        os.remove(generation)


def main(out, *names):
    for name in names or MODELS:
        kind, options = MODELS[name]
        folder = os.path.join(out, name)
        shutil.rmtree(folder, ignore_errors=True)
        make(name, kind, options, folder)
        size = sum(os.path.getsize(os.path.join(folder, file)) for file in os.listdir(folder))
        print(f"{name}: {size / 1000:.0f} kB")


main(*sys.argv[1:])
