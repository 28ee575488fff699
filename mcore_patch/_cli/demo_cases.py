"""What the demo shows, as plain records: what is lost on the way, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Run = Literal["stock", "patched", "never rounded"]
"""stock: megatron-core as it is; patched: after ``mcore_patch.apply()``; never rounded: stock, with the masters set by
hand to the values on disk before the first step."""


@dataclass(frozen=True)
class Case:
    """One way to lose precision between a checkpoint and the masters.

    *name* names the picture. *disk* and *parameters* are the dtypes of the checkpoint and of the model, as attributes
    of ``torch``.
    """

    name: str
    title: str
    disk: str
    parameters: str


CASES = (Case("fp32-to-bf16", "fp32 checkpoint, bf16 parameters", disk="float32", parameters="bfloat16"),)


@dataclass(frozen=True)
class Trained:
    """What a run came to, over all ranks: its masters before the first step, and the loss before each step."""

    masters: int
    differing: int
    losses: tuple[float, ...]
