from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import wrapt
from engine_fakes import OPTIMIZER, SERIALIZATION, marking
from mcore_patch.compat import Quirks, ReleaseLine, Target

from mcore_patch._engine import patching
from mcore_patch._engine.gate import Reason, Verdict
from mcore_patch._engine.patching import Live, Record, inspect_live, install, restore

MODULE = "megatron.fake"
SIGNATURES = frozenset({"(state_dict, strict=)", "(self, value)", "(cls, scale)", "(value)", "(self, scale=)"})
LINE = ReleaseLine("0.19", (), (), "", True, "", Quirks(False, False), {})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The fakes in one module, which `megatron.user` and `user` have imported from."""
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    exec(SERIALIZATION + OPTIMIZER, vars(module))
    for name in ("megatron.user", "user"):
        user = types.ModuleType(name)
        user.borrowed = module.load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, user)
    return module


def look(module: types.ModuleType, qualname: str, **more: Any) -> tuple[Target, Live | Verdict]:
    target = Target(qualname, MODULE, qualname, "", "", "", **more)
    return target, inspect_live(module, target, SIGNATURES)


def patch(module: types.ModuleType, qualname: str, mark: str = "patched", **more: Any) -> Record:
    target, live = look(module, qualname, **more)
    assert isinstance(live, Live)
    return install(live, target, marking(mark)(live.function, LINE))


CALLS: dict[str, Callable[[Any], Any]] = {
    "load": lambda m: m.load({}),
    "Optimizer.step": lambda m: m.Child(3).step(2),
    "Optimizer.make": lambda m: m.Child.make(2),
    "Optimizer.check": lambda m: m.Child().check(2),
}


@pytest.mark.parametrize("qualname", CALLS)
def test_a_wrapper_sees_the_call_and_goes_without_a_trace(module: types.ModuleType, qualname: str) -> None:
    owners = [module, module.Base, module.Optimizer, module.Child]
    before = [dict(vars(owner)) for owner in owners]
    plain = CALLS[qualname](module)
    record = patch(module, qualname)
    assert CALLS[qualname](module) == ["patched", *plain]
    assert record.position == 0
    assert restore(record) == "restored"
    assert CALLS[qualname](module) == plain
    for owner, slots in zip(owners, before, strict=True):
        assert list(vars(owner)) == list(slots)
        assert all(vars(owner)[name] is value for name, value in slots.items())


def test_a_class_method_keeps_the_subclass(module: types.ModuleType) -> None:
    patch(module, "Optimizer.make")
    assert module.Child.make(1) == ["patched", "Child", 1]
    assert isinstance(vars(module.Optimizer)["make"], classmethod)


def test_aliases_in_megatron_follow_and_others_are_told(module: types.ModuleType) -> None:
    original = module.load
    vars(module)["alias"] = original
    record = patch(module, "load")
    assert set(record.aliases) == {"megatron.user.borrowed", f"{MODULE}.alias"}
    assert sys.modules["megatron.user"].borrowed is module.load
    assert sys.modules["user"].borrowed is original
    assert patching.holders_of(record) == ("user.borrowed",)
    vars(sys.modules["megatron.user"])["again"] = original
    assert patching.holders_of(record) == ("user.borrowed",), "outside megatron"
    del vars(sys.modules["megatron.user"])["again"]

    late = types.ModuleType("megatron.late")
    late.borrowed = module.load  # type: ignore[attr-defined]
    sys.modules["megatron.late"] = late
    try:
        restore(record)
    finally:
        del sys.modules["megatron.late"]
    assert module.load is module.alias is late.borrowed is sys.modules["megatron.user"].borrowed is original


def test_names_in_its_own_module_follow_outside_megatron_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("outside")
    monkeypatch.setitem(sys.modules, "outside", module)
    exec("def load(value): return [value]\nalias = load", vars(module))
    original = module.load
    target = Target("load", "outside", "load", "", "", "")
    live = inspect_live(module, target, SIGNATURES)
    assert isinstance(live, Live)
    record = install(live, target, marking("patched")(live.function, LINE))
    assert module.alias is module.load is not original
    assert record.aliases == ("outside.alias",)
    assert patching.holders_of(record) == ()
    assert patching.is_installed(record, target)
    assert restore(record) == "restored"
    assert module.alias is module.load is original
    assert not patching.is_installed(record, target)


def test_what_is_installed_is_looked_for_where_the_module_has_it_now(module: types.ModuleType) -> None:
    target = Target("method", MODULE, "Optimizer.step", "", "", "")
    record = patch(module, "Optimizer.step")
    assert patching.is_installed(record, target)
    held, module.Optimizer = module.Optimizer, type("Optimizer", (), {})  # type: ignore[attr-defined]
    assert not patching.is_installed(record, target)
    module.Optimizer = held  # type: ignore[attr-defined]
    restore(record)
    assert not patching.is_installed(record, target)
    assert record.active is False


@pytest.mark.parametrize("with_keywords", [False, True])
def test_a_proxy_in_a_class_is_called_bound(module: types.ModuleType, with_keywords: bool) -> None:
    seen: list[object] = []

    def theirs(wrapped: Any, instance: object, args: Any, kwargs: Any) -> Any:
        seen.append(instance)
        return ["theirs", *wrapped(*args, **kwargs)]

    stock = vars(module.Optimizer)["step"]
    owners: list[object] = []

    class Proxy(wrapt.FunctionWrapper):  # type: ignore[misc]
        def __get__(self, instance: object, owner: object) -> Any:
            owners.append(owner)
            return super().__get__(instance, owner)

    module.Optimizer.step = Proxy(stock, theirs)
    patch(module, "Optimizer.step")
    child = module.Child(3)
    assert (child.step(value=2) if with_keywords else child.step(2)) == ["patched", "theirs", "step", 6]
    assert (seen, owners[-1]) == ([child], module.Child)
    patched = vars(module.Optimizer)["step"]
    assert (patched.__name__, patched.__qualname__) == ("step", "Optimizer.step")
    assert inspect.unwrap(patched) is inspect.unwrap(stock)


def test_subclasses_with_a_method_of_their_own_are_told(module: types.ModuleType) -> None:
    other = type("Other", (module.Child,), {"step": lambda self, value: None, "__module__": "user"})
    record = patch(module, "Optimizer.step")
    assert patching.overrides_of(record) == ("user.Other",)
    assert patching.overrides_of(patch(module, "load")) == ()
    assert patching.holders_of(record) == ()
    del other


@pytest.mark.parametrize("qualname", CALLS)
def test_under_another_wrapper_ours_is_buried_and_does_nothing(module: types.ModuleType, qualname: str) -> None:
    plain = CALLS[qualname](module)
    record = patch(module, qualname)
    raw = vars(record.owner)[record.attribute]
    function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw

    @functools.wraps(function)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ["theirs", *function(*args, **kwargs)]

    slot = type(raw)(theirs) if isinstance(raw, classmethod | staticmethod) else theirs
    setattr(record.owner, record.attribute, slot)
    assert record.position == 1
    assert CALLS[qualname](module) == ["theirs", "patched", *plain]
    assert restore(record) == "buried"
    assert vars(record.owner)[record.attribute] is slot
    assert CALLS[qualname](module) == ["theirs", *plain]


def test_what_somebody_put_in_our_place_is_left_alone(module: types.ModuleType) -> None:
    record = patch(module, "load")
    theirs = module.load = lambda *args: "theirs"  # type: ignore[attr-defined]
    assert record.position is None
    assert restore(record) == "replaced"
    assert module.load is theirs


def _wrapped_elsewhere(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "qualname, change, reason",
    [
        ("Missing.step", None, Reason.ATTRIBUTE_MISSING),
        ("missing", None, Reason.ATTRIBUTE_MISSING),
        ("Child.step", None, Reason.INHERITED),
        ("Optimizer.inherited", None, Reason.INHERITED),
        ("Optimizer.missing", None, Reason.ATTRIBUTE_MISSING),
        ("Optimizer", None, Reason.NOT_A_FUNCTION),
        ("Optimizer.step", property(lambda self: 1), Reason.NOT_A_FUNCTION),
        ("Optimizer.step", functools.partial(print), Reason.NOT_A_FUNCTION),
        ("Optimizer.step", lambda self, value, more: 1, Reason.SIGNATURE_UNKNOWN),
    ],
)
def test_what_is_not_as_checked_is_left_alone(
    module: types.ModuleType, qualname: str, change: object, reason: Reason
) -> None:
    if change is not None:
        module.Optimizer.step = change
    _, verdict = look(module, qualname)
    assert isinstance(verdict, Verdict)
    assert (verdict.kind, verdict.reason) == ("skipped", reason)
    found = (
        "functools.partial" if isinstance(change, functools.partial) else f"builtins.{type(change or type).__name__}"
    )
    assert verdict.detail == {
        Reason.NOT_A_FUNCTION: f"found {found}, expected a function",
        Reason.SIGNATURE_UNKNOWN: "found the signature (self, value, more), expected (cls, scale) or (self, scale=) or "
        "(self, value) or (state_dict, strict=) or (value)",
    }.get(reason, f"expected {qualname} in the imported {MODULE}")


def test_a_signature_that_cannot_be_read_is_unknown(module: types.ModuleType) -> None:
    module.load.__signature__ = "nonsense"
    _, verdict = look(module, "load")
    assert isinstance(verdict, Verdict)
    assert (verdict.kind, verdict.reason) == ("skipped", Reason.SIGNATURE_UNKNOWN)
    assert verdict.detail.startswith("its signature cannot be read: ")


def test_a_function_from_elsewhere_is_told(module: types.ModuleType) -> None:
    def theirs(state_dict: Any, strict: Any = None) -> Any: ...

    _, live = look(module, "Optimizer.step")
    assert isinstance(live, Live)
    assert live.function is live.raw
    _, live = look(module, "load")
    assert isinstance(live, Live)
    assert live.foreign is None
    module.load = _wrapped_elsewhere(module.load)  # type: ignore[attr-defined]
    _, live = look(module, "load")
    assert isinstance(live, Live)
    assert live.foreign is None, "a decorator around the original is none"
    module.load = theirs  # type: ignore[attr-defined]
    _, live = look(module, "load")
    assert isinstance(live, Live)
    assert live.foreign == f"{theirs.__module__}:{theirs.__qualname__}"


def test_another_copy_of_the_package_does_not_wrap_again(module: types.ModuleType) -> None:
    record = patch(module, "load")
    already = Verdict("skipped", Reason.ALREADY_PATCHED, "another copy of mcore-patch has patched it")
    assert look(module, "load")[1] == already
    module.load = _wrapped_elsewhere(module.load)  # type: ignore[attr-defined]
    assert look(module, "load")[1] == already
    restore(record)
    assert isinstance(look(module, "load")[1], Live), "a wrapper that does nothing is no hindrance"


def test_the_wrapper_looks_like_the_original(module: types.ModuleType) -> None:
    original = module.load
    patch(module, "load")
    assert (module.load.__name__, module.load.__module__) == (original.__name__, original.__module__)
    assert inspect.signature(module.load) == inspect.signature(original)
    assert module.load.__wrapped__ is original


def test_parameters_that_a_release_lacks_show_in_the_signature(module: types.ModuleType) -> None:
    patch(module, "Optimizer.step", accepts_also=("extra", "value"))
    assert str(inspect.signature(module.Optimizer.step)) == "(self, value, extra=None)"
    assert module.Optimizer().step(1, extra=2) == ["patched", "step", 1]


def test_patched_things_pickle_and_copy(module: types.ModuleType) -> None:
    for qualname in CALLS:
        patch(module, qualname)
    for thing in (module.load, module.Optimizer.step, module.Optimizer.make, module.Optimizer.check):
        assert pickle.loads(pickle.dumps(thing)) == thing
        assert copy.deepcopy(thing) == thing
    optimizer = pickle.loads(pickle.dumps(module.Optimizer(3)))
    assert copy.deepcopy(optimizer).step(2) == ["patched", "step", 6]


def test_marks_of_the_compiler_are_not_inherited(module: types.ModuleType) -> None:
    module.load._torchdynamo_inline = module.load
    module.load.other = 1
    patch(module, "load")
    assert not hasattr(module.load, "_torchdynamo_inline")
    assert module.load.other == 1


def test_a_loop_of_wrapped_functions_ends(module: types.ModuleType) -> None:
    module.load.__wrapped__ = module.load
    assert isinstance(look(module, "load")[1], Verdict)
