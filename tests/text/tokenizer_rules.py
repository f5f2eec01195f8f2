# SPDX-License-Identifier: MIT
"""Tokenizers with the rules of published models, and lines of text that are hard for them."""
import base64
import json
import random

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
V3 = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
      r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
      r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""]
V2_LETTERS = """41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F
386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B
1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F
A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"""
V2_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
V2_CJK = "4E00-9FA5 800-4E00 AC00-D7FF"
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def char_class(ranges):
    """A class of code points; those that mean something in a class are escaped."""
    def one(code):
        character = chr(int(code, 16))
        return "\\" + character if character in "[]\\^-&~" else character
    return "".join("-".join(one(end) for end in part.split("-")) for part in ranges.split())


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def bytes_alone():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def rules(kind):
    """(normalizer, pre-tokenizer) of "v3", "v2", "llama3", "qwen", "gpt2" or "odd"."""
    if kind == "v3":
        return None, pre_tokenizers.Sequence([split(p) for p in V3] + [bytes_alone()])
    if kind == "v2":
        return None, pre_tokenizers.Sequence([
            split(r"[\r\n]"), split(rf"\s?[{char_class(V2_LETTERS)}]+"),
            split(rf"\s?[{char_class(V2_PUNCTUATION)}]+"), split(r"\s+$"),
            split(f"[{char_class(V2_CJK)}]+"), pre_tokenizers.Digits(individual_digits=True),
            bytes_alone()])
    if kind == "llama3":
        return None, pre_tokenizers.Sequence([split(LLAMA3), bytes_alone()])
    if kind in ("qwen", "odd"):
        return normalizers.NFC(), pre_tokenizers.Sequence([split(QWEN), bytes_alone()])
    return None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


MARKERS = {
    "v3": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"],
    "v2": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
               "<|eot_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gpt2": ["<|endoftext|>"],
    "odd": ["<|endoftext|>"],
}
# Of the kind "odd": added tokens with all flags.
ODD = [AddedToken("</think>", lstrip=True, special=True), AddedToken("self.x", rstrip=True),
       AddedToken("||", lstrip=True, rstrip=True), AddedToken("forge", single_word=True),
       AddedToken("A\u030a", normalized=True), AddedToken("o\u0308", normalized=False),
       AddedToken("!!", single_word=True, lstrip=True), AddedToken("字字", rstrip=True)]
ORDINARY = {
    "v3": ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
    "qwen": ["<think>", "</think>", "<tool_call>"],
}


def train(kind, texts, vocabulary):
    """A tokenizer of those rules, trained on texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    normalizer, pieces = rules(kind)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in MARKERS[kind]])
    tokenizer.add_tokens([AddedToken(t, normalized=True) for t in ORDINARY.get(kind, [])])
    if kind == "odd":
        tokenizer.add_tokens([token for token in ODD if not token.special])
        tokenizer.add_special_tokens([token for token in ODD if token.special])
    if kind == "llama3":
        bos = MARKERS[kind][0]
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
                                          special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def config_of(kind):
    """tokenizer_config.json."""
    markers = MARKERS[kind]
    config = {"eos_token": markers[1] if len(markers) > 1 and kind != "qwen" else markers[0]}
    if kind in ("v3", "v2"):
        config.update(bos_token=markers[0], add_bos_token=True)
    if kind == "llama3":
        config.update(bos_token=markers[0])
    return json.dumps(config, ensure_ascii=False)


def read_ranks(path):
    with open(path, "rb") as file:
        lines = [line.split() for line in file if line.strip()]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def merges_of(ranks):
    """The pair of tokens that makes each token, as tiktoken would make it."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            at = min(range(len(parts) - 1),
                     key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 60))
            if ranks.get(parts[at] + parts[at + 1], 1 << 60) >= rank:
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges


def from_ranks(ranks, kind, first_special):
    """A tokenizer.json of a tiktoken file."""
    alphabet = byte_alphabet()
    spell = lambda token: "".join(alphabet[b] for b in token)
    tokenizer = Tokenizer(models.BPE(
        vocab={spell(token): rank for token, rank in ranks.items()},
        merges=[(spell(a), spell(b)) for a, b in merges_of(ranks)]))
    normalizer, tokenizer.pre_tokenizer = rules(kind)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in MARKERS[kind]])
    assert tokenizer.token_to_id(MARKERS[kind][0]) == first_special
    return tokenizer


def byte_alphabet():
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in own]
    return {**{b: chr(b) for b in own}, **{b: chr(256 + n) for n, b in enumerate(others)}}


WORDS = """the of and forge bellows don't I'll we've it's IT'S naïve Straße façade ﬁne ǅ ſ'S
def return self.x += lambda x: x**2 #include <vector> std::vector<int> && || != === /* */ // \\n
if(a[i]>=0x1F){b->c();} 3.14159 1e-9 0b1010 12345678 007 ½ ² Ⅷ ٣٤٥ 𝟘𝟙
你好 世界 深度求索 人工智能 「引用」 。 、 ， 日本語 ひらがな カタカナ ー 한국어 키보드 ไทย हिन्दी العربية עברית
😀 👨‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ ✨ e\u0301 o\u0308 \u1e9b\u0323 \u00c5 A\u030a \u0e33 \u200d \u200b \ufeff \u2028 \u0000
<think> </think> <｜User｜> <|im_start|> <|im_end|> <|endoftext|> <｜begin▁of▁sentence｜> <|eot_id|>
< | ｜ ▁ Ġ Ċ ĠĠ <| |> https://example.org/a?b=c&d=%20 a.b@c.de --option=--- ____ ...... !!!! ??""".split(" ")
WORDS = [word for part in WORDS for word in part.split("\n")]
SPACES = [" ", " ", " ", " ", "", "", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0",
          "\u3000", "\u2003", "\x0b", "\x0c", "\x85", "\t\t\n  \n"]
# Assigned in Unicode 14 by every library; PCRE2 counts U+180E as white space, Oniguruma does not.
RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x373), (0x3A3, 0x3FF), (0x400, 0x52F), (0x5D0, 0x5EA),
          (0x620, 0x64A), (0x905, 0x939), (0xE01, 0xE3A), (0x1100, 0x11FF), (0x2010, 0x205E),
          (0x2190, 0x22FF), (0x2500, 0x257F), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5),
          (0xAC00, 0xD7A3), (0xFF01, 0xFF5E), (0x1F300, 0x1F5FF), (0x1D400, 0x1D454), (0x300, 0x36F)]


def nasty_line(random_):
    """Bytes; one of six is broken UTF-8."""
    kind = random_.randrange(6)
    if kind < 3:
        text = "".join(random_.choice(WORDS) + random_.choice(SPACES)
                       for _ in range(random_.randrange(1, 14)))
    elif kind == 3:
        text = "".join(chr(random_.randint(*random_.choice(RANGES)))
                       for _ in range(random_.randrange(1, 40)))
    elif kind == 4:
        letter = random_.choice(["a", " ", "\n", "ab", "!", "1", "字", "é", "\t", " \n", "aA", "'s"])
        text = letter * random_.randrange(1, 60)
    else:
        broken = bytearray("".join(random_.choice(WORDS) + random_.choice(SPACES)
                                   for _ in range(random_.randrange(1, 8))).encode())
        for _ in range(random_.randrange(1, 6)):
            if broken and random_.random() < 0.5:
                del broken[random_.randrange(len(broken))]
            else:
                broken.insert(random_.randrange(len(broken) + 1),
                              random_.choice([0x80, 0xC0, 0xC2, 0xE4, 0xED, 0xA0, 0xF0, 0xF5, 0xFF]))
        return bytes(broken)
    return text.encode()


def escaped(line):
    """As print_ids reads it."""
    return line.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def training_texts(files, seed=1):
    random_ = random.Random(seed)
    for path in files:
        with open(path, "rb") as file:
            yield file.read().decode("utf-8", "replace")
    for _ in range(4000):
        yield nasty_line(random_).decode("utf-8", "replace")


def kimi_special(num_ranks):
    """Moonlight's special tokens behind so many ranks."""
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
             "<|im_middle|>"]
    return {name: num_ranks + i for i, name in enumerate(names)}


def write_kimi_config(folder, special):
    """The tokenizer_config.json that goes with them."""
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "added_tokens_decoder": {str(i): {"content": name} for name, i in special.items()},
        "bos_token": "[BOS]", "eos_token": "[EOS]"}))
