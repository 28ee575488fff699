"""Which optimizers hold masters, from which line on, and what comes of them with the patch. For README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal["checkpoint", "upstream", "nothing to do"]
"""checkpoint: masters are the checkpoint's; upstream: they are left to megatron-core, for the reason that is noted."""


@dataclass(frozen=True)
class Held:
    """What comes of the masters of an optimizer, or of a kind of it, in the lines from `first` to `last`."""

    optimizer: str
    masters: str
    first: str
    last: str = "0.19"
    what: What = "checkpoint"
    note: str = ""


HELD = (
    Held("`DistributedOptimizer`", "fp32 shards", "0.6"),
    Held("`DistributedOptimizer`, precision-aware: fp32", "fp32 in Transformer Engine's `FusedAdam`", "0.13"),
    Held(
        "`DistributedOptimizer`, precision-aware: remainders",
        "bf16 parameter and 16 bits in `FusedAdam`",
        "0.11",
        note="The parameter is the upper half of the master, rounded half away from zero where a load rounds half to "
        "even: parameters exactly on a tie change by one unit in the last place, on all ranks alike.",
    ),
    Held(
        "`DistributedOptimizer`, precision-aware: fp16",
        "fp16 with a scale in `FusedAdam`",
        "0.11",
        note="The nearest that fp16 with one scale for the tensor holds: off by at most 2^-11 of the value, or by "
        "2^-40 of the largest in the shard.",
    ),
    Held("`Float16OptimizerWithFloat16Params`", "whole fp32 tensors", "0.6"),
    Held("`ChainedOptimizer` (experts, several chunks)", "its members", "0.6"),
    Held("`HybridDeviceOptimizer` (CPU offload)", "the copies that it steps", "0.12"),
    Held("`LayerWiseDistributedOptimizer`", "its members", "0.16"),
    Held(
        "Muon",
        "its members",
        "0.16",
        "0.16",
        note="Not run: 0.16 was written for an emerging-optimizers that is not on the package index.",
    ),
    Held("Muon", "its members", "0.17"),
    Held("`MimoOptimizer`", "its members", "0.17"),
    Held(
        "custom FSDP, Megatron-FSDP: optim, optim_grads",
        "its buffer",
        "0.12",
        note="16-bit parameters; fp8 ones were not tried.",
    ),
    Held(
        "custom FSDP, Megatron-FSDP: optim_grads_params",
        "its buffer",
        "0.12",
        what="upstream",
        note="Parameters are shared out as well, so that no rank can compare one with the checkpoint. The format "
        "fsdp_dtensor (0.14 and later) is loaded straight into the masters, and exact without the patch; weights that "
        "come before the model is wrapped are rounded.",
    ),
    Held("`FP32Optimizer`, fp32 parameters", "the parameters", "0.6", what="nothing to do"),
)
"""A user's subclass is what its base is. An optimizer that is of none of these is left alone, and in the report."""
