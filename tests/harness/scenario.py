"""What to run, and what came out: plain records that know neither torch nor megatron."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

Dtype = Literal["float32", "float16", "bfloat16"]
Optimizer = Literal[
    "distributed",
    "plain",
    "offload",
    "offload-precision-aware",
    "layer-wise",
    "muon",
    "muon-layer-wise",
    "muon-layout",
]
"""plain: no distributed optimizer; layer-wise: with Adam for all parameters; muon-layout: the layer-wise optimizer for
matrices beside a distributed one for the rest.
"""
Mode = Literal["stock", "native", "patched", "patched-native"]
"""stock: the release as it is; patched: with mcore_patch; native: ``reload_model_params`` gets ``state_dict=``."""


@dataclass(frozen=True)
class Scenario:
    """One pipeline, from a checkpoint to the masters before the first step.

    The checkpoint is written by a model of dtype *disk* and loaded by a model of dtype *params*. The world size is
    ``max(dp, ep) * tp * pp``: experts are spread over data-parallel ranks.
    """

    # The checkpoint
    fmt: Literal["torch", "torch_dist", "zarr"] = "torch_dist"
    disk: Dtype = "float32"
    save: Literal["plain", "parallel"] = "plain"
    load: Literal["plain", "parallel", "on-device", "two-stage"] = "plain"
    saved_as: tuple[int, int] | None = None
    """(tp, pp) of the writer, for formats that reshard; None: as here."""
    missing: int = 0
    """Keys taken out of the loaded state dict, which is then loaded with ``strict=False``."""

    # The model
    params: Dtype = "bfloat16"
    dp: int = 2
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    experts: int | None = None
    tied: bool = False
    mixed: bool = False
    """Norms stay fp32 in a 16-bit model."""

    # The pipeline
    optimizer: Optimizer = "distributed"
    instances: int = 1
    """Instances of the distributed optimizer: data-parallel ranks that share out masters are as many times fewer."""
    order: Literal["optimizer-first", "weights-first", "before-ddp"] = "optimizer-first"
    """When weights come: after the optimizer; between DDP and optimizer; before both, into a model with fp32 norms."""
    write: Literal["unwrapped", "ddp", "in-place"] = "unwrapped"
    """Who gets ``load_state_dict``; in-place: nobody, what ``dist_checkpointing.load`` returns is dropped."""
    change: bool = False
    """Changes every second parameter in place after the load; the masters of these shall be the model's."""
    then: Literal["reload", "nothing", "optimizer-state-without-masters", "resume"] = "reload"
    """resume: the checkpoint has optimizer state, with masters unlike its weights; these masters are the truth."""
    sharding: str | None = None
    """The distributed optimizer's sharding type for resume; None: the release's default. Not for fmt="torch"."""

    @property
    def world_size(self) -> int:
        return max(self.dp, self.ep) * self.tp * self.pp

    @property
    def distributed(self) -> bool:
        """Whether gradients go to buffers that a distributed optimizer shares out."""
        return self.optimizer in ("distributed", "offload", "offload-precision-aware", "muon-layout")

    @property
    def layers(self) -> int:
        return max(2, self.pp) * self.vpp

    def but(self, **changes: Any) -> Scenario:
        return replace(self, **changes)

    def __str__(self) -> str:
        """The fields that differ from the defaults."""
        default = Scenario()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return " ".join(f"{name}={value}" for name, value in given.items()) or "default"


def unavailable(scenario: Scenario, release: tuple[int, ...], mode: Mode = "stock") -> str | None:
    """Why the megatron-core of *release* cannot run *scenario* at all, for ``pytest.skip``; None if it can."""
    if mode == "native" and release < (0, 14):
        return "reload_model_params takes no state dict before 0.14"
    if "native" in mode and scenario.then != "reload":
        return "this pipeline does not call reload_model_params"
    if scenario.fmt == "zarr" and release >= (0, 16):
        return "zarr has gone in 0.16; what would be written is torch_dist"
    if scenario.fmt == "zarr" and not all(find_spec(name) for name in ("zarr", "tensorstore")):
        return "zarr or tensorstore is not installed"
    broadcasts = scenario.load == "parallel" or (scenario.load == "two-stage" and scenario.dp > 1)
    if scenario.fmt == "zarr" and broadcasts and scenario.disk != scenario.params:
        return "upstream broadcasts the disk's dtype into the parameters': gloo ends the process"
    if "parallel" in (scenario.save, scenario.load) and release < (0, 7):
        return "fully parallel saving and loading have come in 0.7"
    if scenario.vpp > 1 and scenario.pp == 2 and release < (0, 8):
        return "interleaving needs more than two stages before 0.8"
    if scenario.optimizer.startswith("offload") and release < (0, 12):
        return "CPU offloading has come in 0.12"
    if scenario.optimizer == "offload" and scenario.then == "resume":
        return "upstream fails with a KeyError where HybridDeviceOptimizer steps fp32 masters (0.12 to 0.19)"
    if scenario.optimizer in ("layer-wise", "muon", "muon-layer-wise") and release < (0, 16):
        return "the layer-wise distributed optimizer and Muon have come in 0.16"
    if scenario.optimizer == "muon-layout" and release < (0, 18):
        return "a distributed optimizer beside the layer-wise one has come in 0.18"
    if scenario.optimizer.startswith("muon") and find_spec("emerging_optimizers") is None:
        return "emerging-optimizers is not installed"
    if scenario.optimizer.startswith("muon") and release < (0, 17):
        return "0.16 was written for an emerging-optimizers that is no longer on the package index"
    if scenario.optimizer == "plain" and scenario.params == "float32" and release < (0, 7):
        return "FP32Optimizer is abstract in 0.6"
    if scenario.instances > 1 and release < (0, 10):
        return "several instances of the distributed optimizer have come in 0.10"
    if scenario.instances > 1 and not scenario.distributed:
        return "there are several instances of the distributed optimizer only"
    if scenario.instances > 1 and scenario.ep > 1 and release < (0, 13):
        return "several instances and expert parallelism go together from 0.13 on"
    if scenario.sharding is not None:
        first, last = _SHARDINGS[scenario.sharding]
        if not first <= release[:2] <= last:
            return f"{scenario.sharding} works from {first} to {last}"
    return None


# First and last release line whose distributed optimizer saves and loads the type. Upstream has the bucket space up
# to 0.14, but from 0.11 on an assertion of its own fails as soon as a rank's share of a bucket has two parameters.
_SHARDINGS = {
    "fully_sharded_bucket_space": ((0, 6), (0, 10)),
    "fully_sharded_model_space": ((0, 8), (0, 15)),
    "dp_zero_gather_scatter": ((0, 6), (0, 19)),
    "fully_reshardable": ((0, 15), (0, 19)),
    "dp_reshardable": ((0, 15), (0, 19)),
}


@dataclass(frozen=True)
class Master:
    """One rank's master of one parameter, or of the shard of it that this rank owns."""

    rank: int
    chunk: int
    name: str
    numel: int
    differing: int
    """Elements whose fp32 bits are not those of the checkpoint (or of what else the scenario expects)."""


@dataclass(frozen=True)
class Result:
    scenario: Scenario
    mode: Mode
    masters: list[Master]
    snapshots: list[dict[str, str]]
    """By rank: a digest of every parameter and buffer of the model, by ``chunk:name``."""
    seconds: float
    probes: list[Any] = field(default_factory=list)
    """By rank: what the probe that was given to ``run`` returned."""

    @property
    def numel(self) -> int:
        return sum(master.numel for master in self.masters)

    @property
    def differing(self) -> int:
        return sum(master.differing for master in self.masters)
