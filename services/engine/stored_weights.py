"""The weights of a model folder by name, memory-mapped: read only when asked for, shared by the workers of a host.

A folder holds `model.safetensors`, or shards that `model.safetensors.index.json` names. Nothing else is read: never a
pickle, whatever lies there.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class StoredWeights(Mapping[str, torch.Tensor]):
    """Tensor name to tensor on the CPU, as it is stored."""

    def __init__(self, folder: Path) -> None:
        """Opens the files. Raises FileNotFoundError where the folder has none, or lacks a shard its index names."""
        self._shards: list[Any] = []
        self._shard_of: dict[str, Any] = {}
        for file in _files(folder):
            if not file.is_file():
                raise FileNotFoundError(f"{folder} has no {file.name} (only safetensors are read)")
            shard: Any = safe_open(file, framework="pt")
            self._shards.append(shard)
            self._shard_of.update(dict.fromkeys(shard.keys(), shard))

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor; raises KeyError."""
        tensor: torch.Tensor = self._shard_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._shard_of)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._shard_of)

    def __contains__(self, name: object) -> bool:
        """Whether there is one of this name, without reading it."""
        return name in self._shard_of


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _SINGLE]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
