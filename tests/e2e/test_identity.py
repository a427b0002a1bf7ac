"""Token ids identical to `transformers` on the default model, through real processes: nixl, shm, colocated, preempted.

24 prompts of 1 to 1,500 tokens, sent at once, then once more. Each mode asserts that its path was really taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime.model_store import resolve
from tests.e2e import reference
from tests.e2e.conftest import MODES, options_for
from tests.e2e.house import LEASE_MARGIN_S, QUICK, Answer, House, house

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
NUM_NEW = 32
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 513, 1500)
MAX_TIES = 2


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Slices of a real text, each from another place, so that no two share a first block."""
    from tokenizers import Tokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = Tokenizer.from_file(str(resolve(MODEL) / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    step = (len(ids) - max(LENGTHS)) // len(LENGTHS)
    chosen = [ids[i * step : i * step + length] for i, length in enumerate(LENGTHS)]
    assert [len(prompt) for prompt in chosen] == list(LENGTHS)
    assert len({tuple(prompt[:16]) for prompt in chosen}) == len(chosen)
    return chosen


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return reference.in_a_process(MODEL, prompts, NUM_NEW)


def check(prompts: list[list[int]], answers: list[Answer], expected: list[list[int]]) -> None:
    ties = reference.assert_identical(MODEL, prompts, [answer.token_ids for answer in answers], expected)
    assert ties <= MAX_TIES
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.finish_reason == "length"
        assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (len(prompt), NUM_NEW)


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, expected: list[list[int]]) -> Iterator[House]:
    """`expected` comes first, so that the reference has the cores for itself."""
    options = options_for(request.param)
    env = {"*": QUICK | {"PDSERVE_LEASE_S": "5"}}
    with house(MODEL, env=env, **options) as made:
        yield made


def test_identical_twice(
    served: House, prompts: list[list[int]], expected: list[list[int]], request: pytest.FixtureRequest
) -> None:
    mode = request.node.callspec.params["served"]
    check(prompts, first := served.complete_all(prompts, NUM_NEW), expected)
    if mode == "colocated":
        colocated_path(served, first)
    else:
        disaggregated_path(served, mode, first)
    hits = {role: served.total(role, "pdserve_worker_prefix_hit_tokens") for role in ("prefill", "decode")}
    check(prompts, served.complete_all(prompts, NUM_NEW), expected)
    for role in ("decode",) if mode == "colocated" else ("prefill", "decode"):
        assert served.total(role, "pdserve_worker_prefix_hit_tokens") > hits[role], f"no prefix hit on {role}"
    served.assert_books_close(LEASE_MARGIN_S)


def colocated_path(house: House, answers: list[Answer]) -> None:
    assert {house.timeline(answer.request_id)["path"] for answer in answers} == {"colocated"}
    assert house.total("decode", "pdserve_worker_prompt_tokens_computed") >= sum(LENGTHS)
    assert house.total("decode", "pdserve_worker_steps_mixed") > 0


def disaggregated_path(house: House, mode: str, answers: list[Answer]) -> None:
    assert {house.timeline(answer.request_id)["path"] for answer in answers} == {"disaggregated"}
    assert house.total("decode", "pdserve_worker_prompt_tokens_computed") == 0
    num_blocks = sum(-(-length // 16) for length in LENGTHS)
    block_bytes = 30 * 2 * 3 * 16 * 64 * 4  # layers, K and V, KV heads, slots, head size, float32
    assert house.total("decode", "pdserve_kvtransfer_pulled_blocks_total", transport=mode) == num_blocks
    assert house.total("decode", "pdserve_kvtransfer_pulled_bytes_total", transport=mode) == num_blocks * block_bytes


def test_identical_when_preempted(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A pool so small that running sequences must give their blocks back."""
    short = [i for i, length in enumerate(LENGTHS) if length <= 129]
    env = {"*": QUICK, "decode": {"PDSERVE_NUM_BLOCKS": "24", "PDSERVE_MAX_MODEL_LEN": "384"}}
    with house(MODEL, env=env, **options_for("colocated")) as small:
        chosen = [prompts[i] for i in short]
        check(chosen, small.complete_all(chosen, NUM_NEW), [expected[i] for i in short])
        assert small.total("decode", "pdserve_worker_preemptions") > 0
        small.assert_books_close()
