"""The registry: which attributes are patched, and what was checked of them in every megatron-core release.

A release line is one module named `v<major>_<minor>.py` with a `LINE`; dropping the file in adds the line.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

from ._schema import Checked, Quirks, ReleaseLine, Target
from ._targets import TARGETS

__all__ = ["LINES", "TARGETS", "Checked", "Quirks", "ReleaseLine", "Target", "line_named"]


def _discover() -> tuple[ReleaseLine, ...]:
    names = (module.name for module in pkgutil.iter_modules(__path__))
    lines = (
        importlib.import_module(f"{__name__}.{name}").LINE
        for name in names
        if re.fullmatch(r"v\d+_\d+", name)
    )
    return tuple(sorted(lines, key=lambda line: line.key))


LINES: tuple[ReleaseLine, ...] = _discover()
"""All release lines, oldest first."""


def line_named(name: str) -> ReleaseLine:
    """Return the line called `name`, such as "0.14". Raises KeyError, naming the known lines."""
    for line in LINES:
        if line.name == name:
            return line
    raise KeyError(f"no release line {name!r}; known: {', '.join(line.name for line in LINES)}")
