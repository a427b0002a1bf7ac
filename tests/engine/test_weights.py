import json
import shutil
from pathlib import Path

import pytest
import torch

from services.engine.models.general import GeneralModel
from services.engine.models.interface import UnsupportedModelError
from services.engine.models.lean import LeanModel, pack
from services.engine.weights import choose_dtype, load_model
from services.runtime.model_store import resolve

TINY = "tiny-random-llama"


def test_auto_takes_the_lean_path_where_there_is_a_compiler() -> None:
    expected = LeanModel if shutil.which("g++") else GeneralModel
    assert isinstance(load_model(TINY, "float32"), expected)


def test_bfloat16_takes_the_general_path() -> None:
    model = load_model(TINY, "bfloat16")
    assert isinstance(model, GeneralModel)
    assert model.dtype == torch.bfloat16
    with pytest.raises(UnsupportedModelError, match="lean"):
        load_model(TINY, "bfloat16", path="lean")


@pytest.mark.parametrize("path", ["general", "lean"])
def test_what_a_model_says_of_itself(path: str) -> None:
    if path == "lean" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    model = load_model(TINY, "float32", path=path)  # type: ignore[arg-type]
    shape = model.kv_shape(num_blocks=10, block_size=8)
    assert (model.vocab_size, model.max_model_len) == (262, 4096)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype) == (2, 2, 16, torch.float32)
    assert shape.block_bytes == 2 * 2 * 2 * 8 * 16 * 4


def test_dtype_names() -> None:
    assert choose_dtype("float32") == torch.float32
    assert choose_dtype("bfloat16") == torch.bfloat16
    assert choose_dtype("auto") in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="float8"):
        choose_dtype("float8")


def test_pack() -> None:
    weight = torch.arange(6.0 * 5).view(6, 5)
    packed = pack(weight, 4)
    assert packed.shape == (2, 5, 4)
    for output in range(6):
        assert torch.equal(packed[output // 4, :, output % 4], weight[output])
    assert not packed[1, :, 2:].any()


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    """Never a pickle, whatever the folder holds."""
    shutil.copytree(resolve(TINY), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(tmp_path / "model", "float32")


def test_a_family_that_is_unknown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ValueError, match="no_such_family"):
        load_model(tmp_path, "float32")
