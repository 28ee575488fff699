"""``mcore-patch demo`` on the installed release."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mcore_patch._cli.demo_cases import CASES

pytestmark = pytest.mark.wide


def test_the_demo_finds_what_it_is_there_to_show(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mcore_patch", "demo", "--steps", "3", "--out", str(tmp_path)]
    # Elsewhere, so that the checkout is not found before the installed package.
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"megatron-core {metadata.version('megatron-core')}" in done.stdout
    pictures = [f"{case.name}.png" for case in CASES] if importlib.util.find_spec("matplotlib") else []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pictures)
