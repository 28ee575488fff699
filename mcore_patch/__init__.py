"""Makes the fp32 masters of megatron-core's optimizers come from the checkpoint.

    import mcore_patch
    mcore_patch.apply()

Call it once per process, before or after megatron-core is imported. Importing this package imports neither
torch nor megatron-core; nor does `apply()`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._engine import PatchError, Status
    from ._stations.report import MasterRecord

__all__ = ["PatchError", "__version__", "apply", "report", "revert", "status"]

__version__ = "0.1.0"


def apply(*, strict: bool = False, disable: Iterable[str] = (), only: Iterable[str] | None = None) -> Status:
    """Patch megatron-core where the release at hand needs it; what is imported later is patched then.

    Any number of calls from any thread leave one wrapper per target. The choice of targets of the last call
    holds. The environment counts where an argument is not given: MCORE_PATCH_DISABLE and MCORE_PATCH_ONLY
    hold target ids, separated by commas. MCORE_PATCH=0 switches everything off. An unknown id is a warning.

    A target that is needed and cannot be patched is a warning; with `strict` it is a `PatchError` that lists
    all of them, and the call has changed nothing.
    """
    from ._engine import ENGINE

    return ENGINE.apply(strict=strict, disable=disable, only=only)


def revert() -> Status:
    """Put everything back as it was found, and forget all loads.

    Under a wrapper of somebody else ours stays, and does nothing.
    """
    from ._engine import ENGINE

    status = ENGINE.revert()
    stations = sys.modules.get(f"{__name__}._stations.remember")
    if stations is not None:
        stations.memory.clear()
    return status


def status() -> Status:
    """Tell which targets are patched, which are not, and why. Never raises; imports no torch."""
    from ._engine import ENGINE

    return ENGINE.status()


def report() -> tuple[MasterRecord, ...]:
    """Tell where each master came from."""
    from ._stations.report import report

    return report()


def __getattr__(name: str) -> object:
    if name == "PatchError":
        from ._engine import PatchError

        return PatchError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
