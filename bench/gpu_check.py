"""One script for when a GPU is at hand, under four minutes: every kernel right, its speed, the engine, a transfer.

1. Each Triton kernel against float64, over odd shapes; sampled tokens, checksums and replayed graphs against the CPU
   and against eager steps.
2. The ceilings of this device: copying memory, multiplying bf16 matrices.
3. Attention timed against those ceilings and against torch's own on contiguous tensors; sampling and checksums too.
4. The whole engine in bf16: its tokens beside `transformers`, and a decode step against its byte floor.
5. Blocks pulled by NIXL from one GPU pool into another.

    python -m bench.gpu_check --out bench/results/gpu

`--device cpu` runs the same steps on tiny shapes with the CPU's backends: a rehearsal of the script, not a result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.gpu import choices, correctness, engine, speed, transfer


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu rehearses the script")
    parser.add_argument("--out", type=Path, help="folder for result.json")
    parser.add_argument("--model", default="smollm2-135m", help="alias or folder, for the engine")
    parser.add_argument("--check", action="store_true", help="exit 1 where a kernel is wrong or a bar is missed")
    return parser.parse_args()


def main() -> None:
    """Run every part; one that breaks is a line in the result, and the others still run."""
    given = arguments()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; `--device cpu` rehearses the script")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "correctness": lambda: correctness.check_all(device),
        "choices": lambda: choices.check_all(device),
        "speed": lambda: speed.measure(device),
        "engine": lambda: engine.run(given.model, device),
        "transfer": lambda: transfer.run(device),
    }
    began_s = time.perf_counter()
    result: dict[str, Any] = {"machine": _machine(device), "rehearsal": device.type != "cuda"}
    failed = []
    for name, part in parts.items():
        started_s = time.perf_counter()
        try:
            result[name] = part()
        except Exception as error:  # noqa: BLE001 the GPU's minutes are few: the other parts still run
            result[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            failed.append(f"{name} broke: {result[name]['error']}")
        print(f"{name} ({time.perf_counter() - started_s:.1f} s): {json.dumps(result[name], indent=2)}", flush=True)
    result["seconds"] = time.perf_counter() - began_s
    failed += [f"wrong: {case}" for part in ("correctness", "choices") for case in result[part].get("wrong", [])]
    if device.type == "cuda":
        failed += [f"missed: {bar}" for bar in result["speed"].get("missed", []) + result["engine"].get("missed", [])]
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "result.json").write_text(json.dumps(result | {"failed": failed}, indent=2) + "\n")
    print("\n".join(failed) or "all as it should be", f"({result['seconds']:.0f} s)")
    if given.check and failed:
        raise SystemExit(1)


def _machine(device: torch.device) -> dict[str, Any]:
    where = report.machine(torch.get_num_threads()) | {"torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        where |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return where


if __name__ == "__main__":
    main()
