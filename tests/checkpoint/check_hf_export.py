# SPDX-License-Identifier: MIT
"""Whether transformers computes from exported folders what it computed from the first ones.

Usage: check_hf_export.py BELLOWS MODELS [NAME ...]

BELLOWS is the program, MODELS the folder that make_hf_models.py made. Each model (default: all) is
exported in its own types and in f32, and its logits are compared with reference.safetensors.
Needs torch, transformers and safetensors."""

import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main(program, models, *names):
    worst = 0
    for name in names or sorted(os.listdir(models)):
        reference = load_file(os.path.join(models, name, "reference.safetensors"))
        for dtype in ([], ["--dtype", "f32"]):
            if name.endswith("fp8") and not dtype:
                continue  # transformers computes FP8 on some devices only
            with tempfile.TemporaryDirectory() as folder:
                out = os.path.join(folder, "out")
                subprocess.run([program, "export", "--checkpoint", os.path.join(models, name),
                                "--out", out, *dtype], check=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
                model, found = AutoModelForCausalLM.from_pretrained(
                    out, dtype=torch.float32, attn_implementation="eager",
                    output_loading_info=True)
                assert not found["missing_keys"] and not found["unexpected_keys"], found
                model.set_experts_implementation("eager")
                with torch.no_grad():
                    logits = model.eval()(reference["tokens"][:, :-1].long()).logits
            error = ((logits - reference["logits"]).abs().max() /
                     reference["logits"].abs().max()).item()
            worst = max(worst, error)
            print(f"{name} {' '.join(dtype) or 'as stored'}: {error:.2e} of the largest logit")
    return 0 if worst < 1e-5 else 1


sys.exit(main(*sys.argv[1:]))
