"""Fresh processes, stock and patched in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

from mcore_patch.testing import run_ranks

Way = Literal["stock", "patched"]
WAYS: tuple[Way, Way] = ("stock", "patched")


def in_fresh_process(way: Way, work: str, *args: Any) -> Any:
    """What ``on_rank.<work>(*args)`` returns in a new process with one rank."""
    return run_ranks(_enter, 1, way, work, args, start="spawn", timeout=600)[0]


def in_turn(rounds: int, work: str, *args: Any) -> dict[Way, list[Any]]:
    """The same work *rounds* times each way: stock, patched, stock, patched, so that a slow minute hits both."""
    results: dict[Way, list[Any]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            results[way].append(in_fresh_process(way, work, *args))
    return results


def seconds_of(statement: str, rounds: int) -> float:
    """Median CPU seconds of a statement in a new interpreter that has imported nothing."""
    code = f"import time; begin = time.process_time(); {statement}; print(time.process_time() - begin)"
    command: Sequence[str] = (sys.executable, "-c", code)
    return statistics.median(float(subprocess.check_output(command, text=True)) for _ in range(rounds))


def _enter(way: Way, work: str, args: tuple[Any, ...]) -> Any:
    import logging
    import warnings

    import mcore_patch
    from mcore_patch.testing import stand_in_for_cuda, stand_in_for_era

    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if way == "patched":
        mcore_patch.apply()
    stand_in_for_cuda()
    stand_in_for_era()
    from . import on_rank

    return getattr(on_rank, work)(*args)
