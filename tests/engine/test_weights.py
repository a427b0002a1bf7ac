import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig

from services.engine.models.general import GeneralModel
from services.engine.models.interface import UnsupportedModelError
from services.engine.models.lean import LeanModel, pack, quantise
from services.engine.stored_weights import StoredWeights
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


def test_int8_is_for_the_lean_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be had it is refused: other weights would be another model."""
    if shutil.which("g++"):
        model = load_model(TINY, "int8")
        assert isinstance(model, LeanModel)
        assert model.dtype == model.kv_shape(1).dtype == torch.float32
    with pytest.raises(UnsupportedModelError, match=r"int8.*lean"):
        load_model(TINY, "int8", path="general")
    with pytest.raises(UnsupportedModelError, match=r"int8.*CPU"):
        load_model(TINY, "int8", "cuda")
    monkeypatch.setattr("services.engine.models.lean.library", lambda: None)
    with pytest.raises(UnsupportedModelError, match="compiler"):
        load_model(TINY, "int8")


def test_quantise() -> None:
    """By hand: scales 2/127 and 0; 0.5 is 31.75 steps, -1 is -63.5 (to even), 0.004 is 0.254."""
    values, scale = quantise(torch.tensor([[2.0, 0.5, -1.0, 0.004], [0.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16))
    assert values.dtype == torch.int8
    assert values.tolist() == [[127, 32, -64, 0], [0, 0, 0, 0]]
    assert scale.tolist() == pytest.approx([2 / 127, 0.0])


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


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    folder = resolve(TINY)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    whole = StoredWeights(folder)
    names = sorted(whole)
    weight_map = {name: f"model-{1 + (n % 2):05}-of-00002.safetensors" for n, name in enumerate(names)}
    for shard in set(weight_map.values()):
        mine = {name: whole[name] for name in names if weight_map[name] == shard}
        safetensors.torch.save_file(mine, tmp_path / "model" / shard)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = StoredWeights(tmp_path / "model")
    assert sorted(sharded) == names
    assert all(torch.equal(sharded[name], whole[name]) for name in names)
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002"):
        load_model(tmp_path / "model", "float32")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, "no place for: .*o_proj.bias"),
        ({"model.layers.1.mlp.up_proj.weight": None}, "no weight model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(2, 2, dtype=torch.float16)}, "float16"),
    ],
)
def test_weights_that_are_not_of_the_shape_are_refused(change: dict[str, torch.Tensor | None], complaint: str) -> None:
    folder = resolve(TINY)
    weights = {name: tensor for name, tensor in {**StoredWeights(folder), **change}.items() if tensor is not None}
    with pytest.raises(UnsupportedModelError, match=complaint):
        LeanModel(AutoConfig.from_pretrained(folder), weights)


def test_a_worker_on_the_lean_path_imports_no_modelling_code() -> None:
    """Start-up: `transformers` modelling code and torch's compiler take longer to import than the model to load."""
    code = (
        "import sys, services.decode.server, services.prefill.server\n"
        "from services.engine.weights import load_model\n"
        f"print(type(load_model({TINY!r}, 'float32')).__name__)\n"
        "print('torch._dynamo' in sys.modules, 'transformers.modeling_utils' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    expected = ["LeanModel", "False", "False"] if shutil.which("g++") else ["GeneralModel", "True", "True"]
    assert shown == expected


def test_a_family_that_is_unknown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ValueError, match="no_such_family"):
        load_model(tmp_path, "float32")
