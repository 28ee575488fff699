"""Station 1: load at the precision on disk.

megatron-core's ``torch_dist`` strategy hands torch's reader the model's own 16-bit parameters as targets, and the
reader casts into them (measured on 0.10 to 0.19: an fp32 checkpoint is gone before ``dist_checkpointing.load``
returns). Here the targets of such tensors get the dtype on disk for the time of the load; what was read is then also
written into the original target, as the unpatched load would have done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from mcore_patch._stations import disk, quantized
from mcore_patch._stations.guard import standing_aside
from mcore_patch._stations.parameters import CHECKPOINT_DTYPES, is_plain, loses
from mcore_patch._stations.remember import memory

ORIGIN = "dist_checkpointing.load"

logger = logging.getLogger("mcore_patch")


class _Load(threading.local):
    """What the load under way in this thread has widened, by ``id`` of the ShardedTensor; whether the last one did."""

    widened: dict[int, _Widened] | None = None
    has_widened: bool = False


_load = _Load()


class _Widened:
    """A ShardedTensor whose target has the dtype on disk until :meth:`restore`."""

    def __init__(self, sharded: Any, disk: torch.dtype, *, in_place: bool) -> None:
        self.sharded, self.template, self.dtype = sharded, sharded.data, sharded.dtype
        sharded.dtype = disk
        # A strategy that makes its own target is left to; one that copies into ours needs it to be there. On the CPU
        # either way: a second set of weights on the accelerator might not fit.
        sharded.data = torch.empty(sharded.local_shape, dtype=disk) if in_place else None

    def write_back(self) -> None:
        """What the unpatched load would have done to the target: the value, cast by ``copy_``."""
        if self.template is not None and self.sharded.data is not None:
            with torch.no_grad():
                # The strategy puts the axes of a stacked layer in front of the shape of its target.
                self.template.detach().copy_(self.sharded.data.view(self.template.shape))

    def restore(self) -> None:
        """Give the ShardedTensor its own target and dtype again."""
        self.sharded.data, self.sharded.dtype = self.template, self.dtype


def through_strategy(
    original: Callable[..., Any],
    strategy: Any,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    delegates: bool = False,
    own_targets: bool = True,
) -> Any:
    """Run a load strategy's ``load`` at disk precision.

    ``delegates``: the strategy lets another one do the reading (FullyParallelLoadStrategyWrapper); it must see the
    disk dtypes too, on every rank, because it exchanges tensors grouped by dtype, but does not write targets.
    ``own_targets``: the strategy makes targets by itself where a ShardedTensor has no data.
    """
    if _load.widened is not None:
        return _read(original, strategy, sharded_state_dict, checkpoint_dir, args, kwargs, delegates)
    _load.widened = {}
    try:
        with standing_aside("loading at disk precision"):
            _load.widened = _widen(strategy, sharded_state_dict, checkpoint_dir, in_place=not own_targets)
        return _read(original, strategy, sharded_state_dict, checkpoint_dir, args, kwargs, delegates)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException (torch 2.1 to 2.15)
        # Once more without us, where nothing has been exchanged between ranks nor replaced in the dict.
        if not _load.widened or delegates or not own_targets or not _is_out_of_memory(error):
            raise
        logger.warning(
            "mcore_patch: out of memory while loading %s at the precision on disk; loading it as megatron-core does by "
            "itself. Masters will come from the model.",
            checkpoint_dir,
        )
        _restore()
        return original(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    finally:
        _load.has_widened = bool(_load.widened)
        _restore()
        _load.widened = None


def _restore() -> None:
    for each in (_load.widened or {}).values():
        each.restore()
    _load.widened = {}


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is one of memory, on any rank: torch's checkpoint code raises what a rank has met on all."""
    causes = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(isinstance(cause, MemoryError | torch.cuda.OutOfMemoryError) for cause in causes)


def _read(
    original: Callable[..., Any],
    strategy: Any,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    delegates: bool,
) -> Any:
    widened = _load.widened
    if not widened:
        return original(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    # Listed before the call: the zarr strategies replace the leaves of the dict in place.
    mine = [widened[id(leaf)] for _, leaf in leaves(sharded_state_dict) if id(leaf) in widened]
    loaded = original(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if not delegates:
        for each in mine:
            each.write_back()
    return loaded


def _widen(strategy: Any, sharded_state_dict: Any, checkpoint_dir: Any, *, in_place: bool) -> dict[int, _Widened]:
    candidates = [leaf for _, leaf in leaves(sharded_state_dict) if _may_lose(leaf)]
    if not candidates:
        return {}
    # The strategy that reads is asked: 0.7's FullyParallelLoadStrategyWrapper forgets to return its answer.
    on_disk = dtypes_on_disk(getattr(strategy, "base_strategy", strategy), checkpoint_dir)
    widened: dict[int, _Widened] = {}
    try:
        for sharded in candidates:
            stored = on_disk.get(sharded.key)
            if stored is not None and loses(stored, sharded.dtype):
                widened[id(sharded)] = _Widened(sharded, stored, in_place=in_place)
    except Exception:
        for each in widened.values():
            each.restore()
        raise
    return widened


def dtypes_on_disk(strategy: Any, checkpoint_dir: Any) -> Mapping[str, torch.dtype]:
    """The dtype of every tensor in a checkpoint, by key; ``strategy`` is the one that reads."""
    try:
        return {key: tensor.dtype for key, tensor in strategy.load_tensors_metadata(checkpoint_dir).items()}
    except TypeError:
        # torch_dist makes tensors from all that torch keeps of each, and torch.empty() takes no strides, which torch
        # 2.15 keeps as well (seen in 0.19.2).
        return disk.dtypes(checkpoint_dir)


def _may_lose(leaf: Any) -> bool:
    """Whether a leaf of a sharded state dict is a 16-bit target that trains, or might."""
    if not hasattr(leaf, "local_shape") or getattr(leaf, "flattened_range", None) is not None:
        return False
    if leaf.dtype not in CHECKPOINT_DTYPES or leaf.dtype.itemsize > 2:
        return False
    template = leaf.data
    if template is None:
        return True
    whole = template._base if template._base is not None else template
    frozen = isinstance(whole, torch.nn.Parameter) and not whole.requires_grad
    return is_plain(template) and not frozen


@dataclass(frozen=True)
class Target:
    """A Parameter in a sharded state dict: its path there, and the ShardedTensor or factory that holds it."""

    path: tuple[Any, ...]
    leaf: Any
    parameter: torch.nn.Parameter


def targets(sharded_state_dict: Any) -> list[Target]:
    """The Parameters of a sharded state dict.

    To be called before ``dist_checkpointing.load``, which takes apart what a factory has to merge again (the two
    halves of a gated MLP); in the loaded state dict the same path leads to the whole tensor.
    """
    found: list[Target] = []
    _load.has_widened = False
    with standing_aside("listing the parameters of a distributed load"):
        for path, leaf in leaves(sharded_state_dict):
            parameter = getattr(leaf, "data", None)
            if isinstance(parameter, torch.nn.Parameter) and not isinstance(leaf, torch.Tensor):
                found.append(Target(path, leaf, parameter))
    return found


def remember(found: list[Target], loaded: Any, checkpoint_dir: Any) -> None:
    """Remember what ``dist_checkpointing.load`` brought for each of the Parameters that :func:`targets` found."""
    with standing_aside("remembering what a distributed load brought"):
        # fp32 parameters beside 16-bit ones are norms that Float16Module has not cast yet (or that stay fp32).
        narrow = next((each.parameter.dtype for each in found if each.parameter.dtype.itemsize <= 2), None)
        _keep_originals([each for each in found if quantized.is_quantized(each.parameter)], loaded, checkpoint_dir)
        for each in found:
            name = ".".join(map(str, each.path))
            memory.loaded(each.parameter, _at(loaded, each.path), ORIGIN, name=name, will_be=narrow)


def _keep_originals(found: list[Target], loaded: Any, checkpoint_dir: Any) -> None:
    """Keep the checkpoint's tensors of quantized parameters, while the pipeline gets what the stock load gives.

    Its ``load_state_dict`` quantizes what it gets, and from other values other bytes come. Up to 0.13, and from 0.19
    on, the target itself is quantized and the load was left to stock: the checkpoint is read once more. In between
    (and behind a factory) the target is a scratch tensor of the nominal dtype, which we may have widened: the loaded
    state dict gets that dtype back.
    """
    originals: dict[tuple[Any, ...], torch.Tensor] = {}
    untouched = [each for each in found if _trains(each) and quantized.is_known(each.leaf.data)]
    untouched = [each for each in untouched if hasattr(each.leaf, "local_shape")]
    if untouched:
        read = disk.read(checkpoint_dir, [each.leaf for each in untouched])
        originals = {each.path: tensor for each, tensor in zip(untouched, read, strict=True)}
    for each in found:
        tensor = _at(loaded, each.path)
        if not isinstance(tensor, torch.Tensor):
            continue
        if each.path in originals:
            memory.stands_for(tensor, originals[each.path])
        elif _load.has_widened and is_plain(tensor) and tensor.dtype is not each.parameter.dtype:
            nominal = tensor.to(each.parameter.dtype)
            _at(loaded, each.path[:-1])[each.path[-1]] = nominal
            memory.stands_for(nominal, tensor)


def _trains(each: Target) -> bool:
    return each.parameter.requires_grad


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested dicts and lists with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        if isinstance(tree, Mapping):
            tree = tree.get(step)
        elif isinstance(tree, Sequence) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        else:
            return None
    return tree
