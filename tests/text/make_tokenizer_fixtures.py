# SPDX-License-Identifier: MIT
"""Makes tests/text/tokenizers: small tokenizers of published rules, lines, and the ids that the
packages tokenizers and tiktoken give them. An id list per line, without special tokens; behind a "|"
that with them, if it is another.

  python3 make_tokenizer_fixtures.py"""
import base64
import json
import pathlib
import random

import tiktoken

import tokenizer_rules as rules

FOLDER = pathlib.Path(__file__).parent / "tokenizers"
VOCABULARY = 550


def make_lines():
    random_ = random.Random(51)
    lines = [b"", b" ", b"\n", b"\r\n\r\n", b"   x", b"x   ", b" \n  \n x", b"\t\t", b"a" * 100, b" " * 60,
             b"\n" * 30 + b"x", "é".encode(), "e\u0301".encode(), b"\xff\xfe", b"\xe4\xbd", b"\xf0\x9f\x98",
             b"a\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"]
    for markers in list(rules.MARKERS.values()) + list(rules.ORDINARY.values()):
        lines += [f"a{marker} b {marker[:-1]}".encode() for marker in markers]
    while len(lines) < 200:
        lines.append(rules.nasty_line(random_)[:68])
    return lines


def both(encode, line):
    text = line.decode("utf-8", "replace")
    lists = [" ".join(map(str, encode(text, special))) for special in (False, True)]
    return lists[0] if lists[0] == lists[1] else "|".join(lists)


def main():
    lines = make_lines()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "lines.txt").write_bytes(b"".join(rules.escaped(line) + b"\n" for line in lines))
    texts = list(rules.training_texts([]))
    for kind in ("v3", "v2", "llama3", "qwen", "gpt2"):
        folder = FOLDER / kind
        folder.mkdir(exist_ok=True)
        tokenizer = rules.train(kind, texts, VOCABULARY)
        (folder / "tokenizer.json").write_text(
            json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")))
        (folder / "tokenizer_config.json").write_text(rules.config_of(kind))

        def encode(text, special):
            tokenizer.encode_special_tokens = not special
            return tokenizer.encode(text, add_special_tokens=False).ids
        (folder / "ids.txt").write_text("".join(both(encode, line) + "\n" for line in lines))
        alphabet = {c: b for b, c in rules.byte_alphabet().items()}
        if kind == "llama3":
            vocabulary = tokenizer.get_vocab(with_added_tokens=False)
            ranks = {bytes(alphabet[c] for c in token): rank for token, rank in vocabulary.items()}
    folder = FOLDER / "kimi"
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(b"".join(
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])))
    special = rules.kimi_special(len(ranks))
    rules.write_kimi_config(folder, special)
    kimi = tiktoken.Encoding("kimi", pat_str=rules.KIMI, mergeable_ranks=ranks,
                             special_tokens=special)
    (folder / "ids.txt").write_text("".join(
        both(lambda text, all_: kimi.encode(text, allowed_special="all" if all_ else set(),
                                            disallowed_special=()), line) + "\n"
        for line in lines))


if __name__ == "__main__":
    main()
