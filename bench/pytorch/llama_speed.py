#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Training steps of a Llama in PyTorch on one GPU: the peer of bench_pipeline with
bench/pipeline/llama_1b.toml.

    python3 llama_speed.py               compiled, bf16
    python3 llama_speed.py --no-compile
    python3 llama_speed.py --device cpu --tiny --no-compile   does it run

The shape of Llama-3.2-1B with 8192 tokens of vocabulary: grouped-query attention, SwiGLU, RMSNorm,
tied embeddings. As Bellows does it: bf16 weights for products, f32 master weights, f32 gradients
summed over the micro-batches, f32 moments of AdamW, clipping at 1, no recomputation. One line of
JSON is printed: tokens/s as the median over steps, the loss, and what served.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

LARGE = {"vocabulary": 8192, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192}
TINY = {"vocabulary": 256, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
THETA = 500000.0
EPS = 1e-5


def rotate(x, cos, sin):
    """x: [batch, heads, sequence, size]; pairs are the two halves of a head."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads, self.kv_heads = shape["heads"], shape["kv_heads"]
        self.size = shape["hidden"] // self.heads
        width = self.kv_heads * self.size
        self.q = nn.Linear(shape["hidden"], shape["hidden"], bias=False)
        self.k = nn.Linear(shape["hidden"], width, bias=False)
        self.v = nn.Linear(shape["hidden"], width, bias=False)
        self.o = nn.Linear(shape["hidden"], shape["hidden"], bias=False)

    def forward(self, x, cos, sin):
        batch, sequence, _ = x.shape

        def heads(values, count):
            return values.view(batch, sequence, count, self.size).transpose(1, 2)

        q = rotate(heads(self.q(x), self.heads), cos, sin)
        k = rotate(heads(self.k(x), self.kv_heads), cos, sin)
        v = heads(self.v(x), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, sequence, -1))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        hidden, ffn = shape["hidden"], shape["ffn"]
        self.attention_norm = nn.RMSNorm(hidden, EPS)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(hidden, EPS)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, shape, sequence):
        super().__init__()
        self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"])
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["layers"]))
        self.norm = nn.RMSNorm(shape["hidden"], EPS)
        size = shape["hidden"] // shape["heads"]
        speed = THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(sequence, dtype=torch.float64)[:, None] * speed
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, x, targets):
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.loss(x, targets)


class Masters:
    """f32 masters, gradients and moments of bf16 parameters, each kind in one flat tensor."""

    def __init__(self, model, rate):
        self.parameters = sorted(model.parameters(), key=lambda p: p.dim() < 2)
        sizes = [p.numel() for p in self.parameters]
        decayed = sum(p.numel() for p in self.parameters if p.dim() > 1)
        device = self.parameters[0].device
        self.values = torch.empty(sum(sizes), device=device)
        self.gradients = torch.zeros_like(self.values)
        self.weights = torch.empty_like(self.values, dtype=torch.bfloat16)
        at = 0
        for parameter, size in zip(self.parameters, sizes):
            self.values[at : at + size] = parameter.detach().flatten().float()
            parameter.data = self.weights[at : at + size].view(parameter.shape)
            sums = self.gradients[at : at + size].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self.adder(sums))
            at += size
        self.weights.copy_(self.values)
        groups = []
        for first, end, decay in ((0, decayed, 0.1), (decayed, at, 0.0)):
            part = nn.Parameter(self.values[first:end])
            part.grad = self.gradients[first:end]
            groups.append({"params": [part], "weight_decay": decay})
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)

    @staticmethod
    def adder(sums):
        def add(parameter):
            sums.add_(parameter.grad)
            parameter.grad = None

        return add

    @torch.no_grad()
    def step(self):
        norm = torch.linalg.vector_norm(self.gradients)
        self.gradients.div_(norm.clamp(min=1.0))
        self.optimizer.step()
        self.weights.copy_(self.values)
        self.gradients.zero_()


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=5, help="steps")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def main():
    args = options()
    shape = TINY if args.tiny else LARGE
    sequence = 32 if args.tiny else args.sequence
    sequences = 4 if args.tiny else args.tokens // args.sequence
    device = torch.device(args.device)
    torch.manual_seed(1)
    model = Llama(shape, sequence).to(device)
    masters = Masters(model, 3e-4)
    if args.compile:
        for layer in model.layers:
            layer.compile(dynamic=False)
        model.loss = torch.compile(model.loss, dynamic=False)
    text = torch.randint(0, shape["vocabulary"], (sequences, sequence + 1), device=device)
    text = torch.where(torch.rand(text.shape, device=device) < 0.5, text % 64, text)

    def step():
        total = 0.0
        for _ in range(args.micro_batches):
            loss = model(text[:, :-1], text[:, 1:]) / args.micro_batches
            loss.backward()
            total = total + loss.detach()
        masters.step()
        return total

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    first = step().item()
    for _ in range(args.warm_up):
        step()
    seconds = []
    for _ in range(args.steps):
        wait()
        begin = time.perf_counter()
        loss = step()
        wait()
        seconds.append(time.perf_counter() - begin)
    tokens = sequences * sequence * args.micro_batches
    last = loss.item()
    if not last < first:
        raise SystemExit(f"the loss did not fall: {first} to {last}")
    report = {
        "tokens_per_second": round(tokens / statistics.median(seconds)),
        "slowest": round(tokens / max(seconds)),
        "fastest": round(tokens / min(seconds)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": [round(first, 4), round(last, 4)],
        "compiled": args.compile,
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        report["device"] = torch.cuda.get_device_name()
        report["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
