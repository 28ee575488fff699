"""Our own steps may fail; the training run may not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mcore_patch._engine import is_strict

logger = logging.getLogger("mcore_patch")
_said: set[str] = set()


@contextmanager
def standing_aside(step: str, *meant: type[Exception], otherwise: Callable[[], object] | None = None) -> Iterator[None]:
    """Run one of our own steps so that its failure leaves what megatron-core does by itself.

    An exception inside the block is logged once per ``step`` as a WARNING with its traceback and swallowed; under
    ``apply(strict=True)`` it is raised. Never wrap a call of the original function in this: what upstream raises must
    reach the caller unchanged. Exceptions of the classes ``meant`` are meant for the caller. ``otherwise`` is called
    where one was swallowed.
    """
    try:
        yield
    except meant:
        raise
    except Exception:
        if is_strict():
            raise
        if step not in _said:
            _said.add(step)
            logger.warning(
                "mcore_patch: %s failed; megatron-core's own behaviour is kept for it. Please report the traceback; "
                "MCORE_PATCH=0 switches the patch off.",
                step,
                exc_info=True,
            )
        if otherwise is not None:
            otherwise()
