"""docs/what-was-run.md: what reports of test runs become."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

SUITE = """
import pytest

@pytest.fixture(autouse=True)
def _scenario(record_testsuite_property, record_property, optimizer):
    record_testsuite_property("torch", "2.1.2")
    yield
    record_property("optimizer", optimizer)
    record_property("format", "zarr")

@pytest.mark.parametrize("optimizer", ["plain", "muon", "offload"])
@pytest.mark.parametrize("case", [1, 2, 3])
def test_masters_win(optimizer, case):
    if optimizer == "muon":
        pytest.skip("emerging-optimizers is not installed")
    if case == 2:
        pytest.skip("zarr has gone in 0.16")
    assert optimizer == "plain" or case == 1
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("ran", SCRIPTS / "ran.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ran", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("generate", None)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report of a run on 0.14.0, as pytest writes it."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "test_suite.py").write_text(SUITE)
    report = tmp_path / "py311-mcore0.14.0.xml"
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-o", "junit_family=legacy", f"--junitxml={report}"]
    assert pytest.main([str(tmp_path / "test_suite.py"), *options]) == pytest.ExitCode.TESTS_FAILED
    return tmp_path


def test_a_report_becomes_rows_by_behaviour_optimizer_and_format(
    script: ModuleType, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "FACTS", reports / "ran.json")
    monkeypatch.setattr(script, "TABLE", reports / "what-was-run.md")
    monkeypatch.setattr(sys, "argv", ["ran.py", str(reports)])
    assert script.main() == 1, "a test failed"
    page = (reports / "what-was-run.md").read_text()
    assert page == script.page(script.read()), "what is kept makes the same page"
    assert "| masters win | plain | zarr | 2 b |" in page
    assert "| masters win | muon | zarr | (a) |" in page
    assert "| masters win | offload | zarr | **1 FAILED**, 1 b |" in page
    assert "* a: emerging-optimizers is not installed\n* b: zarr has gone in 0.16\n" in page
    assert "| 2.1.2 |" in page
    assert script.text(script.read()) == (reports / "ran.json").read_text()


def test_the_wide_run_of_a_release_is_shown_rather_than_the_everyday_one(script: ModuleType) -> None:
    def environment(passed: int) -> object:
        return script.Environment("2026-12-01", {}, {"m | a behaviour | plain | torch": script.Cell(passed)})

    ran = {"py311-mcore0.14.0-wide": environment(7), "py311-mcore0.14.0": environment(1)}
    assert "| a behaviour | plain | torch | 7 |" in script.page(ran)


def test_the_page_is_that_of_the_runs_that_were_kept(script: ModuleType) -> None:
    assert script.TABLE.read_text() == script.page(script.read()), "run python scripts/generate.py"
