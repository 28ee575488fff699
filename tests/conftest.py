"""What a report says beside the results, for docs/what-was-run.md; see scripts/ran.py."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

import pytest

INSTALLED = ("torch", "numpy", "wrapt", "packaging")


@pytest.fixture(scope="session", autouse=True)
def _installed(record_testsuite_property: Callable[[str, object], None]) -> None:
    record_testsuite_property("python", platform.python_version())
    found = {distribution.metadata["Name"].lower().replace("_", "-") for distribution in metadata.distributions()}
    for name in INSTALLED:
        if name in found:
            record_testsuite_property(name, metadata.version(name))
