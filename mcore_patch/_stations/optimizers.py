"""Which optimizers exist, which masters each holds, and how one is read and written. Nothing else is per optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_patch._stations.remainders import join, split


@dataclass(frozen=True)
class Master:
    """The master of one parameter on this rank: elements ``start`` to ``stop`` of the flattened ``parameter``.

    ``read()`` gives it as a one-dimensional fp32 tensor of ``stop - start`` elements: the master itself where that is
    what it is, a new tensor where it is held in another form, the parameter's value where it has not been made yet.
    ``write(begin, values)`` stores fp32 ``values`` (on the master's device) from element ``begin`` of the shard on;
    with ``in_one_piece`` only the whole shard can be written. ``refreshed`` says whether megatron-core itself gives
    the master the parameter's value in ``reload_model_params``; if not, it may predate the load. ``split`` says that
    the parameter is a part of the master, so that neither can be told from the other by rounding.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    held_by: str
    read: Callable[[], torch.Tensor]
    write: Callable[[int, torch.Tensor], None]
    refreshed: bool = True
    in_one_piece: bool = False
    split: bool = False


@dataclass(frozen=True)
class Unreachable:
    """A parameter whose master we can neither read nor write here, and why."""

    parameter: torch.nn.Parameter
    held_by: str
    reason: str


@dataclass(frozen=True)
class Holder:
    """What a kind of optimizer is: ``masters`` lists those on this rank, ``owned`` all parameters it steps."""

    module: str
    cls: str
    masters: Callable[[Any], Iterator[Master | Unreachable]]
    owned: Callable[[Any], Iterator[torch.nn.Parameter]]

    def handles(self, optimizer: object) -> bool:
        """Whether ``optimizer`` is of this class or of a subclass (a user's subclass works like its base)."""
        module = sys.modules.get(self.module)
        return module is not None and isinstance(optimizer, getattr(module, self.cls, ()))


def _in_tensors(
    parameter: torch.nn.Parameter, start: int, stop: int, held_by: str, *tensors: torch.Tensor, refreshed: bool = True
) -> Master:
    """A master that is an fp32 tensor of ``stop - start`` elements, or several that are copies of each other."""
    flat = [tensor.detach().view(-1) for tensor in tensors]

    def write(begin: int, values: torch.Tensor) -> None:
        for copy in flat:
            copy[begin : begin + values.numel()].copy_(values)

    return Master(parameter, start, stop, held_by, lambda: flat[0], write, refreshed)


def _distributed_masters(optimizer: Any) -> Iterator[Master | Unreachable]:
    inner = optimizer.optimizer
    # The groups are absent on a stub optimizer (all parameters frozen) and under Megatron-FSDP.
    model_groups = getattr(optimizer, "model_float16_groups", ())
    shard_groups = getattr(optimizer, "shard_float16_groups", ())
    main_groups = getattr(optimizer, "shard_fp32_from_float16_groups", ())
    for group in zip(model_groups, shard_groups, main_groups, strict=True):
        for parameter, shard, main in zip(*group, strict=True):
            range_ = optimizer._get_model_param_range_map(parameter)["param"]
            place = (parameter, range_.start, range_.end)
            stepped = shard if main is None else main
            if hasattr(inner, "param_to_inner_param"):
                yield _hybrid_master(inner, *place, stepped, main)
            elif main is not None:
                yield _in_tensors(*place, type(optimizer).__name__, main)
            elif hasattr(inner, "set_scaled_state"):
                yield _fused_adam_master(inner, *place, stepped)
            else:
                yield Unreachable(parameter, type(inner).__name__, "an inner optimizer that we do not know holds it")


def _distributed_owned(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for buffer in getattr(optimizer, "buffers", ()):
        yield from buffer.param_to_bucket  # `params` has come in 0.9


def _hybrid_master(
    hybrid: Any,
    parameter: torch.nn.Parameter,
    start: int,
    stop: int,
    stepped: torch.Tensor,
    main: torch.Tensor | None,
) -> Master | Unreachable:
    """HybridDeviceOptimizer steps copies (on the CPU, and fp32 ones) of the shards that it was given.

    megatron-core refreshes them from the parameter never (0.12) or only where the shard is not fp32 (0.13+).
    """
    inner = hybrid.param_to_inner_param[stepped]
    if inner.dtype is not torch.float32:
        return Unreachable(parameter, type(hybrid).__name__, "it steps a 16-bit copy: there is no fp32 master")
    copies = [inner] if main is None or main is inner else [inner, main]
    return _in_tensors(parameter, start, stop, type(hybrid).__name__, *copies, refreshed=False)


def _fused_adam_master(adam: Any, parameter: torch.nn.Parameter, start: int, stop: int, shard: torch.Tensor) -> Master:
    """Transformer Engine's FusedAdam keeps the master in its own state, which it makes at the first step.

    The forms: fp32; fp16 with a scale per tensor; with ``store_param_remainders`` a bf16 parameter plus 16 bits.
    """
    remainders = getattr(adam, "store_param_remainders", False) and shard.dtype is torch.bfloat16
    flat = shard.detach().view(-1)

    def read() -> torch.Tensor:
        state = adam.state.get(shard, {})
        if "master_param" not in state:
            return flat.float()
        if remainders:
            return join(flat, state["master_param"].view(-1))
        value: torch.Tensor = adam.get_unscaled_state(shard, "master_param")
        return value.detach().view(-1)

    def write(begin: int, values: torch.Tensor) -> None:
        if not adam.state[shard]:
            # All entries at once: FusedAdam.step takes a state that is not empty to be complete.
            takes_remainders = len(inspect.signature(adam.initialize_state).parameters) > 1  # TE 2.1+
            adam.initialize_state(shard, remainders) if takes_remainders else adam.initialize_state(shard)
        if remainders:
            high, low = split(values)
            flat[begin : begin + values.numel()].copy_(high)
            adam.state[shard]["master_param"].view(-1)[begin : begin + values.numel()].copy_(low)
        else:
            # FusedAdam scales the tensor that it is given in place.
            adam.set_scaled_state(shard, "master_param", values.clone().view(shard.shape))

    return Master(
        parameter,
        start,
        stop,
        type(adam).__name__,
        read,
        write,
        refreshed=False,
        in_one_piece=not remainders,
        split=remainders,
    )


def _float16_masters(optimizer: Any) -> Iterator[Master | Unreachable]:
    model_groups = getattr(optimizer, "float16_groups", ())
    main_groups = getattr(optimizer, "fp32_from_float16_groups", ())
    for model_group, main_group in zip(model_groups, main_groups, strict=True):
        for parameter, main in zip(model_group, main_group, strict=True):
            yield _in_tensors(parameter, 0, parameter.numel(), type(optimizer).__name__, main)


def _float16_owned(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for group in getattr(optimizer, "float16_groups", ()):
        yield from group


HOLDERS = (
    Holder(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer",
        _distributed_masters,
        _distributed_owned,
    ),
    Holder(
        "megatron.core.optimizer.optimizer",
        "Float16OptimizerWithFloat16Params",
        _float16_masters,
        _float16_owned,
    ),
)


def holder_of(optimizer: object) -> Holder | None:
    """The entry of :data:`HOLDERS` that handles ``optimizer``; None for one that we do not know."""
    return next((holder for holder in HOLDERS if holder.handles(optimizer)), None)


def members(optimizer: Any) -> list[Any]:
    """The optimizers inside ``optimizer``: those of a ChainedOptimizer (nested ones too), else itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [leaf for child in chained for leaf in members(child)]


def model_chunks(optimizer: Any) -> list[torch.nn.Module]:
    """The model chunks that the members of ``optimizer`` own parameters of, each once, in order."""
    chunks = (chunk for member in members(optimizer) for chunk in getattr(member, "model_chunks", ()))
    return list({id(chunk): chunk for chunk in chunks}.values())


def parameter_names(optimizer: Any) -> dict[int, str]:
    """``id(parameter) -> name`` over the optimizer's chunks, wrapper prefixes stripped."""
    found = model_chunks(optimizer)
    return {
        id(parameter): (f"model{index}." if len(found) > 1 else "") + strip_module(name)
        for index, chunk in enumerate(found)
        for name, parameter in chunk.named_parameters()
    }


def strip_module(name: str) -> str:
    """``module.module.decoder.x`` -> ``decoder.x`` (DDP and Float16Module each add one)."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
