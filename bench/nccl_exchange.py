#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The exchange of bench_expert_exchange through PyTorch and NCCL, for comparison.

    bench/nccl_exchange.py [--ranks 2] [--tokens 4096] [--hidden 7168] [--experts 256] [--topk 8] [--fp8]

The same payload: a token travels once per rank that owns one of its experts, with its ids and
weights; bf16, or E4M3 codes with f32 scales of 128 elements; sums come back in bf16. Packing is
what PyTorch has for it, compiled where that is faster: the layout from ids, rows gathered, counts
exchanged and read by the host, rows by all_to_all_single, sums in f32. Everything is checked, then
timed: the longest of all ranks, median. `all_to_all` is the exchange of equal parts alone.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def layout(ids, ranks, per_rank):
    """Tokens in the order of the ranks that they go to, how many go to each, and the row of each
    (token, rank), the number of rows where there is none."""
    owners = ids // per_rank
    goes = torch.zeros(ids.shape[0], ranks, dtype=torch.bool, device=ids.device)
    goes.scatter_(1, owners, True)
    by_rank = goes.t().contiguous()
    counts = by_rank.sum(1)
    order = by_rank.nonzero()[:, 1]
    place = (by_rank.flatten().cumsum(0) - 1).view(ranks, -1).t()
    rows = torch.where(goes, place, order.shape[0])
    return order, counts, rows


def quantize(x):
    blocks = x.view(x.shape[0], -1, 128).float()
    scale = blocks.abs().amax(2, keepdim=True).clamp_min(1e-4) / 448
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (blocks / scale).to(torch.float8_e4m3fn).view(x.shape)
    return codes, scale.squeeze(2)


def sums(back, rows):
    padded = torch.cat([back, back.new_zeros(1, back.shape[1])])
    total = padded[rows[:, 0]].float()
    for rank in range(1, rows.shape[1]):
        total = total + padded[rows[:, rank]].float()
    return total.to(back.dtype)


class Exchange:
    def __init__(self, args, rank):
        self.args, self.rank = args, rank
        self.device = torch.device("cuda", rank)
        generator = torch.Generator(device=self.device).manual_seed(1 + rank)
        tokens, hidden = args.tokens, args.hidden
        self.x = torch.randint(1, 16, (tokens, hidden), generator=generator, device=self.device)
        self.x = self.x.to(torch.bfloat16)
        self.ids = torch.rand(tokens, args.experts, generator=generator, device=self.device)
        self.ids = self.ids.topk(args.topk, dim=1).indices
        self.weights = torch.rand(tokens, args.topk, generator=generator, device=self.device)
        self.quantize = torch.compile(quantize)
        self.sums = torch.compile(sums)

    def all_to_all(self, rows, received):
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, self.sent)
        return out

    def dispatch(self):
        args = self.args
        order, counts, self.rows = layout(self.ids, args.ranks, args.experts // args.ranks)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        both = torch.stack([counts, incoming]).tolist()  # the host waits
        self.sent, self.received = both
        routing = torch.cat([self.ids.to(torch.float32), self.weights], 1)[order]
        self.routing = self.all_to_all(routing, self.received)
        if args.fp8:
            codes, scale = self.quantize(self.x)
            rows = torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], 1)[order]
            packed = self.all_to_all(rows, self.received)
            self.got = packed[:, : args.hidden].view(torch.float8_e4m3fn)
            self.scales = packed[:, args.hidden :].contiguous().view(torch.float32)
        else:
            self.got = self.all_to_all(self.x[order], self.received)

    def combine(self):
        back = self.results.new_empty(sum(self.sent), self.args.hidden)
        dist.all_to_all_single(back, self.results, self.sent, self.received)
        self.out = self.sums(back, self.rows)

    def check(self):
        self.dispatch()
        if self.args.fp8:
            blocks = self.got.float().view(self.got.shape[0], -1, 128)
            self.results = (blocks * self.scales.unsqueeze(2)).view(self.got.shape)
            self.results = self.results.to(torch.bfloat16)
        else:
            self.results = self.got
        self.combine()
        ranks = (self.rows < sum(self.sent)).sum(1, keepdim=True).float()
        assert torch.equal(self.out.float(), self.x.float() * ranks), "wrong result"


def timed(once, device, least=0.5):
    times, total = [], 0.0
    for _ in range(20):
        once()
    while total < least or len(times) < 20:
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        once()
        torch.cuda.synchronize(device)
        longest = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        times.append(longest.item())
        total += times[-1]
    return statistics.median(times)


def run(rank, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=args.ranks, device_id=device)

    def tell(text):
        if rank == 0:
            print(text, flush=True)

    for megabytes in (1, 16, 64, 256):
        there = torch.ones(args.ranks * megabytes << 20, dtype=torch.uint8, device=device)
        here = torch.empty_like(there)
        seconds = timed(lambda: dist.all_to_all_single(here, there), device, 0.2)
        sent = (args.ranks - 1) * (megabytes << 20)
        tell(f"all_to_all {megabytes:4d} MiB per peer: {1e6 * seconds:9.1f} us, "
             f"{1e-9 * sent / seconds:7.1f} GB/s per direction")
    exchange = Exchange(args, rank)
    exchange.check()
    name = f"{args.ranks}x{args.tokens}x{args.hidden}x{args.experts}x{args.topk}"
    name += "/fp8" if args.fp8 else "/bf16"

    def both():
        exchange.dispatch()
        exchange.combine()

    for what, once in (("dispatch", exchange.dispatch), ("combine", exchange.combine),
                       ("dispatch+combine", both)):
        tell(f"nccl {what}/{name}: {1e6 * timed(once, device):9.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, usual in (("ranks", 2), ("tokens", 4096), ("hidden", 7168), ("experts", 256),
                          ("topk", 8)):
        parser.add_argument(f"--{option}", type=int, default=usual)
    parser.add_argument("--fp8", action="store_true")
    arguments = parser.parse_args()
    if arguments.experts % arguments.ranks != 0:
        parser.error("--experts must be a multiple of --ranks here")
    mp.spawn(run, (arguments,), arguments.ranks)
