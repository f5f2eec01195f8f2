#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes a Hugging Face folder in the shape of DeepSeek-V2-Lite with random bf16 weights (29 GiB).

    python3 random_folder.py OUT [--layers 27] [--experts 64] [--tokenizer tokenizer.json]

For measuring how fast such a folder is loaded and exported. Needs torch and safetensors; the values
come from the GPU where there is one. With --layers 2 --experts 4 it is small enough for any machine.
"""

import argparse
import json
import pathlib
import shutil
import time

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}
SHARD = 5 << 30  # bytes


def shapes(config):
    """Names and shapes in the order of the layers."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]

    def ffn(prefix, width):
        yield f"{prefix}.gate_proj.weight", (width, hidden)
        yield f"{prefix}.up_proj.weight", (width, hidden)
        yield f"{prefix}.down_proj.weight", (hidden, width)

    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", (latent,)
        yield f"{prefix}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            yield from ffn(f"{prefix}.mlp", config["intermediate_size"])
            continue
        width = config["moe_intermediate_size"]
        yield f"{prefix}.mlp.gate.weight", (config["n_routed_experts"], hidden)
        for expert in range(config["n_routed_experts"]):
            yield from ffn(f"{prefix}.mlp.experts.{expert}", width)
        yield from ffn(f"{prefix}.mlp.shared_experts", config["n_shared_experts"] * width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def shards(config):
    part, size = [], 0
    for name, shape in shapes(config):
        part.append((name, shape))
        size += 2 * torch.Size(shape).numel()
        if size >= SHARD:
            yield part
            part, size = [], 0
    if part:
        yield part


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--experts", type=int, default=CONFIG["n_routed_experts"])
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json to put beside")
    args = parser.parse_args()
    config = dict(CONFIG, num_hidden_layers=args.layers, n_routed_experts=args.experts)
    config["num_experts_per_tok"] = min(config["num_experts_per_tok"], args.experts)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    begin = time.monotonic()
    args.out.mkdir(parents=True)
    parts, places, total = list(shards(config)), {}, 0
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {}
        for name, shape in part:
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                values = torch.randn(shape, device=device, dtype=torch.bfloat16)
                tensors[name] = (values * 0.02).cpu()
            total += 2 * tensors[name].numel()
            places[name] = file
        save_file(tensors, args.out / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    if args.tokenizer:
        shutil.copy(args.tokenizer, args.out / "tokenizer.json")
    print(f"{total / 1e9:.1f} GB in {len(parts)} files, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
