"""The package's logger, and whether this process should be the one that speaks."""

from __future__ import annotations

import logging
import os
import sys

LOGGER = logging.getLogger("mcore_patch")


def speaks() -> bool:
    """Whether this is rank 0, or the only process. torch is asked only if it has been imported."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return bool(distributed.get_rank() == 0)
    except (AttributeError, RuntimeError):  # torch is being imported, or its process group torn down
        pass
    return os.environ.get("RANK", "0") == "0"


def log(level: int, message: str, *arguments: object) -> None:
    """Log at `level` on rank 0, and at DEBUG elsewhere."""
    LOGGER.log(level if speaks() else logging.DEBUG, message, *arguments)
