"""What the engine tells, word for word: whoever changes it sees what a user reads then."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FILES, WRAPPERS, make_engine, write_tree
from mcore_patch.compat import Checked, Target

from mcore_patch._engine import LOGGER, Engine, PatchError, Status, TargetStatus, versions

METHOD = "megatron.core.optimizer.optimizer"
FUNCTION = "megatron.core.dist_checkpointing.serialization"
NAMES = [METHOD.rpartition(".")[0], FUNCTION.rpartition(".")[0], METHOD, FUNCTION, "megatron", "megatron.core"]


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A megatron-core 0.19.2, imported and with sources; the module of its optimizer."""
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    core: Any = sys.modules["megatron.core"]
    core.__path__ = [str(write_tree(tmp_path / "site") / "megatron" / "core")]
    for name in (METHOD, FUNCTION):
        exec(FILES[f"{name.replace('.', '/')}.py"], vars(sys.modules[name]))
    return sys.modules[METHOD]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    for name in ("MCORE_PATCH", "MCORE_PATCH_DISABLE", "MCORE_PATCH_ONLY", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(versions, "_metadata", lambda: None)
    engines: list[Engine] = []

    def make(*arguments: Any, **more: Target) -> Engine:
        engines.append(make_engine(tmp_path / "scratch", *arguments, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.revert()


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, megatron: object) -> Any:
    """A module outside megatron that has imported `load`, as megatron's own package has."""
    user: Any = types.ModuleType("user")
    monkeypatch.setitem(sys.modules, "user", user)
    user.borrowed = vars(sys.modules[FUNCTION.rpartition(".")[0]])["load"] = vars(sys.modules[FUNCTION])["load"]
    return user


def _theirs(self: object, value: object) -> object: ...


def tried(engine: Engine) -> Status:
    status = engine.apply()
    engine.revert()
    return status


def _other_step(texts: dict[str, str]) -> None:
    name = f"{METHOD.replace('.', '/')}.py"
    texts[name] = texts[name].replace("def step(self, value)", "def step(self, value, more)")


class Story:
    """What is said, in order: the engine's status and its log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, LOGGER.name)
        self._caplog = caplog
        self._lines: list[str] = []

    def tell(self, title: str, status: Status | None = None) -> None:
        """Add what was logged since the last time, and all of a status that is not what it is by default."""
        self._lines += ["", f"{title}:"]
        for record in self._caplog.records:
            error = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            self._lines.append(f"{record.levelname} {record.getMessage()}{error}")
        self._caplog.clear()
        if status is not None:
            line = f"active={status.active!r}, line={status.line}, reason={_text(status.reason)}"
            self._lines += [status.summary(), line, str(status.versions), repr(status.detail), *status.notes]
            self._lines += [f"problem: {problem}" for problem in status.problems]
            self._lines += [_target(target) for target in status.targets]

    def compare(self, name: str, folder: Path) -> None:
        """Assert that it is the story that is kept, and leave the new one in `folder`."""
        text = "\n".join(self._lines[1:]) + "\n"
        (folder / name).write_text(text)
        assert text == (Path(__file__).with_name("told") / name).read_text(), f"if it is meant, keep {folder / name}"


def _target(target: TargetStatus) -> str:
    default = TargetStatus(target.id, target.target, "off")
    values = {each.name: getattr(target, each.name) for each in fields(target)}
    said = [f"{name}={_text(value)}" for name, value in values.items() if value != getattr(default, name)]
    return "  ".join([target.id, *said])


def _text(value: object) -> str:
    return value.value if isinstance(value, Enum) else str(value)


@pytest.fixture
def story(caplog: pytest.LogCaptureFixture) -> Story:
    return Story(caplog)


def test_targets_are_told_in_every_state(
    megatron: Any, user: Any, make: Callable[..., Engine], story: Story, tmp_path: Path
) -> None:
    own = type("Own", (megatron.Optimizer,), {"step": _theirs, "__module__": "user"})
    engine = make()
    story.tell("before", engine.status())
    story.tell("applied", engine.apply())
    story.tell("applied once more", engine.apply())
    ours = megatron.Optimizer.step
    megatron.Optimizer.step = functools.wraps(ours)(lambda self, value: ours(self, value))
    story.tell("under another's wrapper", engine.status())
    story.tell("reverted", engine.revert())
    story.tell("without one", engine.apply(disable=["class_method"]))
    story.tell("not thorough", engine.status(thorough=False))
    megatron.Optimizer.step = _theirs
    story.tell("replaced", engine.status())
    story.tell("only one", engine.apply(only=["method"]))
    story.tell("unknown", engine.apply(only=["methods", "method"], disable=["x"]))
    assert issubclass(own, megatron.Optimizer)
    story.compare("states.txt", tmp_path)


def test_what_is_not_patched_is_told_with_the_reason(
    megatron: Any,
    make: Callable[..., Engine],
    story: Story,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> Any:
        raise OSError("no such thing")

    monkeypatch.delitem(sys.modules, FUNCTION)
    more = {
        "gone": Target("gone", "megatron.core.gone", "f", "", "", ""),
        "outside": Target("outside", "json", "dumps", "", "", "", checked=Checked(("(obj)",)), needed=False),
        "late": Target("late", "nowhere", "f", "", "", "", checked=Checked(("()",))),
    }
    engine = make({**WRAPPERS, "method": failing}, **more)
    story.tell("before", engine.status())
    story.tell("applied", engine.apply())
    with pytest.raises(PatchError) as raised:
        engine.apply(strict=True)
    story.tell(f"strict: {raised.value}")
    monkeypatch.setenv("MCORE_PATCH", " OFF ")
    story.tell("switched off", engine.apply())
    monkeypatch.delenv("MCORE_PATCH")
    for version in ((0, 18, 0, ""), (0, 20, 0, "rc1")):
        write_tree(tmp_path / "site", version)
        story.tell(str(version), tried(make()))
    write_tree(tmp_path / "site", edit=_other_step)
    story.tell("another signature in the source than alive", tried(make()))
    monkeypatch.delattr(sys.modules["megatron.core"], "__path__")
    vars(sys.modules["megatron.core"])["__version__"] = "0.19.0"
    story.tell("without sources", tried(make()))
    monkeypatch.setenv("RANK", "1")
    story.tell("on another rank", tried(make()))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    story.tell("absent", tried(make()))
    monkeypatch.setattr(engine, "_decide", failing)
    story.tell("broken", engine.status())
    story.compare("reasons.txt", tmp_path)
