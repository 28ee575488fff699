"""The gate on the builds of docs/survey.json: pre-releases, yanked releases, branches. Read once, judged here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from mcore_patch.compat import LINES, TARGETS

from mcore_patch._engine.gate import Reason, known_signatures

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("survey", ROOT / "scripts" / "survey.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["survey"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
SURVEY = SCRIPT.read()

# Judged by reading the code: what its targets are, whatever the version says.
LINE_OF = {
    "0.12.0rc2": "0.12",
    "0.13.0rc0": "0.13",
    "0.14.0rc0": "0.14",
    "0.15.0rc7": "0.15",
    "0.16.0rc0.dev100093": "0.15",  # zarr is still there, and loads are as in 0.15
    "0.16.0rc0.dev132550": "0.15",
    "0.17.0rc0": "0.17",
    "0.18.1": "0.18",
    "0.19.1": "0.19",
    "branch core_dev_r0.15.0": "0.15",  # calls itself 0.16.0rc0
    "tag core_v0.19.0": "0.19",  # calls itself 0.19.1
    "main of 2024-05-15, 4e74a3cca": "0.7",  # calls itself 0.8.0rc0
    "main of 2025-01-15, c1cafa1c1": "0.11",  # calls itself 0.10.0rc0
    "main of 2026-01-15, 55422734e": "0.16",
}


def test_the_table_is_what_the_gate_says_today() -> None:
    assert SCRIPT.TABLE.read_text() == SURVEY.table(), "run python scripts/survey.py"


@pytest.mark.parametrize("name", LINE_OF)
def test_the_line_is_that_of_the_code(name: str) -> None:
    line = SURVEY.decision(name).line
    assert line is not None
    assert line.name == LINE_OF[name]


@pytest.mark.parametrize("name", SURVEY.builds)
def test_nothing_is_applied_to_a_signature_that_was_not_checked(name: str) -> None:
    build, decision = SURVEY.builds[name], SURVEY.decision(name)
    for target_id, verdict in decision.verdicts.items():
        signature = SURVEY.signatures.get(build.targets[target_id])
        if verdict.may_apply:
            assert signature in known_signatures(TARGETS[target_id], LINES)
        elif verdict.kind == "not-needed":
            assert signature is None, "the build has what its line does not"


def test_a_commit_on_the_way_to_the_next_line_has_the_targets_of_both() -> None:
    verdicts = SURVEY.decision("main of 2026-01-15, 55422734e").verdicts
    assert verdicts["tensorstore_load"].detail == "as in megatron-core 0.15"
    assert verdicts["layer_wise_init"].kind == "verified"


def test_what_is_too_old_or_too_new_is_refused() -> None:
    assert SURVEY.decision("branch core_r0.5.0").reason is Reason.RELEASE_OLDER
    newer = SURVEY.decision("branch main")
    assert newer.reason is Reason.RELEASE_NEWER
    assert "0.20.0" in newer.detail


def test_a_sample_has_the_ends_of_every_series_and_the_yanked_ones() -> None:
    versions = [*(f"0.15.0rc{index}" for index in range(9)), "0.15.0", "0.18.1", "0.19.1", "0.19.2"]
    assert SCRIPT.spread(versions, 4) == ["0.15.0rc0", "0.15.0rc8", "0.18.1", "0.19.1"]
    assert SCRIPT.spread(versions, 5) == ["0.15.0rc0", "0.15.0rc4", "0.15.0rc8", "0.18.1", "0.19.1"]
    assert len(SCRIPT.spread(versions, 99)) == 11
