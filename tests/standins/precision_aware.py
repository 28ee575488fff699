"""Pipelines whose masters Transformer Engine's FusedAdam holds: what a test compares, as plain data.

The model is bf16, all modules are Transformer Engine's. Every case answers with an :class:`Outcome`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_patch.testing.era import _stand_in_for_write_item

from . import fp8_model as f

State = dict[str, torch.Tensor]

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "remainders": {"store_param_remainders": True},
    "fp16": {"main_params_dtype": torch.float16},
}


@dataclass(frozen=True)
class Outcome:
    """One rank's answer; counts are of elements over all ranks."""

    differing: int
    """Masters that are not what the mode makes of the checkpoint."""
    total: int
    model: str
    """A digest of all parameters."""
    masters: str
    """A digest of this rank's masters."""
    losses: tuple[float, ...] = ()
    held_by: tuple[str, ...] = ()
    extra: Any = None


def run(case: str, patched: bool, folder: Path, mode: str, disk: str, steps: int, sharding: str | None) -> Outcome:
    """One case on this rank."""
    warnings.simplefilter("ignore")
    os.environ["MCORE_PATCH_VERIFY"] = "1"
    options = replace(f.Options(recipe=None, precision_aware=True), **MODES[mode])
    if case == "experts":
        options = replace(options, experts=4, expert_parallel=torch.distributed.get_world_size())
    f.initialize(options)
    if patched:
        import mcore_patch

        mcore_patch.apply(strict=True)
    arguments = {"disk": getattr(torch, disk), "mode": mode, "folder": folder, "sharding": sharding}
    pipeline, state, extra = CASES[case](options, **f.accepted(CASES[case], **arguments))
    count = f.differing(pipeline, lambda name, _: state[name]) if mode != "fp16" else differing_fp16(pipeline, state)
    model = digest(parameter for parameter in pipeline.model.parameters())
    losses = tuple(f.train_step(pipeline) for _ in range(steps))
    masters = digest(master.values for master in f.masters(pipeline))
    return Outcome(count.differing, count.total, model, masters, losses, _held_by(patched), extra)


def _held_by(patched: bool) -> tuple[str, ...]:
    if not patched:
        return ()
    import mcore_patch

    return tuple(sorted({record.held_by for record in mcore_patch.report()}))


def digest(tensors: Any) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def reference(model: Any, disk: torch.dtype) -> State:
    """A checkpoint; in fp32, with exact ties between bf16 values in every parameter."""
    state = f.reference(model, disk)
    if disk is torch.float32:
        for tensor in state.values():
            bits = tensor.view(-1)[::7].view(torch.int32)
            tensor.view(-1)[::7] = ((bits & -0x10000) | 0x8000).view(torch.float32)
    return state


def scaled(values: torch.Tensor) -> torch.Tensor:
    """What fp16 with one scale for the tensor holds of fp32 *values*: the scale takes the largest to half of fp16's."""
    scale = values.abs().max() / (65504.0 / 2)
    return (values * scale.reciprocal()).half().float() * scale


def differing_fp16(pipeline: f.Pipeline, state: State) -> f.Count:
    """As ``fp8_model.differing``, for masters that FusedAdam holds in fp16; checks the documented bound, too."""
    counts = torch.zeros(2, dtype=torch.int64)
    for master in f.masters(pipeline):
        exact = master.part_of(state[master.name])
        wanted = exact if master.parameter.dtype is torch.float32 else scaled(exact)
        unequal = master.values.view(torch.int32) != wanted.contiguous().view(torch.int32)
        counts += torch.tensor([int(unequal.sum()), wanted.numel()])
        bound = torch.maximum(exact.abs() * 2.0**-11 * 1.01, exact.abs().max() * 2.0**-40 * 1.01)
        assert bool(((wanted - exact).abs() <= bound).all())
    torch.distributed.all_reduce(counts)
    return f.Count(int(counts[0]), int(counts[1]))


# ------------------------------------------------------------------------------------------------------------ the cases


def reload(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """The optimizer, ``load_state_dict``, ``reload_model_params()``."""
    pipeline = f.build(options)
    state = reference(pipeline.model, disk)
    f.load(pipeline.model, state)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def experts(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """As ``reload``, with one optimizer for the experts and one for the rest."""
    pipeline, state, _ = reload(options, disk)
    return pipeline, state, len(pipeline.optimizer.chained_optimizers)


def weights_first(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """Weights before the optimizer is built, and no reload."""
    model = f.build_model(options)
    state = reference(model, disk)
    f.load(model, state)
    chunk = f.wrap(options, model)
    return f.Pipeline(options, chunk, f.build_optimizer(options, chunk)), state, None


def reload_again(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """Two more reloads without a load in between, the last with the state dict."""
    pipeline, state, _ = reload(options, disk)
    pipeline.optimizer.reload_model_params()
    pipeline.optimizer.reload_model_params(state_dict={"model": dict(state)})
    return pipeline, state, None


def by_hand(options: f.Options, disk: torch.dtype, mode: str) -> tuple[f.Pipeline, State, Any]:
    """What a run without the defect starts from."""
    pipeline, state, _ = reload(options, disk)
    for parameter, shard, adam, start in shards(pipeline):
        name = next(name for name, each in pipeline.model.named_parameters() if each is parameter)
        values = state[name].float().reshape(-1)[start : start + shard.numel()].clone()
        initialize = adam.initialize_state
        initialize(shard, **f.accepted(initialize, store_param_remainders=mode == "remainders"))
        if mode == "remainders":
            bits = values.view(torch.int32)
            low = bits.to(torch.int16)
            high = ((bits >> 16) + (low < 0)).to(torch.int16)
            adam.state[shard]["master_param"].copy_(low)
            shard.copy_(high.view(torch.bfloat16))
        else:
            adam.set_scaled_state(shard, "master_param", values)
    if mode == "remainders":  # every rank has all halves
        for name, parameter in pipeline.model.named_parameters():
            bits = state[name].float().view(torch.int32)
            high = ((bits >> 16) + (bits.to(torch.int16) < 0)).to(torch.int16)
            parameter.data.copy_(high.view(torch.bfloat16))
    return pipeline, state, None


def shards(pipeline: f.Pipeline) -> Any:
    """(parameter, this rank's shard of it, FusedAdam, its first element) of all 16-bit parameters."""
    for part in getattr(pipeline.optimizer, "chained_optimizers", [pipeline.optimizer]):
        for parameters, pieces in zip(part.model_float16_groups, part.shard_float16_groups, strict=True):
            for parameter, shard in zip(parameters, pieces, strict=True):
                yield parameter, shard, part.optimizer, part._get_model_param_range_map(parameter)["param"].start


def after_training(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """Two steps, then a weights-only load."""
    pipeline = f.build(options)
    for _ in range(2):
        f.train_step(pipeline)
    state = reference(pipeline.model, disk)
    f.load(pipeline.model, state)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def unseen_after_training(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """Two steps, then a load that nobody can see: masters shall be the parameters."""
    pipeline = f.build(options)
    for _ in range(2):
        f.train_step(pipeline)
    state = reference(pipeline.model, disk)
    for name, parameter in pipeline.model.named_parameters():
        parameter.data.copy_(state[name])
    pipeline.optimizer.reload_model_params()
    return pipeline, {name: q.detach().float().clone() for name, q in pipeline.model.named_parameters()}, None


def edited(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """Every second parameter is changed when the masters have been written: a second reload takes the model's value."""
    pipeline, state, _ = reload(options, disk)
    for index, (name, parameter) in enumerate(pipeline.model.named_parameters()):
        if index % 2:
            parameter.data.mul_(1.5)
            state[name] = parameter.detach().float().clone()
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def state_without_masters(options: f.Options, disk: torch.dtype) -> tuple[f.Pipeline, State, Any]:
    """Optimizer state without masters is loaded after the weights."""
    pipeline = f.build(options)
    state = reference(pipeline.model, disk)
    f.train_step(pipeline)
    saved = pipeline.optimizer.state_dict()
    pipeline = f.build(options)
    f.load(pipeline.model, state)
    pipeline.optimizer.load_state_dict(saved)
    return pipeline, state, None


def resume(
    options: f.Options, disk: torch.dtype, folder: Path, mode: str, sharding: str | None
) -> tuple[f.Pipeline, State, Any]:
    """Weights and optimizer state of a run; *sharding* None: the torch format. ``extra``: masters that are not its own.

    A master has moved away from its parameter in that run.
    """
    place = folder / f"{mode}-{sharding}-{torch.distributed.get_world_size()}"
    place.mkdir(exist_ok=True)
    trained = f.build(options)
    state = reference(trained.model, disk)
    f.load(trained.model, state)
    trained.optimizer.reload_model_params()
    for _ in range(2):
        f.train_step(trained)
    wanted = [master.values.clone() for master in f.masters(trained)]
    saved: Any = {"model": trained.model.sharded_state_dict()}
    if sharding is None:
        file = place / f"rank{torch.distributed.get_rank()}.pt"
        torch.save({"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}, file)
        trained.optimizer.save_parameter_state(str(place / "optimizer.pt"))
    else:
        _stand_in_for_write_item()
        saved["optimizer"] = _sharded(trained, sharding, is_loading=False)
        dist_checkpointing.save(saved, str(place))
    torch.distributed.barrier()
    resumed = f.build(options)
    if sharding is None:
        loaded = torch.load(file, weights_only=False)
    else:
        template = {"model": resumed.model.sharded_state_dict()}
        template["optimizer"] = _sharded(resumed, sharding, is_loading=True)
        loaded = dist_checkpointing.load(template, str(place))
    resumed.model.load_state_dict(loaded["model"], strict=False)
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    if sharding is None:
        resumed.optimizer.load_parameter_state(str(place / "optimizer.pt"))
    pairs = zip(wanted, (master.values for master in f.masters(resumed)), strict=True)
    wrong = sum(int((a.view(torch.int32) != b.contiguous().view(torch.int32)).sum()) for a, b in pairs)
    moved = sum(
        int((values != master.part_of(master.parameter)).sum())
        for values, master in zip(wanted, f.masters(resumed), strict=True)
    )
    return resumed, state, (wrong, moved)


def _sharded(pipeline: f.Pipeline, sharding: str, is_loading: bool) -> Any:
    if "metadata" in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters:
        chosen: dict[str, Any] = {"metadata": {"distrib_optim_sharding_type": sharding}}
    else:
        chosen = {"sharding_type": sharding}
    model = {"model": pipeline.model.sharded_state_dict()}
    return pipeline.optimizer.sharded_state_dict(model, is_loading=is_loading, **chosen)


def fp32_parameters(options: f.Options, disk: torch.dtype, mode: str) -> tuple[f.Pipeline, State, Any]:
    """Norms stay fp32. ``extra``: elements of FusedAdam's copies of them that are not the loaded ones; how many."""
    model = f.build_model(options)
    # Float16Module casts them where it wraps the model.
    norms = [parameter for name, parameter in model.named_parameters() if name.startswith("decoder.final_layernorm")]
    cast = f.Float16Module.__init__

    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        cast(self, *args, **kwargs)
        for norm in norms:
            norm.data = norm.data.float()

    f.Float16Module.__init__ = keeping
    chunk = f.wrap(options, model)
    f.Float16Module.__init__ = cast
    pipeline = f.Pipeline(options, chunk, f.build_optimizer(options, chunk))
    for _ in range(2):
        _step_on_seeded_gradients(pipeline)
    state = reference(pipeline.model, disk)
    f.load(pipeline.model, state)
    pipeline.optimizer.reload_model_params()
    wrong, total = 0, 0
    for part in getattr(pipeline.optimizer, "chained_optimizers", [pipeline.optimizer]):
        for shard in (shard for group in part.shard_fp32_groups for shard in group):
            copy = part.optimizer.get_unscaled_state(shard, "master_param")
            wanted = scaled(shard) if mode == "fp16" else shard
            wrong, total = wrong + int((copy != wanted).sum()), total + copy.numel()
    return pipeline, state, (wrong, total)


def _step_on_seeded_gradients(pipeline: f.Pipeline) -> None:
    for index, parameter in enumerate(pipeline.model.parameters()):
        generator = torch.Generator().manual_seed(index)
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    pipeline.optimizer.step()


Case = Callable[..., tuple[f.Pipeline, State, Any]]
CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        reload,
        experts,
        weights_first,
        reload_again,
        by_hand,
        after_training,
        unseen_after_training,
        edited,
        state_without_masters,
        resume,
        fp32_parameters,
    )
}
