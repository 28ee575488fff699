"""The gate on every release of the registry, and on copies of each with one target changed; nothing is installed.

The wheels, under their own names, or the trees that they were unpacked to, under those of the versions, are taken from
the folder that MCORE_PATCH_TEST_RELEASES names; else ``pip download`` gets them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mcore_patch.compat import LINES, ReleaseLine
from mutations import copy_read, prove

from mcore_patch._engine.source import package_in

RELEASES = [(line, release) for line in LINES for release in line.releases]


def fetched(release: str, folder: Path) -> Path:
    given = os.environ.get("MCORE_PATCH_TEST_RELEASES")
    if given:
        found = [path for path in Path(given).iterdir() if path.name == release or f"-{release}-" in path.name]
        assert found, f"{given} has no megatron-core {release}"
        return found[0]
    # Built for whatever Python: it is only read.
    for python in ("3.10", "3.11", "3.12"):
        options = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", f"--dest={folder}", "-q"]
        pip = [sys.executable, "-m", "pip", "download", *options, f"megatron-core=={release}"]
        if subprocess.run(pip, capture_output=True).returncode == 0:
            return next(folder.glob("*.whl"))
    pytest.fail(f"pip finds no wheel of megatron-core {release}")


@pytest.mark.wide
@pytest.mark.parametrize("line, release", RELEASES, ids=[release for _, release in RELEASES])
def test_the_gate_is_right_about_a_release_and_each_change_of_a_target(
    line: ReleaseLine, release: str, tmp_path: Path
) -> None:
    copy_read(package_in(fetched(release, tmp_path)), tmp_path / "tree")
    assert prove(tmp_path / "tree", line) == 4 * len(line.targets) + 2
