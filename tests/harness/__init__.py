"""Scenarios on real megatron-core releases: see :class:`Scenario` and :class:`Session`.

    with Session() as session:
        result = session.run(Scenario(fmt="torch_dist", tp=2), mode="patched")
        assert result.differing == 0

The release is the ``megatron.core`` on the path. Importing this package imports neither torch nor megatron.
"""

from __future__ import annotations

from .scenario import Master, Result, Scenario, unavailable
from .session import Session, release

__all__ = ["Master", "Result", "Scenario", "Session", "release", "unavailable"]
