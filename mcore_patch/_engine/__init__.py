"""The patch engine of this process. It knows how to patch, and nothing of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mcore_patch.compat import LINES, TARGETS

from .engine import Engine, Factory
from .gate import Decision, Reason, Verdict
from .logs import LOGGER, log, speaks
from .source import package_in
from .status import PatchError, Status, TargetStatus

__all__ = [
    "ENGINE",
    "LOGGER",
    "Decision",
    "Engine",
    "PatchError",
    "Reason",
    "Status",
    "TargetStatus",
    "Verdict",
    "examine",
    "is_strict",
    "log",
    "speaks",
]


def _load_wrappers() -> Mapping[str, Factory]:
    from mcore_patch._patches import WRAPPERS  # late: the patches need torch

    return WRAPPERS


ENGINE = Engine(TARGETS, LINES, _load_wrappers)


def is_strict() -> bool:
    """Whether the pipeline asked, by `apply(strict=True)`, for errors instead of warnings."""
    return ENGINE.is_strict


def examine(path: Path) -> Decision:
    """Judge the megatron-core in an unpacked tree or a wheel file, without importing or installing it.

    Raises FileNotFoundError when there is none.
    """
    return ENGINE.examine(package_in(path))
