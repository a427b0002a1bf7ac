"""Weights: from a folder to a model that can be run, and the fingerprints by which workers recognise the same model."""

import logging
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

from services.engine.models.fused import FusedModel
from services.engine.models.interface import DecoderModel, UnsupportedModelError
from services.engine.models.lean import LeanModel
from services.engine.stored_weights import StoredWeights
from services.runtime.model_store import resolve, tokenizer_fingerprint, weights_fingerprint

__all__ = ["choose_dtype", "load_model", "tokenizer_fingerprint", "weights_fingerprint"]

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def choose_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """Return the type for a name of DTYPES or `auto`: bfloat16 where the device multiplies it natively, else float32.

    int8 is of the weights alone, and has to be asked for.

    Raises ValueError for other names.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}: not auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if _cpu_multiplies_bf16() else torch.float32


def load_model(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    path: Literal["auto", "lean", "fused", "general"] = "auto",
) -> DecoderModel:
    """Return the model of a folder, alias or Hugging Face id, ready to run on `device`.

    `auto` takes `lean` for float32 on the CPU and `fused` on CUDA devices, where the model is Llama-shaped, and the
    general path otherwise. Only safetensors are read. Raises ModelStoreError where there is no such model,
    UnsupportedModelError (naming it) where it cannot be served.
    """
    folder = resolve(str(name))
    wanted = choose_dtype(dtype, device) if isinstance(dtype, str) else dtype
    own = _own_path(wanted, torch.device(device)) if path == "auto" else path
    if wanted == torch.int8 and own != "lean":
        raise UnsupportedModelError(f"{name}: weights in int8 are for the lean path on the CPU")
    if own == "general":
        return _general(folder, wanted, device)
    try:
        config, weights = AutoConfig.from_pretrained(folder, local_files_only=True), StoredWeights(folder)
        if own == "fused":
            return FusedModel(config, weights, wanted, device)
        if wanted not in (torch.float32, torch.int8) or torch.device(device).type != "cpu":
            raise UnsupportedModelError(f"{name}: the lean path computes in float32 on the CPU")
        return LeanModel(config, weights, weights_in_int8=wanted == torch.int8)
    except UnsupportedModelError as error:
        if path != "auto" or wanted == torch.int8:
            raise
        log.info("general path: %s", error)
    return _general(folder, wanted, device)


def _own_path(dtype: torch.dtype, device: torch.device) -> Literal["lean", "fused", "general"]:
    """Which of our own decoders is the fastest there."""
    if device.type == "cuda":
        return "fused"
    return "lean" if device.type == "cpu" and dtype in (torch.float32, torch.int8) else "general"


def _general(folder: Path, dtype: torch.dtype, device: torch.device | str) -> DecoderModel:
    import transformers  # its modelling code takes seconds to import, and the lean path does without

    from services.engine.models.general import GeneralModel

    transformers.utils.logging.disable_progress_bar()
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, local_files_only=True, attn_implementation="eager"
    )
    return GeneralModel(model.to(device))


def _cpu_multiplies_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"}.intersection(flags))
