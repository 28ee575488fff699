"""MCORE_PATCH_VERIFY=1: compare every master that was written with its source again, on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_patch._stations.optimizers import Master
from mcore_patch._stations.parameters import chunks, differing

logger = logging.getLogger("mcore_patch")

_SHOWN = 5


class VerificationError(RuntimeError):
    """A master does not hold what was written to it. Raised on the ranks where that is so."""


_written: list[tuple[str, Master, torch.Tensor]] = []


def wrote(name: str, master: Master, source: torch.Tensor) -> None:
    """``source``, flat and as long as ``master``, was written; it is kept until the enclosing :func:`verified` ends."""
    if _is_on():
        _written.append((name, master, source))


@contextmanager
def verified(event: str) -> Iterator[None]:
    """Compare all masters that were written inside, when all are: one that overwrites another is found, too.

    One line, on every rank. Raises VerificationError if an element differs in its bits. Does nothing unless
    MCORE_PATCH_VERIFY=1.
    """
    try:
        yield
        if _is_on():
            _verify(event)
    finally:
        _written.clear()


def _is_on() -> bool:
    return os.environ.get("MCORE_PATCH_VERIFY") == "1"


def _verify(event: str) -> None:
    counts = [(name, _differing(master, source), source.numel()) for name, master, source in _written]
    wrong = [(name, count, numel) for name, count, numel in counts if count]
    elements, different = sum(numel for _, _, numel in counts), sum(count for _, count, _ in wrong)
    line = (
        f"mcore_patch: rank {_rank()}: {event}: verified {len(counts)} masters, {elements} elements: "
        f"{different} differ from their source"
    )
    if not wrong:
        logger.info("%s", line)
        return
    shown = "; ".join(f"{name}: {count} of {numel}" for name, count, numel in wrong[:_SHOWN])
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    text = f"{line} ({shown}{more})"
    logger.error("%s", text)
    raise VerificationError(
        f"{text}. Something else writes to these masters, or mcore-patch does not know how this optimizer holds them: "
        "please report it; MCORE_PATCH=0 switches the patch off."
    )


def _differing(master: Master, source: torch.Tensor) -> int:
    held = master.read()
    count = torch.zeros((), dtype=torch.int64, device=held.device)
    for a, b in chunks(held):
        count += differing(source[a:b].to(device=held.device, dtype=torch.float32), held[a:b])
    return int(count)


def _rank() -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return os.environ.get("RANK", "0")
