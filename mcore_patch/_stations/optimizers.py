"""Which optimizers exist, which masters each holds, and how one is read and written. Nothing else is per optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_patch._stations.parameters import can_be_compared, explains
from mcore_patch._stations.remainders import join, split


@dataclass(frozen=True)
class Master:
    """The master of one parameter on this rank: elements ``start`` to ``stop`` of the flattened ``parameter``.

    ``read()`` gives it as a one-dimensional fp32 tensor of ``stop - start`` elements: the master itself where that is
    what it is, a new tensor where it is held in another form, the parameter's value where it has not been made yet.
    ``write(begin, values)`` stores fp32 ``values`` (on the master's device) from element ``begin`` of the shard on;
    with ``in_one_piece`` only the whole shard can be written. ``refreshed`` says whether megatron-core itself gives
    the master the parameter's value in ``reload_model_params``; if not, it may predate the load. ``split`` says that
    the parameter is a part of the master, so that neither can be told from the other by rounding. ``slack()``, where
    the master is held in a form that cannot hold every fp32 value, bounds how far each element of what is read is from
    what was written. ``adopt()``, where the release restores optimizer state into something else than what is stepped,
    takes it from there.
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
    slack: Callable[[], torch.Tensor] | None = None
    adopt: Callable[[], None] | None = None


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
    if _is_under_fsdp(optimizer):
        yield from _fsdp_masters(optimizer)
        return
    # The groups are absent on a stub optimizer (all parameters frozen).
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
    fp32_groups = getattr(optimizer, "model_fp32_groups", ()), getattr(optimizer, "shard_fp32_groups", ())
    for parameters, shards in zip(*fp32_groups, strict=True):
        for parameter, shard in zip(parameters, shards, strict=True):
            yield from _copy_of_fp32(optimizer, parameter, shard)


def _copy_of_fp32(optimizer: Any, parameter: torch.nn.Parameter, shard: torch.Tensor) -> Iterator[Master]:
    """An fp32 parameter is its own master, and FusedAdam steps it; but what is saved is a copy in FusedAdam's state.

    (HybridDeviceOptimizer would step copies, too, but refuses fp32 parameters: 0.12 to 0.19.)
    """
    inner = optimizer.optimizer
    if hasattr(inner, "set_scaled_state") and "master_param" in inner.state.get(shard, {}):
        range_ = optimizer._get_model_param_range_map(parameter)["param"]
        yield _fused_adam_master(inner, parameter, range_.start, range_.end, shard)


def _is_under_fsdp(optimizer: Any) -> bool:
    """Whether Megatron-FSDP (custom FSDP up to 0.13) manages the weights of this distributed optimizer."""
    config = getattr(optimizer, "ddp_config", None)
    return bool(getattr(config, "use_megatron_fsdp", False) or getattr(config, "use_custom_fsdp", False))


def _fsdp_groups(optimizer: Any) -> Iterator[Any]:
    for chunk in optimizer.model_chunks:
        yield from chunk.param_and_grad_buffer.parameter_groups


def _fsdp_masters(optimizer: Any) -> Iterator[Master | Unreachable]:
    """FSDP copies its masters from the parameters that it wraps, and up to 0.13 also whenever weights are reloaded.

    From 0.14 on a load goes straight into them, unseen: one that is no longer what the parameter was made of is left.
    """
    for group in _fsdp_groups(optimizer):
        buffer = group.main_weight_buffer
        if buffer is None:  # fp32 or frozen
            continue
        for index, parameter in enumerate(group.params):
            start, stop = buffer.locate_item_in_global_item(index)
            if start == stop:
                continue
            main = buffer.get_item(index, only_shard=buffer.is_data_distributed)
            if group.model_weight_buffer.is_data_distributed:
                yield Unreachable(parameter, "Megatron-FSDP", "Megatron-FSDP has shared out the parameter, too")
            elif can_be_compared(parameter) and not explains(parameter, main, start, stop):
                yield Unreachable(parameter, "Megatron-FSDP", "Megatron-FSDP has loaded it by itself")
            else:
                yield _in_tensors(parameter, start, stop, "Megatron-FSDP", main)


def _distributed_owned(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    if _is_under_fsdp(optimizer):
        for group in _fsdp_groups(optimizer):
            yield from group.params
        return
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
    # What is saved; after a load it is another tensor than the one that is stepped, and until the next step.
    saved = hybrid.state.get(stepped, {}).get("master_param")
    copies = [inner, *(tensor for tensor in (main, saved) if tensor is not None and tensor is not inner)]
    master = _in_tensors(parameter, start, stop, type(hybrid).__name__, *copies, refreshed=False)
    return master if saved is None else replace(master, adopt=lambda: inner.detach().copy_(saved))


def _fused_adam_master(adam: Any, parameter: torch.nn.Parameter, start: int, stop: int, shard: torch.Tensor) -> Master:
    """Transformer Engine's FusedAdam keeps the master in its own state, which it makes at the first step.

    The forms: fp32; fp16 with a scale per tensor; with ``store_param_remainders`` a bf16 parameter plus 16 bits.
    With a scale that takes the largest magnitude A of the shard to 32752, fp16 holds x with an error of at most
    2**-11 abs(x), or, below A 2**-29, of 2**-40 A.
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

    def slack() -> torch.Tensor:
        held = read().abs()
        if "master_param" not in adam.state.get(shard, {}):
            return torch.zeros_like(held)
        # Half the distance of neighbours in fp16, and what scaling in fp32 adds.
        return torch.maximum(held * (2.0**-11 * (1 + 2.0**-9)), adam._scales[shard]["master_param"] * 2.0**-25)

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
        slack=slack if adam.name_to_dtype_map["master_param"] is torch.float16 else None,
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


def _none(_optimizer: Any) -> Iterator[Any]:
    """FP32Optimizer: the parameters are the masters."""
    return iter(())


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
    Holder("megatron.core.optimizer.optimizer", "FP32Optimizer", _none, _none),
)


def holder_of(optimizer: object) -> Holder | None:
    """The entry of :data:`HOLDERS` that handles ``optimizer``; None for one that we do not know."""
    return next((holder for holder in HOLDERS if holder.handles(optimizer)), None)


def members(optimizer: Any) -> list[Any]:
    """The optimizers inside ``optimizer``: those of a ChainedOptimizer (nested ones too), else itself."""
    return [node for node in _nodes(optimizer) if not hasattr(node, "chained_optimizers")]


def strangers(optimizer: Any) -> list[Any]:
    """The :func:`members` of ``optimizer`` that we do not know."""
    return [member for member in members(optimizer) if holder_of(member) is None]


def model_chunks(optimizer: Any) -> list[torch.nn.Module]:
    """The model chunks that ``optimizer`` and what is chained in it know of, each once, in order.

    A Float16OptimizerWithFloat16Params knows of none.
    """
    chunks = (chunk for node in _nodes(optimizer) for chunk in getattr(node, "model_chunks", ()))
    return list({id(chunk): chunk for chunk in chunks}.values())


def elsewhere(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """What a LayerWiseDistributedOptimizer (0.16+) in ``optimizer`` has shared out between ranks, this one's too."""
    for node in _nodes(optimizer):
        for lists in (getattr(node, name, None) for name in ("dp_cp_params_list", "expt_dp_params_list")):
            for parameters in lists or ():
                yield from parameters


def _nodes(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for child in getattr(optimizer, "chained_optimizers", ()):
        yield from _nodes(child)


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
