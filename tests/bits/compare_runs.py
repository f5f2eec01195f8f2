#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Whether two builds of bellows train to the same bits.

OLD and NEW are `bellows` programs. Each trains the demo model (--config tiny) on the CPU in the
layouts below, from the same seed. A row per layout says how many steps and tensors were compared,
how many seconds each run took, and "same bits" or what differs first:

  losses and gradient norms    of every step, as metrics.jsonl has them, exactly
  tensors                      of the last checkpoint, weights and moments: name, type, shape and
                               SHA-256 of the bytes, whichever of its safetensors files has them

A choice of kernels that state.json names otherwise is told beside that and counts for nothing.

layouts:
{layouts}

The environment is passed on (VK_DRIVER_FILES and the like). It must name the same driver for both:
for copies in build/release/bin-new that is VK_DRIVER_FILES=build/toolchain/lvp_icd.json.

Exit code: 0 same bits, 1 different, 2 wrong usage or a run that failed (the end of its output is
shown)."""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = "/usr/share/common-licenses"
LAYOUTS = {
    "f32 dp 4": "--ranks 4 --precision f32",
    "bf16 pp 2": "--ranks 2 --pp 2 --micro-batches 4 --precision bf16",
    "fp8 dualpipe": "--ranks 4 --pipeline dualpipe --pp 2 --ep 2 --precision fp8",
}
COMPARED_METRICS = ("loss", "grad_norm")
LINES_OF_A_FAILURE = 30
SECONDS_TO_END = 10  # between SIGTERM, at which the command ends its ranks, and SIGKILL
READ_AT_ONCE = 1 << 20


class Failed(Exception):
    """A run failed, or left something that cannot be compared."""


def end(process):
    """Ends a command and its ranks, which share its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def train(program, flags, steps, out, limit):
    """Runs the program into the folder `out`; the seconds that it took."""
    command = [str(program), "train", "--config", "tiny", "--data", DATA, "--device", "cpu",
               "--steps", str(steps), *flags.split(), "--out", str(out)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # A file and not a pipe: a rank that outlives its command cannot keep this waiting.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
            why = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"did not end within {limit:g} s (--limit)"
        finally:
            end(process)
        if why:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-LINES_OF_A_FAILURE:]
            raise Failed("\n".join([f"{' '.join(command)}\n{why}:", *lines]))
    return time.monotonic() - began


def read_metrics(run, steps):
    """[(step, {metric: value})] of all steps."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    found = [row["step"] for row in rows]
    if found != list(range(1, steps + 1)):
        raise Failed(f"{run}/metrics.jsonl: steps {found}, not 1 to {steps}")
    return [(row["step"], {key: row[key] for key in COMPARED_METRICS if key in row})
            for row in rows]


def sha256_of(file, bytes_left):
    digest = hashlib.sha256()
    while bytes_left > 0:
        chunk = file.read(min(bytes_left, READ_AT_ONCE))
        if not chunk:
            raise Failed(f"{file.name} is cut short")
        digest.update(chunk)
        bytes_left -= len(chunk)
    return digest.hexdigest()


def read_safetensors(path):
    """{name: (type, shape, SHA-256)} of one file: a length, a JSON header, then bytes."""
    tensors = {}
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            file.seek(8 + header_bytes + first)
            tensors[name] = (tensor["dtype"], tuple(tensor["shape"]),
                             sha256_of(file, last - first))
    return tensors


def read_checkpoint(run, steps):
    """The checkpoint after the last step: its tensors as above, its choice of kernels."""
    folder = run / "checkpoints" / f"step-{steps}"
    tensors = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in read_safetensors(path).items():
            if name in tensors:
                raise Failed(f"{folder}: tensor {name} stands in two files")
            tensors[name] = tensor
    if not tensors:
        raise Failed(f"{folder} has no tensors")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return tensors, state.get("kernels", {})


class Run:
    """What one training run left."""

    def __init__(self, program, flags, steps, out, limit):
        self.seconds = train(program, flags, steps, out, limit)
        try:
            self.metrics = read_metrics(out, steps)
            self.tensors, self.kernels = read_checkpoint(out, steps)
        except OSError as error:
            raise Failed(f"{error.filename}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Failed(f"{out}: not what a run leaves ({error!r})") from error


def first_difference(old, new):
    """"" for the same bits."""
    for (step, mine), (_, other) in zip(old.metrics, new.metrics):
        for key in COMPARED_METRICS:
            # As text, for which a loss that is no number equals itself.
            if repr(mine.get(key)) != repr(other.get(key)):
                return f"step {step}: {key} {mine.get(key)!r}, then {other.get(key)!r}"
    for name in sorted(old.tensors | new.tensors):
        mine, other = old.tensors.get(name), new.tensors.get(name)
        if mine is None or other is None:
            return f"tensor {name}: only {'the first' if other is None else 'the second'} has it"
        if mine[:2] != other[:2]:
            return f"tensor {name}: {mine[0]} {mine[1]}, then {other[0]} {other[1]}"
        if mine[2] != other[2]:
            return f"tensor {name}: other bytes, {mine[0]} {list(mine[1])}"
    return ""


def other_kernels(old, new):
    """What explains other bits, as part of a row; "" for the same choice."""
    if old.kernels == new.kernels:
        return ""
    return f" (kernels {json.dumps(old.kernels)}, then {json.dumps(new.kernels)})"


def compare(name, options, folder):
    """Prints the row of a layout; whether both runs have the same bits."""
    flags = LAYOUTS[name]
    old, new = (Run(program, flags, options.steps, folder / name.replace(" ", "-") / which,
                    options.limit)
                for which, program in (("old", options.old), ("new", options.new)))
    difference = first_difference(old, new)
    print(f"{name:<14}{len(old.metrics):>7}{len(old.tensors):>9}{old.seconds:>7.0f}"
          f"{new.seconds:>7.0f}  {difference or 'same bits'}{other_kernels(old, new)}",
          flush=True)
    return not difference


def program(text):
    path = Path(text).resolve()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise argparse.ArgumentTypeError(f"{text} is no program")
    return path


def positive(kind):
    def parse(text):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value
    return parse


def parse_options():
    layouts = "\n".join(f"  {name:<14}{flags}" for name, flags in LAYOUTS.items())
    parser = argparse.ArgumentParser(description=__doc__.format(layouts=layouts),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_PROGRAM", type=program)
    parser.add_argument("new", metavar="NEW_PROGRAM", type=program)
    parser.add_argument("--steps", type=positive(int), default=20, help="of each run (20)")
    parser.add_argument("--only", metavar="NAME", choices=LAYOUTS, action="append",
                        help="only this layout, such as \"f32 dp 4\"; may be given again")
    parser.add_argument("--keep", metavar="FOLDER", type=Path,
                        help="a new folder, in which the runs stay as LAYOUT/old and LAYOUT/new")
    parser.add_argument("--limit", metavar="SECONDS", type=positive(float), default=900,
                        help="for each run (900); the first on a machine compiles all shaders")
    options = parser.parse_args()
    if options.keep and options.keep.exists():
        parser.error(f"--keep {options.keep}: there is one; name a new folder")
    return options


def main():
    options = parse_options()
    print(f"{'layout':<14}{'steps':>7}{'tensors':>9}{'old s':>7}{'new s':>7}  result")
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        try:
            same = [compare(name, options, folder) for name in options.only or LAYOUTS]
        except Failed as failure:
            print(f"{Path(sys.argv[0]).name}: {failure}", file=sys.stderr)
            return 2
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
