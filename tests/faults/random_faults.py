#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Random faults of `bellows train`: ranks that are killed or stopped, and runs that are interrupted.

Kills and stops hit a random rank in each phase of a run. The command must end within 30 s, name the
rank and the phase, and leave no process and no shared memory. An interrupted run must leave a whole
checkpoint, from which the run goes on to the very bits of one that was not disturbed. A table is
written to standard output; the exit code is 1 if anything was wrong.
"""

import argparse
import collections
import fcntl
import hashlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

CONFIG = """[model]
vocabulary = 256
hidden = 32
layers = 2
dense_layers = 1
heads = 2
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
dense_ffn = 64
moe_ffn = 32
routed_experts = 4
shared_experts = 1
top_k = 2
n_group = 1
topk_group = 1

[train]
batch = 4
seq = 16
lr = 3e-3
warmup_steps = 4
"""
STEPS = 40
LIMIT = 30.0  # seconds between a fault and the command's end
PATIENCE = 240.0  # seconds for a phase to come
PHASES = ("start-up", "training", "checkpoint", "closing")
NAMED_PHASE = re.compile(
    r"while (its program was starting|MPI was starting|the run was set up|writing the checkpoint "
    r"of step \d+|reporting on the run|closing|trying the finished model)|in step \d+|after closing"
    r"|'closing the world'|reported the end of its work"
)
SHARED = pathlib.Path("/dev/shm")


def shared_memory():
    """Folders of launchers that are no more, which would hold a lock."""
    left = set()
    for path in SHARED.glob("bellows-job-*"):
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.add(path.name)
        except OSError:
            pass
        os.close(folder)
    return left


class Run:
    """One `bellows train` and what it starts, known by a mark in the environment."""

    count = 0
    lock = threading.Lock()

    def __init__(self, place, arguments, name=None):
        with Run.lock:
            Run.count += 1
            self.mark = f"{os.getpid()}-{Run.count}"
        self.folder = place.root / (name or f"run-{self.mark}")
        self.scratch = place.root / f"scratch-{self.mark}"
        self.scratch.mkdir()
        environment = dict(
            os.environ,
            BELLOWS_TEST_MARK=self.mark,
            TMPDIR=str(self.scratch),
            LP_NUM_THREADS="1",
        )
        command = [place.program, "train", *arguments(self.folder)]
        # A sample may hold any bytes.
        self.out = open(self.scratch / "out", "w+", encoding="utf-8", errors="replace")
        self.errors = open(self.scratch / "errors", "w+", encoding="utf-8", errors="replace")
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.errors, env=environment
        )

    def running(self):
        return self.process.poll() is None

    def processes(self):
        """Of ranks: {rank: process id}; -1 for what is not a rank."""
        found = collections.defaultdict(list)
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"BELLOWS_TEST_MARK={self.mark}".encode() not in variables:
                continue
            rank = -1
            for variable in variables:
                if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                    rank = int(variable.split(b"=")[1])
            found[rank].append(int(entry.name))
        return found

    def lines(self):
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def saving(self):
        try:
            return any(p.name.startswith(".") for p in (self.folder / "checkpoints").iterdir())
        except OSError:
            return False

    def until(self, condition):
        end = time.monotonic() + PATIENCE
        while self.running() and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def wait(self, limit):
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None

    def told(self):
        text = ""
        for file in (self.out, self.errors):
            file.flush()
            file.seek(0)
            text += file.read()
        return text

    def said(self):
        self.errors.seek(0)
        return self.errors.read()

    def clear(self):
        """Ends what is left, and says how many processes that were."""
        end = time.monotonic() + 3
        while time.monotonic() < end and self.processes():
            time.sleep(0.05)
        left = [pid for pids in self.processes().values() for pid in pids]
        for pid in left + ([self.process.pid] if self.running() else []):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.out.close()
        self.errors.close()
        temporary = [p.name for p in self.scratch.iterdir() if p.name not in ("out", "errors")]
        shutil.rmtree(self.scratch, ignore_errors=True)
        return len(left), temporary


class Place:
    """A folder with a configuration and text, and how long an undisturbed run takes."""

    def __init__(self, program, ranks, root):
        self.program, self.ranks, self.root = program, ranks, root
        (root / "small.toml").write_text(CONFIG)
        words = random.Random(1)
        text = " ".join(words.choice("the bellows breathe and slow embers glow again".split())
                        for _ in range(5000))
        (root / "text.txt").write_text(text)
        whole = Run(self, self.training(), "whole")
        whole.until(lambda: whole.lines() >= 1)
        self.first_line = time.monotonic() - whole.start
        whole.until(lambda: whole.lines() >= STEPS)
        self.last_line = time.monotonic() - whole.start
        if whole.wait(PATIENCE) != 0:
            sys.exit("the undisturbed run fails: " + whole.told())
        self.whole = time.monotonic() - whole.start
        self.weights = self.weights_of(whole.folder)
        whole.clear()

    def training(self, every=0):
        return lambda folder: [
            "--config", str(self.root / "small.toml"), "--data", str(self.root / "text.txt"),
            "--ranks", str(self.ranks), "--steps", str(STEPS), "--out", str(folder),
            *(["--checkpoint-every", str(every)] if every else []),
        ]

    @staticmethod
    def weights_of(run):
        """Of the newest checkpoint; {} if there is none."""
        folders = sorted((run / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
        if not folders:
            return {}
        return {
            str(p.relative_to(folders[-1])): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folders[-1].rglob("*.safetensors"))
        }


Outcome = collections.namedtuple("Outcome", "kind seconds wrong text")


def hurt(place, phase, number, seed):
    """Signal `number` to a random rank in `phase`."""
    dice = random.Random(seed)
    rank = dice.randrange(place.ranks)
    run = Run(place, place.training(every=2 if phase == "checkpoint" else 0))
    if phase == "start-up":
        run.until(lambda: run.processes().get(rank))
        time.sleep(dice.uniform(0, max(place.first_line - (time.monotonic() - run.start), 0.1)))
    elif phase == "training":
        after = dice.randrange(1, STEPS // 2)
        run.until(lambda: run.lines() >= after)
    elif phase == "checkpoint":
        after = dice.randrange(1, STEPS // 2)
        run.until(lambda: run.lines() >= after and run.saving())
        time.sleep(dice.uniform(0, 0.01))
    else:
        run.until(lambda: run.lines() >= STEPS)
        time.sleep(dice.uniform(0, place.whole - place.last_line))
    victims = run.processes().get(rank, [])
    fault = time.monotonic()
    for victim in victims:
        os.kill(victim, number)
    code = run.wait(LIMIT)
    seconds = time.monotonic() - fault
    text = run.said()
    wrong = []
    if code is None:
        wrong.append("outlives the fault")
    left, temporary = run.clear()
    if left:
        wrong.append(f"{left} processes are left")
    if temporary:
        wrong.append(f"left in the temporary folder: {temporary}")
    late = not victims or (code == 0 and number == signal.SIGKILL)
    if code == 0 and not late:
        wrong.append("a stopped rank was not noticed")
    if code not in (0, None):
        if not re.search(rf"\brank {rank}\b|\branks [0-9 ]*\b{rank}\b", text):
            wrong.append("the rank is not named")
        if not NAMED_PHASE.search(text):
            wrong.append("the phase is not named")
    shutil.rmtree(run.folder, ignore_errors=True)
    detail = f"{phase}, signal {number}, rank {rank}, seed {seed}, exit code {code}: {text}"
    return Outcome("too late" if late else "hurt", seconds, wrong, detail)


def interrupt(place, seed):
    """SIGINT to the command at any moment, in one of four cases twice within a second."""
    dice = random.Random(seed)
    run = Run(place, place.training())
    time.sleep(dice.uniform(0.2, place.whole))
    twice = dice.random() < 0.25
    fault = time.monotonic()
    if run.running():
        run.process.send_signal(signal.SIGINT)
    if twice:
        time.sleep(dice.uniform(0, 1))
        if run.running():
            run.process.send_signal(signal.SIGINT)
    code = run.wait(LIMIT)
    seconds = time.monotonic() - fault
    text = run.told()
    wrong = []
    left, temporary = run.clear()
    if left or temporary:
        wrong.append(f"{left} processes are left; in the temporary folder {temporary}")
    saved = place.weights_of(run.folder)
    # Before the ranks are there, and at the second signal, nothing more is written.
    early = code == 128 + signal.SIGINT and (twice or run.lines() == 0)
    if code not in (0, 5) and not early:
        wrong.append("the run was not stopped in order")
    if code in (0, 5) and not saved:
        wrong.append("there is no checkpoint")
    # After the last step the run only tries its model.
    complete = (run.folder / "checkpoints" / f"step-{STEPS}").exists()
    if saved and code != 0 and not complete:
        resumed = Run(place, lambda folder: ["--resume", str(run.folder), "--steps", str(STEPS)])
        if resumed.wait(PATIENCE) != 0:
            wrong.append("the run cannot be resumed: " + resumed.told())
        resumed.clear()
    if saved and place.weights_of(run.folder) != place.weights:
        wrong.append("other bits than the undisturbed run")
    shutil.rmtree(run.folder, ignore_errors=True)
    detail = f"interrupt{' twice' if twice else ''}, seed {seed}, exit code {code}: {text}"
    kind = {0: "too late", 5: "stopped"}.get(code, "ended")
    return Outcome(kind, seconds, wrong, detail)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the program bellows")
    parser.add_argument("--kills", type=int, default=40, help="in each phase")
    parser.add_argument("--stops", type=int, default=40, help="in each phase")
    parser.add_argument("--interrupts", type=int, default=20)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    before = shared_memory()
    rows, failures = [], []
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bellows-faults-") as folder:
        place = Place(options.program, options.ranks, pathlib.Path(folder))
        work = []
        for phase in options.phases.split(","):
            for name, number, count in (("kill", signal.SIGKILL, options.kills),
                                        ("stop", signal.SIGSTOP, options.stops)):
                work.append((name, phase, count,
                             lambda seed, p=phase, n=number: hurt(place, p, n, seed)))
        work.append(("interrupt", "any", options.interrupts, lambda seed: interrupt(place, seed)))
        with ThreadPoolExecutor(options.jobs) as pool:
            for index, (name, phase, count, task) in enumerate(work):
                seeds = [options.seed + 1000 * index + i for i in range(count)]
                outcomes = list(pool.map(task, seeds))
                wrong = [outcome for outcome in outcomes if outcome.wrong]
                failures += wrong
                kinds = collections.Counter(outcome.kind for outcome in outcomes)
                longest = max((outcome.seconds for outcome in outcomes), default=0)
                if outcomes:
                    rows.append((name, phase, count, ", ".join(f"{k} {n}" for k, n in
                                 sorted(kinds.items())), f"{longest:.1f}", len(wrong)))
                    print("done:", *rows[-1], flush=True)
    left = shared_memory() - before
    print("\n| fault | phase | runs | outcomes | longest, s | wrong |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    for failure in failures:
        print("\nWRONG:", "; ".join(failure.wrong), "--", failure.text.strip())
    if left:
        print("\nWRONG: left in shared memory:", ", ".join(sorted(left)))
    return 1 if failures or left else 0


if __name__ == "__main__":
    sys.exit(main())
