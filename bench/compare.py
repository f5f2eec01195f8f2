#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Results of two benchmark runs side by side.

A and B are JSON files that bench_* --json has written, or folders of them, as quickstart.sh bench
leaves one. Rows are matched by name. "B faster" is A's time over B's: 2.00 where B takes half as
long. Rates and shares of the peak (of the loop that each run measured on its own device) are shown
where a run has them. Rows that failed, or that only one side has, stand below the table."""

import argparse
import json
import re
import signal
import sys
from pathlib import Path

MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
CONTEXT = ("device", "driver", "vulkan", "bellows", "compiler", "date")


class Unreadable(Exception):
    pass


class Run:
    """The rows of one side by name, and what its files say about where they ran."""

    def __init__(self, path):
        self.rows, self.failed, self.context = {}, {}, {}
        path = Path(path)
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise Unreadable(f"{path}: a folder without *.json")
        for file in files:
            self.read(file)

    def read(self, file):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            for key in CONTEXT:
                if key in results["context"]:
                    self.context.setdefault(key, results["context"][key])
            for row in results["benchmarks"]:
                self.add(row)
        except OSError as error:
            raise Unreadable(f"{file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unreadable(f"{file}: no results of Google Benchmark ({error!r})") from error

    def add(self, row):
        name = row["name"].replace("/iterations:1/manual_time", "")
        if row.get("error_occurred") or row.get("skipped"):
            self.failed[name] = row.get("error_message") or row.get("skip_message", "")
            return
        row["us"] = float(row["real_time"]) * MICROSECONDS[row["time_unit"]]
        self.rows[name] = row

    def description(self):
        return ", ".join(f"{value}" if key in ("device", "driver") else f"{key} {value}"
                         for key, value in self.context.items())


def rate(row):
    for unit in ("GFLOPS", "GB/s"):
        if unit in row:
            return f"{row[unit]:.1f} {unit}"
    return ""


def share(row):
    for key, value in row.items():
        peak = re.fullmatch("of_(.*)_peak", key)
        if peak:
            return f"{100 * value:.1f} % {peak[1]}"
    return ""


def table(a, b, names):
    yield ["benchmark", "A us", "B us", "B faster", "A rate", "B rate", "A of peak", "B of peak"]
    for name in names:
        x, y = a.rows[name], b.rows[name]
        faster = f"{x['us'] / y['us']:.2f}" if y["us"] > 0 else ""
        yield [name, f"{x['us']:.2f}", f"{y['us']:.2f}", faster, rate(x), rate(y), share(x),
               share(y)]


def print_table(rows):
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells).rstrip())


def print_rest(side, run, other, chosen):
    for name in run.rows:
        if chosen(name) and name not in other.rows and name not in other.failed:
            print(f"only in {side}: {name}")
    for name, why in run.failed.items():
        if chosen(name):
            print(f"failed in {side}: {name}: {why}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit code: 0, or 2 for input that cannot be read, or when no name matches.")
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--filter", metavar="REGEX", default="",
                        help="only rows whose name has a match")
    arguments = parser.parse_args()
    try:
        chosen = re.compile(arguments.filter).search
        a, b = Run(arguments.a), Run(arguments.b)
    except re.error as error:
        parser.error(f"--filter {arguments.filter}: {error}")
    except Unreadable as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    for side, run, path in (("A", a, arguments.a), ("B", b, arguments.b)):
        print(f"{side}: {path}: {run.description()}")
    names = [name for name in a.rows if name in b.rows and chosen(name)]
    if names:
        print_table(table(a, b, names))
    print_rest("A", a, b, chosen)
    print_rest("B", b, a, chosen)
    if not names:
        print("compare.py: no name is on both sides", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it quietly
    sys.exit(main())
