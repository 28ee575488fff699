"""Fixtures of the engine's tests. What depends on the state of imports runs in a fresh interpreter."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_patch._engine import source

SUPPORT = Path(__file__).with_name("support")

RunPython = Callable[..., str]


@pytest.fixture(autouse=True)
def _nothing_was_read() -> None:
    """Files are parsed once per content, which may have been in another test."""
    source._read.cache_clear()


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a fresh interpreter that finds the tree in tmp_path/site; return what it printed.

    `scratch` is there for it, and `env` goes on top of an environment without the package's own switches.
    """

    def run(code: str, **env: str) -> str:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("MCORE_PATCH", "RANK"))}
        path = os.pathsep.join([str(tmp_path / "site"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        preamble = f"from pathlib import Path\nscratch = Path({str(tmp_path / 'scratch')!r})\n"
        variables = {**base, "PYTHONPATH": path.rstrip(os.pathsep), **env}
        if os.environ.get("MUTANT_UNDER_TEST"):
            return _run_in_fork(preamble + textwrap.dedent(code), tmp_path, variables)
        result = subprocess.run(
            [sys.executable, "-c", preamble + textwrap.dedent(code)],
            cwd=tmp_path,  # not the repository, where the folder mcore_patch would hide the installed package
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    return run


def _run_in_fork(code: str, folder: Path, env: dict[str, str]) -> str:
    """As `run_python`, but quick, for the second stage of scripts/mutants.py: with what is imported here already."""
    output = folder / "output"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for descriptor in (1, 2):
                os.dup2(os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            logging.root.handlers.clear()  # pytest's
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(code, vars(sys.modules["__main__"]))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.read_text()
    output.unlink()
    assert status == 0, text
    return text
