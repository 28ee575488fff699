"""The registry: which attributes are patched, and what was checked of them in every megatron-core release.

A release line is one module named `v<major>_<two digits of minor>.py` with a `LINE`; dropping the file in adds it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType

from ._schema import Checked, Pair, Quirks, ReleaseLine, Target
from ._targets import TARGETS

__all__ = [
    "LINES",
    "PAIRS",
    "TARGETS",
    "WHY_NO_OLDER",
    "Checked",
    "Pair",
    "Quirks",
    "ReleaseLine",
    "Target",
    "line_named",
]


def _modules() -> list[ModuleType]:
    names = (module.name for module in pkgutil.iter_modules(__path__))
    found = [importlib.import_module(f"{__name__}.{name}") for name in names if re.fullmatch(r"v\d+_\d+", name)]
    return sorted(found, key=lambda module: module.LINE.key)


_MODULES = _modules()

LINES: tuple[ReleaseLine, ...] = tuple(module.LINE for module in _MODULES)
"""All release lines, oldest first."""

WHY_NO_OLDER = "before 0.6 megatron-core had no optimizer, that was in Megatron-LM"
"""Why there are no lines before the first."""

PAIRS: tuple[Pair, ...] = tuple(pair for module in _MODULES for pair in getattr(module, "PAIRS", ()))
"""The pairs with Transformer Engine that are tested, oldest megatron-core first."""


def line_named(name: str) -> ReleaseLine:
    """Return the line called `name`, such as "0.14". Raises KeyError, naming the known lines."""
    for line in LINES:
        if line.name == name:
            return line
    raise KeyError(f"no release line {name!r}; known: {', '.join(line.name for line in LINES)}")
