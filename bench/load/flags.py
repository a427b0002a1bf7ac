"""The command line of `bench.serving`: the flags of `vllm bench serve`, as far as they mean something here."""

import argparse
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.load.metrics import GOODPUT, METRICS, QUEUE_METRICS, Asked


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What `python -m bench.serving --help` shows."""
    made = argparse.ArgumentParser(
        prog="python -m bench.serving", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_endpoint(made.add_argument_group("endpoint"))
    _add_load(made.add_argument_group("load"))
    _add_result(made.add_argument_group("result"))
    return made


def _add_endpoint(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", help="instead of --host and --port; may hold a path")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions (%(default)s)")
    add("--backend", choices=("openai", "vllm", "openai-chat"), help="written to the result; --endpoint decides")
    add("--model", help="as the server names it; default: the first of /v1/models")
    add("--served-model-name", help="the same, and wins over --model")
    add("--tokenizer", help="alias, Hugging Face id or folder: prompts are drawn from its vocabulary")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="OPENAI_API_KEY makes an authorization header")
    add("--extra-body", type=_object, metavar="JSON", help="into every request; wins over everything else")
    add("--temperature", type=float, help="default: the server's")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    add("--request-timeout", type=_positive, default=600.0, metavar="S", help="a longer request failed (%(default)s)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=("random",), default="random")
    add("--random-input-len", type=_natural, default=1024, help="tokens (%(default)s)")
    add("--random-output-len", type=_natural, default=128, help="tokens (%(default)s)")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, in [0, 1) (%(default)s)")
    add(
        "--random-prefix-len", type=_natural, default=0, help="tokens that all prompts begin with, on top (%(default)s)"
    )
    add("--num-prompts", type=_natural_from_1, default=1000)
    add("--num-warmups", type=_natural, default=0, help="requests before the clock runs (%(default)s)")
    add("--request-rate", type=_positive, default=math.inf, help="per second; inf: all at once (%(default)s)")
    add("--burstiness", type=_positive, default=1.0, help="shape of the gaps: 1 Poisson, less burstier (%(default)s)")
    add("--max-concurrency", type=_natural_from_1, help="requests at a time; default: any number")
    add("--seed", type=int, default=0)


def _add_result(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--percentile-metrics", default=",".join(METRICS), help=f"also {','.join(QUEUE_METRICS)} (%(default)s)")
    add("--metric-percentiles", default="99", help="as in 25,50,99.9 (%(default)s)")
    add("--goodput", nargs="+", metavar="METRIC:MS", help=f"most milliseconds of {', '.join(GOODPUT)}")
    add("--save-result", action="store_true")
    add("--save-detailed", action="store_true", help="save with the lists that have an entry per request")
    add("--result-dir", type=Path, help="default: here")
    add("--result-filename", help="default: LABEL-RATEqps-MODEL-DATE.json")
    add("--label", help="default: the backend")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="into the result as it is")


def pairs_of(items: Iterable[str], flag: str) -> dict[str, str]:
    """KEY=VALUE items as a dict. Raises ValueError."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{flag} wants KEY=VALUE, not {item!r}")
        found[name.strip()] = value.strip()
    return found


def headers_of(given: argparse.Namespace) -> dict[str, str]:
    """The headers of every request, names in lower case. Raises ValueError."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return headers | {name.lower(): value for name, value in pairs_of(given.header, "--header").items()}


def asked_of(given: argparse.Namespace) -> Asked:
    """Which figures are wanted. Raises ValueError."""
    metrics = tuple(name.strip() for name in given.percentile_metrics.split(","))
    if unknown := set(metrics) - {*METRICS, *QUEUE_METRICS}:
        raise ValueError(f"--percentile-metrics: unknown {', '.join(sorted(unknown))}")
    percentiles = tuple(float(q) for q in given.metric_percentiles.split(","))
    if not all(0 <= q <= 100 for q in percentiles):
        raise ValueError("--metric-percentiles: between 0 and 100")
    goodput: dict[str, float] = {}
    for pair in given.goodput or ():
        name, _, most = pair.partition(":")
        if name not in GOODPUT or not float(most) >= 0:
            raise ValueError(f"--goodput wants METRIC:MS with one of {', '.join(GOODPUT)}, not {pair!r}")
        goodput[name] = float(most)
    return Asked(metrics, percentiles, goodput or None)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("not positive")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("negative")
    return value


def _natural_from_1(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("less than 1")
    return value


_object.__name__, _positive.__name__ = "JSON object", "positive number"  # as argparse names what it refuses
_natural.__name__, _natural_from_1.__name__ = "number", "number from 1"
