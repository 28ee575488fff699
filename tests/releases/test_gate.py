"""The gate on the installed release and on copies of it with changed targets: read, and alive."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import release
from mcore_patch.compat import LINES, TARGETS, ReleaseLine
from mutations import copy_read, file_of, mutate, prove

from mcore_patch._engine.source import find_package

from .test_patching import IMPORT, SNAPSHOT


def line() -> ReleaseLine:
    return next(each for each in LINES if each.key == release()[:2])


@pytest.mark.edges
def test_the_gate_is_right_about_the_release_and_each_change_of_a_target(tmp_path: Path) -> None:
    package = find_package()
    assert package is not None
    copy_read(package, tmp_path)
    assert prove(tmp_path, line()) == 4 * len(line().targets) + 2


def changed_copy(root: Path) -> None:
    package = find_package()
    assert package is not None
    shutil.copytree(package, root / "megatron" / "core")


def python(code: str, root: Path) -> str:
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tempfile.gettempdir(),  # so that the checkout is not found before the installed package
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


ALIVE = f"""{IMPORT}{SNAPSHOT}
before = snapshot()
import io, json, logging
import mcore_patch
heard = io.StringIO()
logging.basicConfig(stream=heard, level=logging.WARNING, force=True)  # 0.19 has set it up when it is imported
status = mcore_patch.apply()
after = snapshot()
patched = [name for name in before if before[name] is not after[name]]
states = {{t.id: [t.state, t.verdict] for t in status.targets}}
print(json.dumps([patched, states, status.reason, megatron.core.__file__, heard.getvalue()]))
"""


@pytest.mark.edges
def test_targets_that_are_not_as_checked_are_left_as_they_are_and_the_others_patched(tmp_path: Path) -> None:
    changed_copy(tmp_path)
    ours = [TARGETS[target_id] for target_id in line().targets]
    # Modules import functions from each other by name, so that only methods can be renamed in a copy that runs.
    changes = {
        target.id: ("renamed" if "." in target.qualname else "added", "added", "body", "")[index % 4]
        for index, target in enumerate(ours)
    }
    for target in ours:
        if changes[target.id]:
            mutate(tmp_path, target, changes[target.id])
    patched, states, _, where, heard = json.loads(python(ALIVE, tmp_path))
    assert Path(where).is_relative_to(tmp_path), "the copy was not imported"
    for target_id, change in changes.items():
        state, verdict = states[target_id]
        if change in ("renamed", "added"):
            assert state == "skipped"
            assert target_id not in patched
            assert (f"{target_id} is not patched" in heard) == TARGETS[target_id].needed
        elif state != "pending":  # zarr is imported when it is used
            assert (state, verdict) == ("applied", "unverified" if change == "body" else "verified")
            assert target_id in patched


@pytest.mark.edges
def test_a_release_from_the_future_is_left_alone_and_told(tmp_path: Path) -> None:
    changed_copy(tmp_path)
    info = file_of(tmp_path, "megatron.core.package_info")
    info.write_text(re.sub(r"(?m)^MINOR = \d+$", "MINOR = 99", info.read_text()))
    patched, states, reason, where, heard = json.loads(python(ALIVE, tmp_path))
    assert Path(where).is_relative_to(tmp_path), "the copy was not imported"
    assert (patched, reason) == ([], "release-newer")
    assert {state for state, _ in states.values()} == {"skipped"}
    assert heard.count("nothing is patched: megatron-core 0.99.") == 1
