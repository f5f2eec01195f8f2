# SPDX-License-Identifier: MIT
"""Compares chats of print_ids with Jinja2's text and the package tokenizers' ids.

  python3 compare_chats.py PRINT_IDS FOLDER

FOLDER: of a tokenizer.json. Texts must be equal; so must the ids, of conversations without markers
in their messages."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

import chat_templates
import tokenizer_rules as rules


def refuse(message):
    raise jinja2.TemplateError(message)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.globals["raise_exception"] = refuse
    env.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent)
    return env


def main():
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    name_of = lambda token: token["content"] if isinstance(token, dict) else token
    tokens = {key: name_of(config[key]) for key in ("bos_token", "eos_token") if config.get(key)}
    failures = compared = 0
    with tempfile.TemporaryDirectory() as copy:
        copy = pathlib.Path(copy)
        shutil.copy(folder / "tokenizer.json", copy)
        (copy / "tokenizer_config.json").write_text(json.dumps(tokens))
        for name, source in chat_templates.TEMPLATES.items():
            (copy / "chat_template.jinja").write_text(source)
            template = environment().from_string(source)
            for chat in chat_templates.CONVERSATIONS:
                messages = [{"role": role, "content": content} for role, content in chat]
                try:
                    text = template.render(messages=messages, add_generation_prompt=True,
                                           tools=None, documents=None, **tokens)
                except jinja2.TemplateError as error:
                    text = error
                lines = b"".join(role.encode() + b"\t" + rules.escaped(content.encode()) + b"\n"
                                 for role, content in chat) + b"\n"
                done = subprocess.run([program, str(copy), "--chat"], input=lines, timeout=60,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                compared += 1
                if isinstance(text, Exception):
                    ok = done.returncode == 2
                    what = done.stderr
                else:
                    what = done.stdout or done.stderr
                    parts = done.stdout.split(b"\n")
                    ok = len(parts) == 3 and parts[1] == rules.escaped(text.encode())
                    added = theirs.get_added_tokens_decoder().values()
                    if ok and not any(token.content in content for _, content in chat
                                      for token in added):
                        expected = theirs.encode(text, add_special_tokens=False).ids
                        ok = [int(i) for i in parts[0].split()] == expected
                if not ok:
                    failures += 1
                    print(f"{name}: {chat}\n  theirs {text!r}\n  ours   {what.decode()!r}")
    print(f"{compared} chats, {failures} different")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
