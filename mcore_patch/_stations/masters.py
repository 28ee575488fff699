"""Station 3: write the masters, at every place where megatron-core builds or refreshes them. One loop for all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mcore_patch._stations import quantized
from mcore_patch._stations.guard import standing_aside
from mcore_patch._stations.identity import ByIdentity
from mcore_patch._stations.optimizers import Master, Unreachable, elsewhere, holder_of, parameter_names, strangers
from mcore_patch._stations.parameters import can_be_compared, chunks, differing, explains, same, values, why_left
from mcore_patch._stations.remainders import split
from mcore_patch._stations.remember import Exact, Settled, Source, memory
from mcore_patch._stations.report import MasterRecord, SourceKind, dtype_name, reporter
from mcore_patch._stations.verify import verified, wrote

Kept = dict[int, torch.Tensor]


def keep_settled(optimizer: Any) -> Kept:
    """Copies of the masters that came from the checkpoint and that no later load has superseded.

    megatron-core's own refresh is about to overwrite them from the rounded parameters, or has built new ones beside
    those of an earlier optimizer. Keys are ``id(parameter)``.
    """
    kept: Kept = {}
    with standing_aside("keeping masters that came from the checkpoint"):
        for master in _reachable(optimizer):
            settled = memory.settled(master.parameter)
            if settled is not None:
                held = _held(settled, optimizer, master)
                if held is not None:
                    kept[id(master.parameter)] = held
    return kept


def _held(settled: Settled, optimizer: Any, master: Master) -> torch.Tensor | None:
    owner = settled.optimizer()
    same_range = (settled.start, settled.stop) == (master.start, master.stop)
    if owner is None or not same_range or (settled.check is not None and settled.check != _checksum(_shard(master))):
        return None
    if owner is not optimizer:
        others = (other for other in _reachable(owner) if other.parameter is master.parameter)
        return next((other.read().clone() for other in others), None)
    return master.read().clone()


def write(optimizer: Any, event: str, kept: Kept, *, reloaded: bool) -> None:
    """Give every master of ``optimizer`` (not a chained one) its value.

    The checkpoint's, where a source is remembered and the parameter still is what that says, or where the master held
    the checkpoint's value before (``kept``, see :func:`keep_settled`). Otherwise the master stays as megatron-core left
    it, unless that is from before the load: storing it would not give the parameter. Then it becomes the parameter's
    value. ``reloaded`` says that megatron-core has just given its masters the parameters' values.

    No collective; what is decided for a parameter depends only on data that all its data-parallel ranks hold.
    """
    # Outermost, so that what verification finds is raised.
    with verified(event), standing_aside("writing masters from the checkpoint"), reporter.event(), torch.no_grad():
        names = parameter_names(optimizer)
        masters = list(_masters(optimizer))
        aligned = _align_split(optimizer, masters)
        for master in masters:
            name = names.get(id(master.parameter)) or memory.name(master.parameter) or "?"
            if isinstance(master, Unreachable) or not can_be_compared(master.parameter):
                reason = master.reason if isinstance(master, Unreachable) else why_left(master.parameter)
                _record(master, name, event, "model", reason)
                memory.forget(master.parameter)
            else:
                _write_one(optimizer, master, name, event, kept, reloaded, master.parameter in aligned)
        for parameter in _owned(optimizer):
            # Parameters of which this rank has no shard.
            if memory.settled(parameter) is None:
                memory.forget(parameter)


def _align_split(optimizer: Any, masters: list[Master | Unreachable]) -> ByIdentity[bool]:
    """Where parameters are the upper halves of their masters, make them that, whole, on every data-parallel rank.

    Only values exactly between two 16-bit ones change: a load rounds them to even, the split does not. A rank writes
    the masters of its own shards only, and the ranks' copies of a parameter must stay the same without a collective.
    Returns the parameters that were checked against their source here, before they changed.
    """
    aligned: ByIdentity[bool] = ByIdentity()
    if any(isinstance(master, Master) and master.split for master in masters):
        for parameter in _owned(optimizer):
            source = memory.source(parameter)
            if source is not None and parameter.dtype is torch.bfloat16 and _may_be_split(parameter, source):
                flat, wanted = parameter.detach().view(-1), source.tensor.reshape(-1)
                for a, b in chunks(flat):
                    flat[a:b].copy_(split(wanted[a:b].to(device=flat.device, dtype=torch.float32))[0])
                aligned[parameter] = True
    return aligned


def release(optimizer: Any) -> None:
    """Forget what is remembered of parameters whose masters a layer-wise optimizer holds on other ranks only."""
    with standing_aside("releasing what other ranks hold"):
        for parameter in elsewhere(optimizer):
            if memory.settled(parameter) is None:
                memory.forget(parameter)


def leave(optimizer: Any, event: str) -> None:
    """Record the parameters of the optimizers in ``optimizer`` that we do not know and do not touch."""
    with standing_aside("looking at optimizers that we do not know"), reporter.event():
        unknown = strangers(optimizer)
        names = parameter_names(optimizer) if unknown else {}
        for stranger in unknown:
            for group in getattr(stranger, "param_groups", ()):
                for parameter in group["params"]:
                    name = names.get(id(parameter)) or memory.name(parameter) or "?"
                    left = Unreachable(parameter, type(stranger).__name__, "an optimizer that we do not know holds it")
                    _record(left, name, event, "model", left.reason)


def restored(optimizer: Any, event: str) -> None:
    """Optimizer state brought the masters of ``optimizer``: they win, whatever the checkpoint's weights say."""
    with standing_aside("noting masters restored from optimizer state"), reporter.event(), torch.no_grad():
        names = parameter_names(optimizer)
        for master in _masters(optimizer):
            if isinstance(master, Master) and master.adopt is not None:
                master.adopt()
            name = names.get(id(master.parameter)) or memory.name(master.parameter) or "?"
            _record(master, name, event, "optimizer state", "restored from optimizer state")
        for parameter in _owned(optimizer):
            memory.forget(parameter)


def _write_one(
    optimizer: Any, master: Master, name: str, event: str, kept: Kept, reloaded: bool, checked: bool
) -> None:
    parameter = master.parameter
    known = memory.known(parameter)
    disk, reason = None if known is None else known.dtype, "no load of it was seen"
    chosen, origin = None, ""
    if isinstance(known, Source):
        reason = "" if checked else _objection(parameter, known) or ""
        if not reason:
            chosen, origin = known.tensor.reshape(-1)[master.start : master.stop], known.origin
    elif isinstance(known, Settled):
        reason = NO_LONGER
        held = kept.get(id(parameter))
        if held is not None and _explains(held, master):
            chosen, origin = held, "kept: it held the checkpoint's value"
    elif known is not None:
        reason = f"{dtype_name(known.dtype)} on disk loses nothing in {dtype_name(parameter.dtype)}"

    memory.forget(parameter)
    if chosen is not None and disk is not None:
        changed = _fill(master, chosen)
        wrote(name, master, chosen if master.slack is None else master.read())
        check = _checksum(_shard(master)) if master.split else None
        memory.settle(parameter, Settled(weakref.ref(optimizer), master.start, master.stop, name, disk, check))
        _record(master, name, event, "checkpoint", origin, disk, changed)
        return
    # What upstream builds the master of a quantized parameter from is its initial value, whatever was loaded since.
    may_be_old = not (reloaded and master.refreshed) or quantized.is_quantized(parameter)
    # A remainder cannot be told to be old, so only the parameter's value is sure to be new.
    exactly = isinstance(known, Exact) or master.split
    refreshed = None
    if may_be_old and not (_is_value(master) if exactly else _explains(master.read(), master)):
        refreshed = _fill(master, _shard(master))
        wrote(name, master, _shard(master) if master.slack is None else master.read())
        reason += "; the master was from before the load"
    _record(master, name, event, "model", reason, disk, refreshed)


NO_LONGER = "the parameter no longer is what the checkpoint said"


def _objection(parameter: torch.nn.Parameter, source: Source) -> str | None:
    """Why the remembered tensor must not become the master; None if it may."""
    if not source.untouched:
        return "the loaded tensor was changed in place after the load"
    # The whole parameter is compared, not only this rank's shard, so that all data-parallel ranks come to the same
    # answer without talking to each other.
    if not explains(parameter, source.tensor.reshape(-1)):
        return NO_LONGER
    return None


def _shard(master: Master) -> torch.Tensor:
    """The elements of the parameter that ``master`` is the master of."""
    return values(master.parameter)[master.start : master.stop]


def _explains(held: torch.Tensor, master: Master) -> bool:
    """Whether storing ``held``, a value for ``master``, in the parameter would give what the parameter holds there.

    Where a master loses by the form it is held in, what it was before that.
    """
    if master.slack is None or quantized.is_quantized(master.parameter):
        return master.split or explains(master.parameter, held, master.start, master.stop)
    shard = _shard(master).float()
    rounding = shard.abs() * (torch.finfo(master.parameter.dtype).eps / 2)
    return bool(((held - shard).abs() <= master.slack() + rounding).all())


def _checksum(shard: torch.Tensor) -> torch.Tensor:
    """A 0-d checksum of the bits of a flat bf16 tensor, each weighted by its place."""
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for a, b in chunks(shard):
        total += (shard[a:b].view(torch.int16) * torch.arange(2 * a + 1, 2 * b, 2, device=shard.device)).sum()
    return total


def _is_value(master: Master) -> bool:
    """Whether ``master`` holds the parameter's value, as well as it can."""
    held, shard = master.read(), _shard(master).float()
    return same(held, shard) if master.slack is None else bool(((held - shard).abs() <= master.slack()).all())


def _may_be_split(parameter: torch.nn.Parameter, source: Source) -> bool:
    """Whether ``parameter`` is what a load, or the split of an earlier write, made of ``source``."""
    objection = _objection(parameter, source)
    if objection != NO_LONGER:
        return objection is None
    flat, wanted = parameter.detach().view(-1), source.tensor.reshape(-1)
    return all(
        same(split(wanted[a:b].to(device=flat.device, dtype=torch.float32))[0], flat[a:b]) for a, b in chunks(flat)
    )


def _fill(master: Master, source: torch.Tensor) -> torch.Tensor:
    """Copy the one-dimensional ``source`` (any float dtype and device) into the master; how many elements changed.

    If anything fails on the way, the master gets the parameter's value, so that it is never half of each.
    """
    before = master.read()
    changed = torch.zeros((), dtype=torch.int64, device=before.device)
    try:
        for a, b in [(0, before.numel())] if master.in_one_piece else chunks(before):
            new = source[a:b].to(device=before.device, dtype=torch.float32)
            changed += differing(new, before[a:b])
            master.write(a, new)
    except Exception:
        master.write(0, _shard(master).to(device=before.device, dtype=torch.float32))
        raise
    return changed


def _record(
    master: Master | Unreachable,
    name: str,
    event: str,
    source: SourceKind,
    reason: str,
    disk: torch.dtype | None = None,
    changed: torch.Tensor | None = None,
) -> None:
    parameter = master.parameter
    record = MasterRecord(
        name=name,
        shape=tuple(parameter.shape),
        numel=master.stop - master.start if isinstance(master, Master) else 0,
        disk_dtype=dtype_name(disk),
        parameter_dtype=dtype_name(parameter.dtype) or "",
        source=source,
        reason=reason,
        changed=0,
        held_by=master.held_by,
        event=event,
    )
    reporter.add(parameter, record, changed)


def _masters(optimizer: Any) -> Iterable[Master | Unreachable]:
    holder = holder_of(optimizer)
    return () if holder is None else holder.masters(optimizer)


def _owned(optimizer: Any) -> Iterable[torch.nn.Parameter]:
    holder = holder_of(optimizer)
    return () if holder is None else holder.owned(optimizer)


def _reachable(optimizer: Any) -> Iterator[Master]:
    return (master for master in _masters(optimizer) if isinstance(master, Master))
