"""What rarely happens to the engine: races that others win, specs of a user's own making, a torch half torn down."""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wrapt
from engine_fakes import FILES, TARGETS, WRAPPERS, make_engine, marking, write_tree

from mcore_patch._engine import Engine, examine, imports, logs
from mcore_patch._engine import engine as engine_module
from mcore_patch._engine.source import package_in
from mcore_patch._engine.versions import Versions

NAMES = ["megatron", "megatron.core", "megatron.core.optimizer", "megatron.core.optimizer.optimizer"]


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Its module, imported, in a megatron-core 0.19 without sources."""
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core"].__version__ = "0.19.0"  # type: ignore[attr-defined]
    module = sys.modules[NAMES[-1]]
    exec(FILES["megatron/core/optimizer/optimizer.py"], vars(module))
    return module


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = make_engine(tmp_path)
    yield engine
    engine.revert()


def test_somebody_else_who_patches_while_a_wrapper_is_made_is_not_lost(
    tmp_path: Path, optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []

    def slow(original: Any, line: Any) -> Any:
        assert line.name == "0.19"
        made.append(original)
        if len(made) == 1:
            optimizer.Optimizer.step = lambda self, value: ["theirs", value]
        return marking("patched")(original, line)

    caplog.set_level(logging.DEBUG, logs.LOGGER.name)
    engine = make_engine(tmp_path, {**WRAPPERS, "method": slow})
    assert engine.apply(disable=["method"])["method"].state == "off"
    assert made == []
    assert engine.apply()["method"].state == "applied"
    assert len(made) == 2
    assert not [record for record in caplog.records if record.exc_info]
    assert optimizer.Optimizer().step(1) == ["patched", "theirs", 1]
    engine.revert()


def test_a_revert_while_a_wrapper_is_made_wins(tmp_path: Path, optimizer: Any) -> None:
    engines: list[Engine] = []

    def slow(original: Any, line: Any) -> Any:
        engines[0].revert()
        return marking("patched")(original, line)

    engines.append(make_engine(tmp_path, {**WRAPPERS, "method": slow}))
    before = vars(optimizer.Optimizer)["step"]
    assert engines[0].apply()["method"].state in ("off", "reverted")
    assert vars(optimizer.Optimizer)["step"] is before


def test_a_choice_while_a_wrapper_is_made_wins(tmp_path: Path, optimizer: Any) -> None:
    engines: list[Engine] = []

    def slow(original: Any, line: Any) -> Any:
        engines[0].apply(disable=["method"])
        return marking("patched")(original, line)

    engines.append(make_engine(tmp_path, {**WRAPPERS, "method": slow}))
    before = vars(optimizer.Optimizer)["step"]
    assert engines[0].apply()["method"].state == "off"
    assert vars(optimizer.Optimizer)["step"] is before
    engines[0].revert()


def test_every_module_is_waited_for_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(engine_module, "when_imported", lambda name, callback: waited.append(name))
    for _ in range(3):
        engine.apply()
        engine.revert()
    assert waited == sorted({"megatron.core", *(target.module for target in TARGETS.values())})


def test_the_gate_is_asked_again_only_when_the_version_has_changed(engine: Engine, optimizer: Any) -> None:
    decision = engine._decide()
    assert engine._decide() is decision
    sys.modules["megatron.core"].__version__ = "0.18.0"  # type: ignore[attr-defined]
    assert engine._decide().versions.stated == "0.18.0"
    assert engine.status().line == "0.18"


def test_a_module_that_is_gone_from_sys_modules_is_not_patched_any_more(engine: Engine, optimizer: Any) -> None:
    assert engine.apply()["method"].state == "applied"
    del sys.modules[NAMES[-1]]
    assert engine.status()["method"].reason == "replaced"
    sys.modules[NAMES[-1]] = optimizer


def test_a_tree_and_a_wheel_are_judged_without_being_installed(
    engine: Engine, tmp_path: Path, optimizer: object
) -> None:
    decision = engine.examine(package_in(write_tree(tmp_path / "tree")))
    assert {verdict.kind for verdict in decision.verdicts.values()} == {"verified"}
    assert decision.versions == Versions(package_info="0.19.2")


def test_an_unknown_id_is_an_error(engine: Engine) -> None:
    status = engine.status()
    assert [target.id for target in status.targets] == list(TARGETS)
    with pytest.raises(KeyError, match="nonsense"):
        status["nonsense"]


def test_a_half_imported_module_with_a_spec_of_its_own_making_is_patched_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("of_its_own_making")
    module.__spec__ = SimpleNamespace(_initializing=True, name=module.__name__)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    seen: list[types.ModuleType] = []
    imports.when_imported(module.__name__, seen.append)
    assert seen == [module]


def test_an_import_may_end_twice() -> None:
    imports._finish(importlib.machinery.ModuleSpec("ended", None))


@pytest.mark.parametrize("value, off", [("0", True), ("False", True), (" off ", True), ("1", False), ("", False)])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, engine: Engine, value: str, off: bool) -> None:
    monkeypatch.setenv("MCORE_PATCH", value)
    assert engine.apply().active is not off


def test_a_callback_that_fails_is_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def fails(module: types.ModuleType) -> None:
        raise ValueError(module.__name__)

    imports.when_imported("json", fails)
    (record,) = caplog.records
    assert record.getMessage() == "mcore-patch failed in the import hook of json"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "json"


def test_a_module_is_finished_when_its_spec_says_so_or_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_module")
    assert imports.finished_module("some_module") is None
    monkeypatch.setitem(sys.modules, "some_module", module)
    assert imports.finished_module("some_module") is module
    spec = module.__spec__ = importlib.machinery.ModuleSpec("some_module", None)
    assert imports.finished_module("some_module") is module
    spec._initializing = True  # type: ignore[attr-defined]
    assert imports.finished_module("some_module") is None


def test_a_failed_import_is_waited_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "import sys\nfrom mcore_patch._engine import imports\nimports.when_imported(__name__, sys.seen.append)\n"
    seen: list[types.ModuleType] = []
    monkeypatch.setattr(sys, "seen", seen, raising=False)
    (tmp_path / "fails_once.py").write_text(source + "if not sys.passes: raise ImportError\n")
    monkeypatch.setattr(sys, "passes", False, raising=False)
    with pytest.raises(ImportError):
        importlib.import_module("fails_once")
    assert seen == []
    assert not imports._unfinished
    monkeypatch.setattr(sys, "passes", True)
    module = importlib.import_module("fails_once")
    assert seen == [module] * 2
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    del sys.modules["fails_once"]


def test_a_module_whose_import_ends_while_it_is_looked_at_is_called_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends(types.ModuleType):
        """Its import ends between two looks at its spec."""

    module = Ends("ends_meanwhile")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    answers = iter([True, False])
    monkeypatch.setattr(imports, "_is_half_imported", lambda _: next(answers))
    seen: list[types.ModuleType] = []
    imports.when_imported(module.__name__, seen.append)
    assert seen == [module]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec


def test_a_wrapt_that_cannot_wait_twice_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(wrapt, "register_post_import_hook", refuse)
    caplog.set_level(logging.DEBUG, logs.LOGGER.name)
    imports.when_imported("json", lambda _: None)
    assert caplog.messages == ["cannot wait for the next import of json: call apply() after it"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_the_process_group_speaks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "7")
    assert logs.speaks() is (rank == 0)


@pytest.mark.parametrize("available, initialized", [(False, True), (False, False), (True, False)])
def test_without_a_process_group_the_environment_says_who_speaks(
    monkeypatch: pytest.MonkeyPatch, available: bool, initialized: bool
) -> None:
    distributed = SimpleNamespace(
        is_available=lambda: available, is_initialized=lambda: initialized, get_rank=lambda: 1
    )
    for module in (distributed, None):
        monkeypatch.setitem(sys.modules, "torch.distributed", module)  # type: ignore[arg-type]
        monkeypatch.delenv("RANK", raising=False)
        assert logs.speaks()
        monkeypatch.setenv("RANK", "1")
        assert not logs.speaks()


def test_a_torch_that_is_half_imported_or_torn_down_leaves_it_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())  # type: ignore[arg-type]
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert logs.speaks() is (rank == "0")


def test_a_folder_without_megatron_core_cannot_be_examined(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found no megatron/core"):
        examine(tmp_path)
