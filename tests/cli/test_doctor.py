"""`mcore-patch doctor` on trees of a few lines. On real releases: tests/releases/test_doctor.py."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import write_tree
from mcore_patch.compat import LINES, TARGETS

from mcore_patch._cli.doctor import ADVICE
from mcore_patch._engine import Reason

Python = Callable[..., "subprocess.CompletedProcess[str]"]

KEYS = [
    *("mode", "megatron_core", "line", "reason", "detail", "notes", "targets", "error", "schema", "exit_code"),
    *("native", "advice", "versions", "environment"),
]
TARGET_KEYS = [
    *("id", "target", "state", "verdict", "reason", "detail", "needed", "position", "wrappers", "aliases", "holders"),
    *("overrides", "module_error"),
]

NEWEST = tuple(int(part) for part in LINES[-1].releases[-1].split("."))


def examined(command: Python, *arguments: str, code: int, **env: str) -> dict[str, Any]:
    """What doctor --json says, which ends with `code`."""
    done = command("doctor", "--json", *arguments, **env)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found) == KEYS
    assert found["exit_code"] == code
    assert all(list(target) == TARGET_KEYS for target in found["targets"])
    text = command("doctor", *arguments, **env)
    assert text.returncode == code
    assert all(sentence in text.stdout for sentence in found["advice"])
    return found


def test_every_reason_has_an_advice_or_needs_none() -> None:
    assert set(Reason) - set(ADVICE) == {Reason.NOT_IN_LINE}


def test_targets_that_are_missing_are_named(tmp_path: Path, command: Python) -> None:
    tree = write_tree(tmp_path / "tree", (*NEWEST, ""))
    found = examined(command, "--static", str(tree), code=1)
    assert (found["mode"], found["line"], found["error"]) == ("static", LINES[-1].name, None)
    assert found["megatron_core"]["stated"] == LINES[-1].releases[-1]
    by_id = {target["id"]: target for target in found["targets"]}
    assert list(by_id) == list(TARGETS)
    assert by_id["torch_dist_load"]["reason"] == "module-missing"
    assert by_id["dist_load"]["reason"] == "signature-unknown"
    assert "NOT OK" in command("doctor", "--static", str(tree)).stdout


def test_a_wheel_file_is_read_like_a_tree(tmp_path: Path, command: Python) -> None:
    tree = write_tree(tmp_path / "tree", (*NEWEST, ""))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for path in tree.rglob("*.py"):
            wheel.write(path, path.relative_to(tree))
    of_tree, of_wheel = (examined(command, "--static", name, code=1) for name in (str(tree), "a.whl"))
    assert of_wheel["targets"] == of_tree["targets"]


@pytest.mark.parametrize("version, reason", [((0, 99, 0, ""), "release-newer"), ((0, 3, 0, ""), "release-older")])
def test_a_release_that_is_not_covered(
    version: tuple[int, int, int, str], reason: str, tmp_path: Path, command: Python
) -> None:
    tree = write_tree(tmp_path / "tree", version)
    found = examined(command, "--static", str(tree), code=1)
    assert (found["line"], found["reason"]) == (None, reason)
    assert found["advice"] == [ADVICE[Reason(reason)]]


def test_nothing_to_examine(tmp_path: Path, command: Python) -> None:
    (tmp_path / "no.whl").write_text("no wheel")
    for path in ("missing", "no.whl", "."):
        assert examined(command, "--static", path, code=2)["error"].startswith(path)


def test_without_torch(tmp_path: Path, command: Python) -> None:
    write_tree(tmp_path / "site", (*NEWEST, ""))
    (tmp_path / "site" / "torch.py").write_text("raise ImportError('no torch here')")
    assert examined(command, "--static", code=1)["error"] is None
    found = examined(command, code=2)
    assert found["error"] == "cannot import torch: ImportError: no torch here"
    assert found["mode"] == "static"
    assert len(found["targets"]) == len(TARGETS)


def test_a_module_that_cannot_be_imported(tmp_path: Path, command: Python) -> None:
    found = examined(command, "--import", "missing_module", code=2)
    assert "No module named 'missing_module'" in found["error"] or "torch" in found["error"]


def test_environment_variables_are_told(tmp_path: Path, command: Python) -> None:
    tree = write_tree(tmp_path / "tree", (*NEWEST, ""))
    found = examined(command, "--static", str(tree), code=1, MCORE_PATCH_VERIFY="1")
    assert found["environment"] == {"MCORE_PATCH_VERIFY": "1"}


@pytest.mark.parametrize(
    "variable, value, off, reason",
    [
        ("MCORE_PATCH", "0", {"module_apply", "module_leaf_load"}, None),
        ("MCORE_PATCH_DISABLE", "module_apply", {"module_apply"}, "disabled"),
        ("MCORE_PATCH_ONLY", "module_apply", {"module_leaf_load"}, "disabled"),
    ],
)
def test_static_heeds_what_the_environment_switches_off(
    variable: str, value: str, off: set[str], reason: str | None, tmp_path: Path, command: Python
) -> None:
    tree = write_tree(tmp_path / "tree", (*NEWEST, ""))
    found = examined(command, "--static", str(tree), code=1, **{variable: value})
    states = {target["id"]: (target["state"], target["reason"]) for target in found["targets"]}
    two = {"module_apply", "module_leaf_load"}
    assert {each: states[each] for each in two} == {
        each: ("off", reason) if each in off else ("pending", None) for each in two
    }
    assert any(f"{variable}" in sentence for sentence in found["advice"])
