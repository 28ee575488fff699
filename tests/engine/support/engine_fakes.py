"""A megatron-core of a few lines, its registry, and an engine over both. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_patch.compat import Checked, Quirks, ReleaseLine, Target

from mcore_patch._engine import Engine
from mcore_patch._engine.engine import Factory
from mcore_patch._engine.source import find_target, package_in

PACKAGE_INFO = """\
MAJOR = {0}
MINOR = {1}
PATCH = {2}
PRE_RELEASE = "{3}"
raise SystemExit("package_info must be read, not imported")
"""

SERIALIZATION = """\
def load(state_dict, strict=None):
    return ["load", state_dict]
"""

OPTIMIZER = """\
import functools


def timed(function):
    @functools.wraps(function)
    def timing(*args, **kwargs):
        return function(*args, **kwargs)
    return timing


class Base:
    def inherited(self):
        return ["inherited"]


class Optimizer(Base):
    def __init__(self, scale=1):
        self.scale = scale

    @timed
    def step(self, value):
        return ["step", self.scale * value]

    @classmethod
    def make(cls, scale):
        return [cls.__name__, scale]

    @staticmethod
    def check(value):
        return ["check", value]


class Child(Optimizer):
    pass
"""

FILES = {
    "megatron/core/__init__.py": "",
    "megatron/core/dist_checkpointing/__init__.py": "from .serialization import load\n",
    "megatron/core/dist_checkpointing/serialization.py": SERIALIZATION,
    "megatron/core/optimizer/__init__.py": "from .optimizer import Optimizer\n",
    "megatron/core/optimizer/optimizer.py": OPTIMIZER,
}

OLDER_FILES = {
    **FILES,
    "megatron/core/optimizer/optimizer.py": OPTIMIZER.replace("self.scale * value", "value").replace(
        '["check", value]', '["check", (value)]'
    ),
}


def write_tree(
    root: Path,
    version: tuple[int, int, int, str] | None = (0, 19, 2, ""),
    files: Mapping[str, str] = FILES,
    edit: Callable[[dict[str, str]], None] | None = None,
) -> Path:
    """Write the package below `root`, its texts edited by `edit`; without a version, none is stated."""
    texts = dict(files)
    if version is not None:
        texts["megatron/core/package_info.py"] = PACKAGE_INFO.format(*version)
    if edit is not None:
        edit(texts)
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _target(id: str, module: str, qualname: str, **more: Any) -> Target:
    return Target(id, f"megatron.core.{module}", qualname, why="", url="", until="", **more)


TARGETS = {
    target.id: target
    for target in (
        _target("function", "dist_checkpointing.serialization", "load", accepts_also=("extra",)),
        _target("method", "optimizer.optimizer", "Optimizer.step"),
        _target("class_method", "optimizer.optimizer", "Optimizer.make"),
        _target("static_method", "optimizer.optimizer", "Optimizer.check"),
    )
}


def read_line(name: str, release: str, root: Path) -> ReleaseLine:
    """Make a release line from a tree, as scripts/release_line.py does."""
    checks = {}
    for target in TARGETS.values():
        found = find_target(package_in(root), target.module, target.qualname)
        assert found.signature is not None
        assert found.fingerprint is not None
        checks[target.id] = Checked((found.signature,), {found.fingerprint: (release,)})
    return ReleaseLine(name, (release,), ("3.11",), "", True, "nothing", Quirks(False, False), checks)


def make_lines(scratch: Path) -> tuple[ReleaseLine, ReleaseLine]:
    """Return the lines 0.18, whose `step` and `check` differ, and 0.19."""
    older = write_tree(scratch / "older", files=OLDER_FILES)
    newer = write_tree(scratch / "newer")
    return read_line("0.18", "0.18.0", older), read_line("0.19", "0.19.2", newer)


def marking(mark: str) -> Factory:
    """Return a wrapper factory: the wrapped call's list gets `mark` in front."""

    def factory(original: Callable[..., Any], line: ReleaseLine) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("extra", None)
            return [mark, *original(*args, **kwargs)]

        return wrapper

    return factory


WRAPPERS: dict[str, Factory] = {target_id: marking("patched") for target_id in TARGETS}


def make_engine(scratch: Path, wrappers: Mapping[str, Factory] = WRAPPERS, **more: Target) -> Engine:
    """Return an engine over the fakes; `more` adds or replaces targets."""
    return Engine({**TARGETS, **more}, make_lines(scratch), lambda: wrappers)


def snapshot() -> dict[str, object]:
    """Return the identity of everything that patching may touch, by name. Imports the fake megatron."""
    import megatron.core.dist_checkpointing as package
    import megatron.core.dist_checkpointing.serialization as serialization
    from megatron.core.optimizer import optimizer

    slots = {
        f"{owner.__name__}.{name}": value
        for owner in (package, serialization, optimizer, optimizer.Base, optimizer.Optimizer, optimizer.Child)
        for name, value in vars(owner).items()
        if not name.startswith("__") or name == "__init__"
    }
    return {name: id(value) for name, value in slots.items()}


def depth(function: Any) -> int:
    """Return how many of our wrappers lie on a function."""
    count = 0
    while function is not None:
        function = getattr(function, "__func__", function)
        count += "__mcore_patch__" in vars(function)
        function = getattr(function, "__wrapped__", None)
    return count
