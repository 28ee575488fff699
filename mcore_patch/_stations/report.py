"""Station 4: where each master came from, as frozen records and one log line per event."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mcore_patch._stations.guard import standing_aside

logger = logging.getLogger("mcore_patch")

SourceKind = Literal["checkpoint", "model", "optimizer state"]


@dataclass(frozen=True)
class MasterRecord:
    """Where the master of one parameter came from, on this rank.

    Attributes:
        name: the parameter's name in its model chunk, without wrapper prefixes; ``model<i>.`` in front where the
            optimizer owns several chunks.
        shape: the parameter's (tensor-parallel local) shape.
        numel: elements of the master on this rank (a data-parallel shard has fewer than the parameter).
        disk_dtype: the dtype of the checkpoint's tensor, e.g. ``float32``; None when no load was seen.
        parameter_dtype: the parameter's dtype, e.g. ``bfloat16``.
        source: ``checkpoint``, ``model`` or ``optimizer state``.
        reason: why that source.
        changed: elements whose bits differ from what megatron-core alone would have left in the master.
        held_by: the optimizer class that holds the master.
        event: what made or refreshed the master.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    disk_dtype: str | None
    parameter_dtype: str
    source: SourceKind
    reason: str
    changed: int
    held_by: str
    event: str


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """``float32`` for ``torch.float32``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


class Reporter:
    """Collects records and keeps the latest one of each parameter.

    Parameters are told apart by their ``id``: a weak reference would keep torch from swapping them (see ``remember``).
    """

    def __init__(self) -> None:
        self._records: dict[int, MasterRecord] = {}
        self._open: list[tuple[int, MasterRecord, torch.Tensor | None]] | None = None

    @contextmanager
    def event(self) -> Iterator[None]:
        """Everything recorded inside (nested events included) becomes one log line, when the outermost one ends."""
        if self._open is not None:
            yield
            return
        self._open = []
        try:
            yield
        finally:
            collected, self._open = self._open, None
            with standing_aside("reporting where masters came from"):
                self._close(collected)

    def add(self, parameter: torch.nn.Parameter, record: MasterRecord, changed: torch.Tensor | None = None) -> None:
        """Record where a master came from; ``changed`` is a 0-d count, read only when the event ends (one sync)."""
        assert self._open is not None, "a record outside of an event"
        self._open.append((id(parameter), record, changed))

    def records(self) -> tuple[MasterRecord, ...]:
        """The latest record of every parameter."""
        return tuple(self._records.values())

    def clear(self) -> None:
        """Drop all records."""
        self._records.clear()

    def _close(self, collected: list[tuple[int, MasterRecord, torch.Tensor | None]]) -> None:
        if not collected:
            return
        latest: dict[int, MasterRecord] = {}
        for parameter, record, changed in collected:
            if changed is not None:
                record = replace(record, changed=int(changed))
            latest[parameter] = record
        self._records.update(latest)
        records = list(latest.values())
        logger.log(logging.INFO if _first_rank() else logging.DEBUG, "%s", summary(records))


def summary(records: list[MasterRecord]) -> str:
    """One line: how many masters came from where, and why not from the checkpoint."""
    tensors: Counter[str] = Counter(record.source for record in records)
    elements: Counter[str] = Counter()
    for record in records:
        elements[record.source] += record.numel
    came = ", ".join(
        f"{tensors[kind]} from the {kind} ({elements[kind]} elements)"
        for kind in ("checkpoint", "model", "optimizer state")
        if tensors[kind]
    )
    changed = sum(record.changed for record in records)
    reasons = Counter(record.reason for record in records if record.source == "model")
    why = "".join(f"; {count} x {reason}" for reason, count in reasons.most_common(3))
    event = " + ".join(dict.fromkeys(record.event for record in records))
    return f"mcore_patch: {event}: masters on this rank: {came}; {changed} elements differ from stock{why}"


def _first_rank() -> bool:
    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0


reporter = Reporter()


def report() -> tuple[MasterRecord, ...]:
    """The records of this process: one per parameter whose master was made or refreshed, the latest of each."""
    return reporter.records()
