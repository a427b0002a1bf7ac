"""`transformers serve`, of the environment that pdserve itself runs in, with its continuous batching."""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

from bench.peer.server import Launch, NotRunError, Spawned, Wants

NEEDS = ("fastapi", "uvicorn", "openai", "pydantic", "torch", "transformers")
NO_TOKEN = -1
NUM_BLOCKS = 64  # of 256 tokens: two for each of 32 streams. By itself it takes nearly all free memory, and is killed
BATCH_TOKENS = 2048


def server(folder: Path, threads: int, port: int, dtype: str) -> Spawned:
    """It, not started. Raises NotRunError where a package that it needs is missing."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise NotRunError(f"it needs {', '.join(missing)}")
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    return Spawned("transformers serve", launch(folder, threads, port, dtype), versions)


def launch(folder: Path, threads: int, port: int, dtype: str) -> Launch:
    """How to start it. That no token ends an answer has to be said in a whole generation config."""
    room = ["--cb-num-blocks", str(NUM_BLOCKS), "--cb-max-batch-tokens", str(BATCH_TOKENS)]
    flags = ["--continuous-batching", *room, "--device", "cpu", "--dtype", dtype]
    generation = json.dumps({"do_sample": False, "eos_token_id": NO_TOKEN})
    return Launch(
        (
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)),
            *(*flags, "--host", "127.0.0.1", "--port", str(port)),
        ),
        {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        f"http://127.0.0.1:{port}",
        Wants(str(folder), {"temperature": 0, "generation_config": generation}, ends_without_done=True),
        without=("OMP_WAIT_POLICY", "MKL_NUM_THREADS"),
        settings={"flags": " ".join(flags)},
    )
