"""Fixtures of the command line's tests. Every command runs in a fresh interpreter, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run `python *arguments` in tmp_path, with tmp_path/site in front of the path.

    Keywords go into an environment without the package's own switches.
    """

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("MCORE_PATCH", "RANK"))}
        path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,  # not the repository, where the folder mcore_patch would hide the installed package
            env={**base, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def command(python: Python) -> Python:
    """Run `mcore-patch *arguments`, as `python` does."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "mcore_patch", *arguments, **env)

    return run
