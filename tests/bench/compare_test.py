# SPDX-License-Identifier: MIT
"""bench/compare.py, given as the argument, on small results."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

COMPARE = sys.argv.pop(1)


def results(device, rows):
    return {"context": {"device": device, "driver": "1.0"}, "benchmarks": rows}


def row(name, time, **counters):
    return {"name": name + "/iterations:1/manual_time", "real_time": time, "time_unit": "us",
            **counters}


A = results("First", [row("copy", 10.0, **{"GB/s": 4.0, "of_copy_peak": 0.5}), row("gone", 1.0),
                      row("broken", 1.0)])
B = results("Second", [row("copy", 0.005, **{"GB/s": 8.0, "of_copy_peak": 0.8},),
                       row("new", 1.0),
                       {"name": "broken", "error_occurred": True, "error_message": "y[3] is 12"}])
B["benchmarks"][0]["time_unit"] = "ms"


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.a = self.write("a.json", A)
        self.b = self.write("b.json", B)

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def run_it(self, *arguments):
        return subprocess.run([sys.executable, COMPARE, *map(str, arguments)], timeout=60,
                              capture_output=True, text=True)

    def refused(self, *arguments):
        done = self.run_it(*arguments)
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr

    def test_rows_side_by_side(self):
        done = self.run_it(self.a, self.b)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line.split() for line in done.stdout.splitlines()]
        self.assertIn("copy 10.00 5.00 2.00 4.0 GB/s 8.0 GB/s 50.0 % copy 80.0 % copy".split(),
                      lines)
        self.assertEqual(sum(line[:1] == ["copy"] for line in lines), 1)
        self.assertIn("First, 1.0", done.stdout)
        self.assertIn("Second, 1.0", done.stdout)

    def test_what_is_missing(self):
        lines = self.run_it(self.a, self.b).stdout.splitlines()
        self.assertIn("only in A: gone", lines)
        self.assertIn("only in B: new", lines)
        self.assertIn("failed in B: broken: y[3] is 12", lines)
        self.assertNotIn("only in A: broken", lines)

    def test_folders(self):
        self.write("x/one.json", A)
        self.write("x/two.json", results("First", [row("more", 3.0)]))
        self.write("y/all.json", results("Second", A["benchmarks"] + [row("more", 6.0)]))
        done = self.run_it(self.folder / "x", self.folder / "y")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("more 3.00 6.00 0.50".split(),
                      [line.split() for line in done.stdout.splitlines()])
        self.assertNotIn("only in", done.stdout)

    def test_filter(self):
        done = self.run_it("--filter", "^copy$", self.a, self.b)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("only in", done.stdout)

    def test_unreadable_input(self):
        self.assertIn("nowhere", self.refused(self.a, self.folder / "nowhere"))
        self.assertIn("text.json", self.refused(self.write("text.json", "{]"), self.b))
        self.assertIn("list.json", self.refused(self.a, self.write("list.json", [])))
        self.assertIn("unit.json", self.refused(self.a, self.write("unit.json", results(
            "x", [{"name": "copy", "real_time": 1, "time_unit": "days"}]))))
        (self.folder / "empty").mkdir()
        self.assertIn("without *.json", self.refused(self.folder / "empty", self.b))
        self.assertIn("no name is on both sides", self.refused("--filter", "gone", self.a, self.b))
        self.assertIn("--filter", self.refused("--filter", "(", self.a, self.b))

    def test_help(self):
        done = self.run_it("--help")
        self.assertEqual(done.returncode, 0)
        for word in ("A", "B", "--filter", "Exit code", "matched by name"):
            self.assertIn(word, done.stdout)


if __name__ == "__main__":
    unittest.main()
