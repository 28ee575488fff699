"""Puts a wrapper in place of a target and takes it out again, to identity.

What is installed is a plain function, not a wrapt proxy: `torch.compile` silently calls what lies under a
proxy, and a proxy can be neither pickled nor deep-copied. Slots are read with `vars()` and compared by
identity: `getattr` on a class unbinds class and static methods and walks into base classes, and proxies
delegate `==`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from mcore_patch.compat import Target

from .gate import Reason, Verdict, signature_detail
from .source import signature_of

Function = Callable[..., Any]
Owner = types.ModuleType | type

SENTINEL = "__mcore_patch__"
"""The attribute by which an installed wrapper is known, also to another copy of this package."""

Restored = Literal["restored", "buried", "replaced"]


@dataclass(frozen=True)
class Live:
    """A target as it is in the running process: where it is held, the slot as it is, the function in it."""

    owner: Owner
    attribute: str
    raw: object
    function: types.FunctionType
    foreign: str | None
    """Where the function comes from, if it is not the one in the target's source file."""


_active: dict[int, bool] = {}
"""Whether the wrapper of a record, by its number, does its work.

A global, because torch.compile reads it with a guard wherever the wrapper is called from. An object in the
wrapper's closure it cannot read at all in some places, and a plain value there it takes for a constant.
"""


@dataclass(eq=False)
class Record:
    """One installation."""

    owner: Owner
    attribute: str
    raw: object
    installed: object = None
    aliases: tuple[str, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def active(self) -> bool:
        """Read at every call of the wrapper: while False, it passes through."""
        return _active[self.number]

    @active.setter
    def active(self, active: bool) -> None:
        _active[self.number] = active

    @property
    def position(self) -> int | None:
        """How many wrappers of others lie on top of ours; None if ours is no longer reachable."""
        for index, held in enumerate(_chain(vars(self.owner).get(self.attribute))):
            if held is _function_in(self.installed):
                return index
        return None


def find_owner(module: types.ModuleType, qualname: str) -> tuple[Owner | None, str]:
    """Return what holds the target, a module or a class (None: no such class), and its name there."""
    *classes, attribute = qualname.split(".")
    owner: Owner = module
    for name in classes:
        inner = vars(owner).get(name)
        if not isinstance(inner, type):
            return None, attribute
        owner = inner
    return owner, attribute


def inspect_live(module: types.ModuleType, target: Target, signatures: frozenset[str]) -> Live | Verdict:
    """Look at the target in an imported module: what may be patched, or why it may not."""
    owner, attribute = find_owner(module, target.qualname)
    if owner is None or attribute not in vars(owner):
        inherited = isinstance(owner, type) and any(attribute in vars(base) for base in owner.__mro__)
        reason = Reason.INHERITED if inherited else Reason.ATTRIBUTE_MISSING
        return Verdict("skipped", reason, f"expected {target.qualname} in the imported {target.module}")
    raw = vars(owner)[attribute]
    for held in _chain(raw):
        mark = getattr(held, SENTINEL, None)
        if getattr(mark, "active", False):
            return Verdict("skipped", Reason.ALREADY_PATCHED, "another copy of mcore-patch has patched it")
    function = _function_in(raw)
    if not isinstance(function, types.FunctionType):  # a proxy around a function says that it is one
        detail = f"found {type(raw).__module__}.{type(raw).__qualname__}, expected a function"
        return Verdict("skipped", Reason.NOT_A_FUNCTION, detail)
    try:
        signature = signature_of(function)
    except (TypeError, ValueError) as error:
        return Verdict("skipped", Reason.SIGNATURE_UNKNOWN, f"its signature cannot be read: {error}")
    if signature not in signatures:
        return Verdict("skipped", Reason.SIGNATURE_UNKNOWN, signature_detail(signature, signatures))
    if isinstance(owner, type) and _is_proxy(raw):
        function = _calling(raw)
    innermost = inspect.unwrap(function)
    origin = f"{innermost.__module__}:{innermost.__qualname__}"
    return Live(owner, attribute, raw, function, None if origin == target.path else origin)


def install(live: Live, target: Target, wrapper: Function) -> Record:
    """Put `wrapper` in the target's slot, and in megatron's other names for a module-level function."""
    record = Record(live.owner, live.attribute, live.raw)
    record.active = True
    function = _closure(record, live.function, wrapper, target.accepts_also)
    slot_type = type(live.raw) if isinstance(live.raw, classmethod | staticmethod) else None
    record.installed = slot_type(function) if slot_type else function
    setattr(live.owner, live.attribute, record.installed)
    if isinstance(live.owner, types.ModuleType):
        record.aliases = _rebind(live.raw, record.installed, live.owner)
    return record


def is_installed(record: Record, target: Target) -> bool:
    """Whether the record's wrapper is reached through the module as it is imported now."""
    module = sys.modules.get(target.module)
    if module is None:
        return False
    owner, _ = find_owner(module, target.qualname)
    return owner is record.owner and record.position is not None


def restore(record: Record) -> Restored:
    """Take the wrapper out, exactly.

    With another wrapper on top it cannot be taken out: it stays, "buried", and passes every call through.
    Something else in the slot, "replaced", is left as it is.
    """
    record.active = False
    outermost = vars(record.owner).get(record.attribute) is record.installed
    if outermost:
        setattr(record.owner, record.attribute, record.raw)
    if isinstance(record.owner, types.ModuleType):
        _rebind(record.installed, record.raw, record.owner)
    if outermost:
        return "restored"
    return "buried" if record.position is not None else "replaced"


def holders_of(record: Record) -> tuple[str, ...]:
    """Return the names outside megatron that hold the unpatched function: `from x import f`, earlier."""
    if not isinstance(record.owner, types.ModuleType):
        return ()
    return tuple(
        f"{module_name}.{name}"
        for module_name, module in _modules()
        if not _is_megatron(module_name) and module is not record.owner
        for name, value in list(vars(module).items())
        if value is record.raw
    )


def overrides_of(record: Record) -> tuple[str, ...]:
    """Return the subclasses with a method of their own, which run the patched one only through `super()`."""
    if not isinstance(record.owner, type):
        return ()
    seen: set[type] = set()
    waiting: list[type] = type.__subclasses__(record.owner)
    while waiting:
        subclass = waiting.pop()
        if subclass not in seen:
            seen.add(subclass)
            waiting.extend(type.__subclasses__(subclass))
    return tuple(sorted(f"{c.__module__}.{c.__qualname__}" for c in seen if record.attribute in vars(c)))


def _closure(record: Record, original: Function, wrapper: Function, accepts_also: tuple[str, ...]) -> Function:
    number = record.number

    @functools.wraps(original)
    def installed(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs) if _active[number] else original(*args, **kwargs)

    # Copied from a target that is compiled itself, these make torch.compile skip the wrapper
    # (https://github.com/pytorch/pytorch/issues/172732).
    for name in [name for name in vars(installed) if name.startswith("_torchdynamo")]:
        delattr(installed, name)
    setattr(installed, SENTINEL, record)
    signature = inspect.signature(original)
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in accepts_also
        if name not in signature.parameters
    ]
    if added:
        parameters = [*signature.parameters.values(), *added]
        installed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return installed


def _is_proxy(slot: object) -> bool:
    return type(slot) is not types.FunctionType and isinstance(slot, types.FunctionType)


def _calling(proxy: Any) -> types.FunctionType:
    """Return a function that calls a proxy in a class as Python does, bound: wrapt's tell the instance by that."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return proxy.__get__(self, type(self))(*args, **kwargs)

    functools.update_wrapper(call, proxy)
    return cast(types.FunctionType, call)


def _function_in(slot: object) -> object:
    """Return the function in a class method or static method; anything else as it is.

    By type: a proxy around a class method says that it is one, and to look inside it is to walk past it.
    """
    return slot.__func__ if type(slot) in (classmethod, staticmethod) else slot  # type: ignore[attr-defined]


def _chain(slot: object) -> Iterator[object]:
    """Yield the function in a slot, then what it says it wraps, and so on."""
    seen: set[int] = set()
    held = _function_in(slot)
    while held is not None and id(held) not in seen:
        seen.add(id(held))
        yield held
        held = _function_in(getattr(held, "__wrapped__", None))


def _rebind(old: object, new: object, owner: types.ModuleType) -> tuple[str, ...]:
    """Rebind every name that holds `old` in its own module and in megatron's; return the names.

    Megatron's own `from .serialization import load` and the like. Modules are read through their `__dict__`:
    `hasattr` would trigger lazy ones.
    """
    rebound = []
    for module_name, module in _modules():
        if _is_megatron(module_name) or module is owner:
            names = [name for name, value in list(vars(module).items()) if value is old]
            for name in names:
                vars(module)[name] = new
            rebound += [f"{module_name}.{name}" for name in names]
    return tuple(rebound)


def _modules() -> list[tuple[str, types.ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType)]


def _is_megatron(module_name: str) -> bool:
    return module_name.partition(".")[0] == "megatron"
