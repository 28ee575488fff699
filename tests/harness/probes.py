"""What to ask a rank when its pipeline is done: for ``Session.run(..., probe=...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pipeline import Pipeline


def report(_: Pipeline) -> Any:
    """``mcore_patch.report()``."""
    import mcore_patch

    return mcore_patch.report()


def status(_: Pipeline) -> Any:
    """``mcore_patch.status()``."""
    import mcore_patch

    return mcore_patch.status()


def step(pipeline: Pipeline) -> dict[str, str]:
    """Takes one step on seeded gradients; the snapshot of the model after it."""
    from .masters import model_snapshot
    from .models import train_step

    train_step(pipeline.chunks, pipeline.optimizer)
    return model_snapshot(pipeline.chunks)
