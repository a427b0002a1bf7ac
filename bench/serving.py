"""`python -m bench.serving`: load on any OpenAI-compatible endpoint, with flags and result JSON of `vllm bench serve`.

    python -m bench.serving --port 8000 --num-prompts 100 --request-rate 5     # open loop: sent when due
    python -m bench.serving --port 8000 --num-prompts 100 --max-concurrency 8  # closed loop: sent when one is done

1. Ask the endpoint for its model (unless --model) and whether it takes token ids. Draw prompts, send times by --seed.
2. Make the connections; run the warm-ups, whose prompts share nothing with the measured ones but the prefix.
3. Send every request when it is due, or when a slot is free; note when each chunk comes. See bench/load/generator.py.
4. Print, and with --save-result write, what became of them. See bench/load/metrics.py for the definitions, and
   where they are stricter than vLLM's.

As in vLLM, --dataset-name random ignores end-of-text tokens; --no-ignore-eos leaves the field out. With --request-rate
and --max-concurrency both, requests are due by the schedule and wait for a slot; their latencies count from due.
"""

import argparse
import json
import math
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench import report
from bench.load import table, workload
from bench.load.arrivals import due_times
from bench.load.connections import Pool, Target
from bench.load.endpoint import LOWEST_SHARE, Endpoint, EndpointError
from bench.load.flags import asked_of, headers_of, pairs_of, parser
from bench.load.generator import Job, Limits, Run, run
from bench.load.metrics import measure
from bench.load.notes import books, notes
from services.runtime.model_store import ModelStoreError, resolve

DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "due_times", "queue_times")
MORE_DETAILS = ("send_lags", "generated_texts", "errors")
MOST_WARM_CONNECTIONS = 512


def extra_of(given: argparse.Namespace) -> dict[str, Any]:
    """What goes into every request body beyond prompt and length."""
    extra: dict[str, Any] = {"ignore_eos": True} if given.ignore_eos else {}
    if given.temperature is not None:
        extra["temperature"] = given.temperature
    return extra | (given.extra_body or {})


def vocabulary_of(given: argparse.Namespace, endpoint: Endpoint, model: str) -> workload.Vocabulary:
    """Token ids where the endpoint takes them, else text of the tokenizer's, else words. Raises EndpointError."""
    chat = given.endpoint.endswith(workload.CHAT)
    bound = None if chat else endpoint.largest_vocabulary(given.endpoint, model, given.extra_body or {})
    if given.tokenizer is not None:
        tokenizer = workload.load_tokenizer(resolve(given.tokenizer))
        return workload.text_of(tokenizer) if bound is None else workload.token_ids(workload.plain_ids(tokenizer))
    if bound is None:
        return workload.words()
    return workload.token_ids(range(bound // LOWEST_SHARE, bound))


def num_warm_connections(given: argparse.Namespace) -> int:
    """As many as may be in use at once; in open loop at a finite rate nobody knows, and it is a guess."""
    guess = given.num_prompts if math.isinf(given.request_rate) else max(32, math.ceil(4 * given.request_rate))
    wanted: int = given.max_concurrency or guess
    return min(wanted, int(given.num_prompts), MOST_WARM_CONNECTIONS)


async def drive(
    given: argparse.Namespace, target: Target, load: list[Job], warmups: list[Job]
) -> tuple[Run, list[str]]:
    """The run, and why warm-ups failed. Raises OSError where nobody listens."""
    pool = Pool(target)
    try:
        await pool.warm(num_warm_connections(given))
        limits = Limits(given.max_concurrency, given.request_timeout, given.save_detailed)
        failed: list[str] = []
        if warmups:
            report.progress(f"{len(warmups)} warm-ups")
            warmed = await run(warmups, pool, Limits(given.max_concurrency or 8, given.request_timeout))
            failed = [outcome.error for outcome in warmed.outcomes if outcome.error]
            await pool.warm(num_warm_connections(given))
        report.progress(f"{len(load)} requests")
        return await run(load, pool, limits), failed
    finally:
        report.progress("")
        pool.close()


def jobs(given: argparse.Namespace, vocabulary: workload.Vocabulary, model: str, kind: str = "") -> list[Job]:
    """The requests of the run, or, of kind "warm-up", those before it, all due at once."""
    number = given.num_warmups if kind else given.num_prompts
    lengths = workload.Lengths(
        given.random_input_len, given.random_output_len, given.random_range_ratio, given.random_prefix_len
    )
    prompts = workload.make_prompts(number, lengths, vocabulary, f"{given.seed} {kind}".strip())
    times = due_times(number, math.inf if kind else given.request_rate, given.burstiness, given.seed)
    bodies = workload.bodies(prompts, given.endpoint, model, extra_of(given))
    return [Job(*each) for each in zip(prompts, bodies, times, strict=True)]


def settings_of(given: argparse.Namespace, model: str, vocabulary: workload.Vocabulary) -> dict[str, Any]:
    """What was asked for, as vLLM names it."""
    rate, burstiness = ("inf" if math.isinf(each) else each for each in (given.request_rate, given.burstiness))
    backend = given.backend or ("openai-chat" if given.endpoint.endswith(workload.CHAT) else "openai")
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": given.label,
        "model_id": model,
        "tokenizer_id": given.tokenizer,
        "num_prompts": given.num_prompts,
        "request_rate": rate,
        "burstiness": burstiness,
        "max_concurrency": given.max_concurrency,
        "seed": given.seed,
        "dataset_name": given.dataset_name,
        "random_input_len": given.random_input_len,
        "random_output_len": given.random_output_len,
        "random_range_ratio": given.random_range_ratio,
        "random_prefix_len": given.random_prefix_len,
        "num_warmups": given.num_warmups,
        "extra_body": extra_of(given),
        "goodput": given.goodput,
        "prompts_are": vocabulary.name,
        "machine": report.machine(1),
    } | pairs_of(given.metadata, "--metadata")


def save(given: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Write the result as JSON, as `vllm bench serve` names and thins it out; returns the file."""
    kept = result if given.save_detailed else {k: v for k, v in result.items() if k not in DETAILS + MORE_DETAILS}
    limit = "" if given.max_concurrency is None else f"-concurrency{given.max_concurrency}"
    model = result["model_id"].rpartition("/")[2]
    name = f"{given.label or result['backend']}-{given.request_rate}qps{limit}-{model}-{result['date']}.json"
    path = (given.result_dir or Path()) / (given.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=None if given.save_detailed else 2) + "\n")
    return path


def bench(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run, print, save. Returns the result. Raises EndpointError, OSError, ValueError, ModelStoreError."""
    headers, asked = headers_of(given), asked_of(given)
    host = f"[{given.host}]" if ":" in given.host else given.host
    base_url = given.base_url or f"http://{host}:{given.port}"
    target = Target(base_url, given.endpoint, headers)
    endpoint = Endpoint(base_url, headers)
    try:
        model = given.served_model_name or given.model or endpoint.first_model()
        vocabulary = vocabulary_of(given, endpoint, model)
    finally:
        endpoint.close()
    load, warmups = jobs(given, vocabulary, model), jobs(given, vocabulary, model, "warm-up")
    settings = settings_of(given, model, vocabulary)
    done, failed_warmups = uvloop.run(drive(given, target, load, warmups))
    is_open = given.max_concurrency is None or not math.isinf(given.request_rate)
    result = settings | measure(done, is_open, asked) | books(done)
    result["notes"] = notes(result, failed_warmups)
    table.show(console, result, asked, result["notes"])
    if given.save_result or given.save_detailed:
        print(f"written: {save(given, result)}")
    return result


def main() -> None:
    """The command. Exits 1 where nothing completed, 2 where nothing could be sent."""
    given = parser(__doc__).parse_args()
    try:
        result = bench(given, Console(width=None if sys.stdout.isatty() else 120))
    except (EndpointError, OSError, ValueError, ModelStoreError) as error:
        print(f"bench.serving: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(
        f"{result['completed']} of {given.num_prompts} completed, {result['request_throughput']:.2f} per second; "
        f"{result['output_throughput']:.1f} output tokens per second."
    )
    if not result["completed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
