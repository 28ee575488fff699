"""What a measuring process answers. Importing this module imports neither torch nor megatron-core."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Median CPU seconds of each piece of work, and what the first load added to the resident memory at its peak."""

    load: float
    reload: float
    step: float
    peak: int | None
    masters: int


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process in *work*, all threads together: what else runs on the machine does not count."""
    begin = time.process_time()
    work()
    return time.process_time() - begin
