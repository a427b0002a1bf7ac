"""Faults that a test asks for by the environment variable PDSERVE_FAULT. The only place that reads it.

`corrupt_block:N` flips a byte of the N-th pulled block (from 1, per process) before it is verified; `slow_transfer_s:X`
delays each fetch by X seconds before it is posted. Several are separated by commas.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

VARIABLE = "PDSERVE_FAULT"


@dataclass(slots=True)
class Faults:
    """The faults of this process; the default has none."""

    corrupt_block: int = 0
    slow_transfer_s: float = 0.0
    _num_pulled: int = field(default=0)

    def corrupted(self, num_blocks: int) -> int | None:
        """Which of the next `num_blocks` pulled blocks is to be corrupted, from 0; None for none of them."""
        first, self._num_pulled = self._num_pulled, self._num_pulled + num_blocks
        position = self.corrupt_block - 1 - first
        return position if 0 <= position < num_blocks else None


def from_environment() -> Faults:
    """What PDSERVE_FAULT asks for. Raises ValueError where it cannot be read."""
    faults = Faults()
    for item in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, value = item.strip().partition(":")
        if name == "corrupt_block":
            faults.corrupt_block = int(value)
        elif name == "slow_transfer_s":
            faults.slow_transfer_s = float(value)
        else:
            raise ValueError(f"{VARIABLE}: no such fault: {name}")
    return faults
