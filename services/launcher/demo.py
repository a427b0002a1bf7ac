"""`pdserve demo`: a real model's answer through real processes, and where the time went.

1. The model is fetched; NATS, the directory, one prefill worker, one decode worker and the gateway start.
2. A first request, not timed, makes the connections. Then a short question and one behind a prompt of about 1,500
   tokens are asked, and their answers streamed.
3. For each: the stages (`services/gateway/timeline.py` says what each spans), each timed by one process on its own
   clock, beside the total that the client measured; the bytes and blocks that NIXL moved, and how much of the transfer
   hid behind the prefill.
4. It fails unless the short answer says Paris, both went through both pools, and the stages explain the total.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution

import httpx2
from rich.console import Console
from rich.text import Text

from services.launcher.client import Answer, stream_chat
from services.launcher.deployment import Deployment
from services.launcher.timeline import Timeline, read_timeline, timeline_table

QUESTION = "What is the capital of France?"
LONG_QUESTION = "In one sentence: what may I do under this licence?"
NUM_LONG_CHARACTERS = 7_400  # of the licence: about 1,500 tokens of the default model
MAX_RESIDUAL_SHARE = 0.05
_MAX_TOKENS = 64


def run(house: Deployment, model: str, console: Console) -> bool:
    """Asks both questions of a running deployment; returns whether everything was as promised."""
    problems: list[str] = []
    warm_up = [{"role": "user", "content": "Say hello."}]  # makes every connection, so that none is timed
    stream_chat(house.gateway_url, model, warm_up, lambda text: None, temperature=0, max_tokens=4)
    for title, prompt, expected in (("a short prompt", QUESTION, "Paris"), ("a long prompt", long_prompt(), "")):
        answer = _ask(house, model, title, prompt, console)
        timeline = _show(house, answer, title, console)
        problems.extend(f"{title}: {problem}" for problem in _problems(answer, timeline, expected))
    for problem in problems:
        console.print(problem, style="bold red")
    if not problems:
        console.print("prompt in, KV blocks moved, tokens streamed out: all as promised", style="bold green")
    return not problems


def long_prompt() -> str:
    """The beginning of pdserve's licence, and a question about it."""
    licence = distribution("pdserve").read_text("licenses/LICENSE")
    if licence is None:
        raise FileNotFoundError("the installed package carries no LICENSE: install it again")
    sentences = " ".join(licence.split())[:NUM_LONG_CHARACTERS].rpartition(". ")[0]
    return f"{sentences}.\n\n{LONG_QUESTION}"


def _ask(house: Deployment, model: str, title: str, prompt: str, console: Console) -> Answer:
    shown = prompt if len(prompt) < 100 else f"(the licence of pdserve) {LONG_QUESTION}"
    console.rule(title)
    console.print(Text(f"> {shown}", style="bold"))
    answer = stream_chat(
        house.gateway_url,
        model,
        [{"role": "user", "content": prompt}],
        lambda text: console.print(Text(text), end="", soft_wrap=True),
        temperature=0,
        max_tokens=_MAX_TOKENS,
    )
    counts = f"{answer.num_prompt_tokens} tokens in, {answer.num_output_tokens} out"
    console.print(f"\n{counts}, the first after {answer.first_token_s:.2f} s\n", style="dim")
    return answer


def _show(house: Deployment, answer: Answer, title: str, console: Console) -> Timeline:
    url = f"{house.gateway_url}/debug/requests/{answer.request_id}"
    found = httpx2.get(url, timeout=10.0, trust_env=False).raise_for_status()
    timeline = read_timeline(found.json(), answer.total_s)
    console.print(timeline_table(timeline, f"{title}, {timeline.path}"))
    moved = f"{house.transport} moved {timeline.num_blocks} blocks, {timeline.num_bytes:,} bytes"
    console.print(f"{moved}: {_hidden(timeline)}\n")
    return timeline


def _hidden(timeline: Timeline) -> str:
    transfer_ms, exposed_ms = timeline.transfer_s * 1e3, timeline.stages_s["exposed_transfer"] * 1e3
    spans = f"{transfer_ms:.1f} ms from first pull to last verified block, {exposed_ms:.1f} ms exposed"
    return f"{spans}, so {timeline.hidden_share:.0%} hid behind the prefill."


def _problems(answer: Answer, timeline: Timeline, expected: str) -> Iterator[str]:
    if expected not in answer.text:
        yield f"the answer does not say {expected}"
    if timeline.path != "disaggregated":
        yield f"the path was {timeline.path}"
    if timeline.num_blocks == 0:
        yield "no block was moved"
    if timeline.residual_share > MAX_RESIDUAL_SHARE:
        yield f"the stages leave {timeline.residual_share:.1%} of the total unexplained"
