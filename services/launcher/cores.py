"""How the machine's cores are shared out, so that a worker's threads don't steal from its neighbour's."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_per_worker(num_workers: int, cores: int | None = None) -> int:
    """Compute threads for each of `num_workers` processes, at least one."""
    return max(1, (num_cores() if cores is None else cores) // max(1, num_workers))


def thread_env(threads: int) -> dict[str, str]:
    """Environment of a process that computes on `threads` threads.

    Waiting OpenMP threads sleep: spinning ones steal the core from the process next door, whose parallel regions of 80
    microseconds were then seen to take 4 to 8 ms.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "RAYON_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
