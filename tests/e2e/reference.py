"""What `transformers` itself generates: stock attention, float32, greedy. Run as a process of its own, for its threads.

    python -m tests.e2e.reference < {"model": folder, "prompts": [[...]], "num_tokens": n}

prints {"outputs": [[...]]}. `logits_gap` judges a first difference: how far the other token lies below the best.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.runtime.model_store import resolve

SIDE_BY_SIDE = 8
MOST_PADDED = 1024
TIE = 1e-3  # logits closer than this are equal to float32 rounding over 30 layers (their size is about 10 to 20)


@functools.cache
def load(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # go on to the last token
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(folder: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Short prompts of similar length side by side, padded on the left: a step of eight costs little more."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for group in groups([len(prompt) for prompt in prompts]):
        for i, tokens in zip(group, _generate([prompts[i] for i in group], num_tokens, load(folder)), strict=True):
            outputs[i] = tokens
    return outputs


def groups(lengths: list[int]) -> list[list[int]]:
    """Indices by length, at most SIDE_BY_SIDE together, and no more than MOST_PADDED tokens with their padding."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        last = found[-1] if found else []
        if last and len(last) < SIDE_BY_SIDE and lengths[i] * (len(last) + 1) <= MOST_PADDED:
            last.append(i)
        else:
            found.append([i])
    return found


def _generate(prompts: list[list[int]], num_tokens: int, model: Any) -> list[list[int]]:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens


def logits_gap(folder: str, context: list[int], token: int) -> float:
    """Best logit minus the token's, for what follows `context`."""
    import torch

    logits = load(folder)(torch.tensor([context])).logits[0, -1]
    return float(logits.max() - logits[token])


def in_a_process(model: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    job = {"model": str(resolve(model)), "prompts": prompts, "num_tokens": num_tokens}
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "OMP_WAIT_POLICY": "active",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.reference"],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        check=True,
        env=env,
        cwd=Path(__file__).parents[2],
    )
    outputs: list[list[int]] = json.loads(done.stdout.splitlines()[-1])["outputs"]
    return outputs


def here(model: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """In this process: for small models, where starting another would cost more."""
    return generate(str(resolve(model)), prompts, num_tokens)


def assert_identical(model: str, prompts: list[list[int]], outputs: list[list[int]], expected: list[list[int]]) -> int:
    """Token ids are equal, but where the first difference is a tie that rounding decides; returns how many ties."""
    num_ties = 0
    for number, (prompt, got, wanted) in enumerate(zip(prompts, outputs, expected, strict=True)):
        if got == wanted:
            continue
        assert len(got) == len(wanted), f"prompt {number} ({len(prompt)} tokens): {len(got)} tokens, not {len(wanted)}"
        at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
        gap = logits_gap(str(resolve(model)), prompt + wanted[:at], got[at])
        assert gap < TIE, (
            f"prompt {number} ({len(prompt)} tokens): token {at} is {got[at]}, {gap:.4f} below {wanted[at]}"
        )
        num_ties += 1
    return num_ties


if __name__ == "__main__":
    task = json.load(sys.stdin)
    results = generate(task["model"], task["prompts"], task["num_tokens"])
    print(json.dumps({"outputs": results}))
