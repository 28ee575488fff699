"""`mcore-patch doctor` and MCORE_PATCH_VERIFY on the installed release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Scenario, Session, release
from mcore_patch.compat import TARGETS, line_named

pytestmark = pytest.mark.edges

PREPARE = """\
from mcore_patch.testing import stand_in_for_cuda, stand_in_for_era
stand_in_for_cuda()
stand_in_for_era()
"""
"""A release that is older than the installed torch, or that wants a GPU to be imported, finds both."""

FOREIGN = """\
import functools
from megatron.core.dist_checkpointing.serialization import load
from megatron.core.optimizer.optimizer import FP32Optimizer

original = FP32Optimizer.reload_model_params

@functools.wraps(original)
def wrapper(*args, **kwargs):
    return original(*args, **kwargs)

FP32Optimizer.reload_model_params = wrapper

class Mine(FP32Optimizer):
    def reload_model_params(self):
        pass
"""


def doctor(folder: Path, *arguments: str, code: int, prepare: str = PREPARE, **env: str) -> dict[str, Any]:
    """What `mcore-patch doctor --json` says."""
    script = f"{prepare}import sys\nfrom mcore_patch._cli import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--json", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_that_the_release_needs_is_patched_and_verified(tmp_path: Path) -> None:
    static = doctor(tmp_path, "--static", code=0, prepare="")
    live = doctor(tmp_path, code=0)
    line = ".".join(map(str, release()[:2]))
    assert static["line"] == live["line"] == line
    needed = {target.id for target in TARGETS.values() if target.checked or target.id in line_named(line).targets}
    assert {target["id"] for target in live["targets"] if target["state"] == "applied"} == needed
    assert {target["id"] for target in static["targets"] if target["state"] == "pending"} == needed
    assert {target["verdict"] for target in live["targets"] if target["id"] in needed} == {"verified"}
    assert live["advice"] == []


def test_what_others_do_is_told(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(FOREIGN)
    found = doctor(tmp_path, "--import", "pipeline", code=0)
    targets = {target["id"]: target for target in found["targets"]}
    assert targets["dist_load"]["holders"] == ["pipeline.load"]
    assert "pipeline.Mine" in targets["fp32_reload"]["overrides"]
    assert targets["fp32_reload"]["verdict"] == "unverified" or "pipeline" in targets["fp32_reload"]["wrappers"]
    assert any("before these import dist_load: pipeline.load" in sentence for sentence in found["advice"])


def test_what_is_switched_off_is_told(tmp_path: Path) -> None:
    off = doctor(tmp_path, code=1, MCORE_PATCH="0")
    assert {target["state"] for target in off["targets"]} <= {"off", "not-needed"}
    assert any("MCORE_PATCH=0" in sentence for sentence in off["advice"])
    one = doctor(tmp_path, code=1, MCORE_PATCH_DISABLE="dist_load")
    assert [target["id"] for target in one["targets"] if target["reason"] == "disabled"] == ["dist_load"]


@pytest.fixture
def verifying() -> Iterator[Session]:
    os.environ["MCORE_PATCH_VERIFY"] = "1"
    try:
        with Session() as session:
            yield session
    finally:
        del os.environ["MCORE_PATCH_VERIFY"]


@pytest.mark.parametrize("scenario", [Scenario(), Scenario(optimizer="plain", fmt="torch")], ids=str)
def test_masters_are_verified_on_every_rank(verifying: Session, scenario: Scenario) -> None:
    for rank, lines in enumerate(verifying.behave("log_lines", scenario)):
        [verified] = [(level, text) for level, text in lines if "verified" in text]
        assert verified[0] == "INFO"
        assert f"rank {rank}: reload_model_params: verified " in verified[1]
        assert "verified 0 masters" not in verified[1]
        assert verified[1].endswith(": 0 differ from their source")
