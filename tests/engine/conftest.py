"""Fixtures of the engine's tests. What depends on the state of imports runs in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

SUPPORT = Path(__file__).with_name("support")

RunPython = Callable[..., str]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a fresh interpreter that finds the tree in tmp_path/site; return what it printed.

    `scratch` is there for it, and `env` goes on top of an environment without the package's own switches.
    """

    def run(code: str, **env: str) -> str:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("MCORE_PATCH", "RANK"))}
        path = os.pathsep.join([str(tmp_path / "site"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        preamble = f"from pathlib import Path\nscratch = Path({str(tmp_path / 'scratch')!r})\n"
        result = subprocess.run(
            [sys.executable, "-c", preamble + textwrap.dedent(code)],
            cwd=tmp_path,  # not the repository, where the folder mcore_patch would hide the installed package
            env={**base, "PYTHONPATH": path.rstrip(os.pathsep), **env},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    return run
