"""The engine as a whole, in fresh interpreters: what it does depends on the order of imports."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_fakes import write_tree

RunPython = Callable[..., str]

SETUP = """
import logging, sys, threading
from engine_fakes import TARGETS, WRAPPERS, depth, make_engine, marking, snapshot
from mcore_patch._engine import PatchError
engine = make_engine(scratch)
def states(status=None):
    return {target.id: target.state for target in (status or engine.status()).targets}
def everything(state):
    return dict.fromkeys(TARGETS, state)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "site")


@pytest.fixture
def run(run_python: RunPython, site: Path) -> RunPython:
    def run(code: str, **env: str) -> str:
        lines = code.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        return run_python(SETUP + "\n".join(line[indent:] for line in lines), **env)

    return run


ORDERS = sorted(set(itertools.permutations(["import", "apply", "apply", "revert", "revert"])))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_of_import_apply_and_revert_ends_where_its_last_step_says(
    run: RunPython, order: tuple[str, ...]
) -> None:
    run(
        f"""
        import importlib.util
        active = imported = False
        for step in {order!r}:
            if step == "import":
                import megatron.core.dist_checkpointing, megatron.core.optimizer
                imported = True
            elif step == "apply":
                engine.apply()
                active = True
            else:
                engine.revert()
                active = False
            found = states()
            if active:
                assert found == everything("applied" if imported else "pending"), (step, found)
            else:
                assert set(found.values()) <= {{"off", "reverted"}}, (step, found)
        from megatron.core.dist_checkpointing import load
        from megatron.core.optimizer import Optimizer
        slots = [load, vars(Optimizer)["step"], vars(Optimizer)["make"], vars(Optimizer)["check"]]
        assert [depth(slot) for slot in slots] == [int(active)] * 4
        assert load({{}}) == ["patched"] * active + ["load", {{}}]
        """
    )


# With the import last there is nothing left to be concurrent with.
CONCURRENT = [order for order in ORDERS if order[-1] != "import"]


@pytest.mark.parametrize("order", CONCURRENT, ids="-".join)
def test_any_order_holds_while_another_thread_imports(run: RunPython, site: Path, order: tuple[str, ...]) -> None:
    optimizer = site / "megatron/core/optimizer/optimizer.py"
    optimizer.write_text(optimizer.read_text() + "\nimport pause\npause.here()\n")
    (site / "pause.py").write_text(
        "import threading\nreached, go = threading.Event(), threading.Event()\n"
        "def here():\n    reached.set()\n    assert go.wait(60)\n"
    )
    run(
        f"""
        import importlib, pause
        import megatron.core.dist_checkpointing.serialization as serialization
        engine.revert()
        optimizers = ["method", "class_method", "static_method"]
        importer = threading.Thread(target=importlib.import_module, args=("megatron.core.optimizer",))
        active = importing = False
        for step in {order!r}:
            if step == "import":
                importer.start()
                assert pause.reached.wait(60)
                importing = True
            elif step == "apply":
                engine.apply()
                active = True
            else:
                engine.revert()
                active = False
            found = states()
            assert depth(serialization.load) == active
            for name in optimizers:  # half-imported is not imported
                assert found[name] in (("pending",) if active else ("off", "reverted")), (step, found)
        pause.go.set()
        importer.join()
        from megatron.core.optimizer import Optimizer
        found = states()
        assert {{found[name] for name in optimizers}} <= ({{"applied"}} if active else {{"off", "reverted"}}), found
        for name in ("step", "make", "check"):
            assert depth(vars(Optimizer)[name]) == active
        before = snapshot()
        engine.revert()
        assert (snapshot() == before) == (not active)
        """
    )


def test_revert_restores_every_slot_and_alias_by_identity(run: RunPython) -> None:
    run(
        """
        before = snapshot()
        for _ in range(3):
            assert states(engine.apply()) == everything("applied")
            assert snapshot().keys() == before.keys()
            assert snapshot() != before
            assert states(engine.revert()) == everything("reverted")
            assert snapshot() == before
        """
    )


def test_an_early_apply_imports_neither_torch_nor_megatron_and_reaches_from_imports(run: RunPython) -> None:
    run(
        """
        status = engine.apply()
        assert not {"torch", "megatron", "megatron.core"} & set(sys.modules)
        assert states(status) == everything("pending")
        assert (status.line, status.versions.stated, status.unverified) == ("0.19", "0.19.2", ())
        from megatron.core.dist_checkpointing import load
        assert load({}, extra=1) == ["patched", "load", {}]
        assert engine.status()["function"].aliases == ()
        assert engine.status()["method"].state == "pending"
        """
    )


def test_importing_the_package_imports_nothing_heavy(run_python: RunPython) -> None:
    out = run_python(
        """
        import json, sys
        before = set(sys.modules)
        import mcore_patch
        print(json.dumps(sorted(set(sys.modules) - before)))
        """
    )
    packages = {name.partition(".")[0] for name in json.loads(out)}
    assert packages - sys.stdlib_module_names == {"mcore_patch"}


def test_the_public_functions_need_neither_torch_nor_megatron(run_python: RunPython) -> None:
    out = run_python(
        """
        import sys, mcore_patch
        print(mcore_patch.apply().reason.value)
        assert mcore_patch.status().pending and not mcore_patch.status().problems
        assert not mcore_patch.revert().active
        assert issubclass(mcore_patch.PatchError, RuntimeError)
        assert not {"torch", "megatron"} & set(sys.modules)
        """,
        PYTHONSAFEPATH="1",
    )
    assert out in ("release-absent\n", "") or out.strip()


def test_a_megatron_that_appears_after_apply_is_found(run_python: RunPython, tmp_path: Path) -> None:
    write_tree(tmp_path / "elsewhere")
    run_python(
        SETUP
        + f"""
status = engine.apply(strict=True)
assert status.reason.value == "release-absent" and not status.problems
sys.path.insert(0, {str(tmp_path / "elsewhere")!r})
from megatron.core.dist_checkpointing import load
assert load({{}}) == ["patched", "load", {{}}]
assert engine.status().line == "0.19"
"""
    )


def test_eight_threads_leave_one_wrapper(run: RunPython) -> None:
    run(
        """
        from megatron.core.optimizer import Optimizer
        sys.setswitchinterval(1e-6)
        def race(*steps):
            barrier = threading.Barrier(len(steps))
            def body(step):
                barrier.wait()
                step()
            threads = [threading.Thread(target=body, args=(step,)) for step in steps]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        for _ in range(300):
            race(*[engine.apply] * 8)
            assert depth(vars(Optimizer)["step"]) == 1
            engine.revert()
            assert depth(vars(Optimizer)["step"]) == 0
        for _ in range(30):
            race(*[engine.apply, engine.revert] * 4)
            assert depth(vars(Optimizer)["step"]) <= 1
            engine.apply()
            assert states()["method"] == "applied"
            assert depth(vars(Optimizer)["step"]) == 1
        """
    )


def test_apply_may_race_with_the_import(run: RunPython, site: Path) -> None:
    slow = site / "megatron/core/optimizer/optimizer.py"
    slow.write_text(slow.read_text() + "\nimport time; time.sleep(0.2)\n")
    run(
        """
        import time
        def importing():
            import megatron.core.optimizer
        importer = threading.Thread(target=importing)
        importer.start()
        while "megatron.core.optimizer.optimizer" not in sys.modules:
            time.sleep(0.001)
        assert engine.apply()["method"].state == "pending"
        importer.join()
        assert engine.status()["method"].state == "applied"
        """
    )


HALF = """
import half
half.engine.apply()
assert half.engine.status()["method"].state == "pending"
def late(self, value):
    return ["late", value]
"""


def test_a_half_imported_module_is_patched_when_its_import_ends(run: RunPython, site: Path) -> None:
    optimizer = site / "megatron/core/optimizer/optimizer.py"
    optimizer.write_text(optimizer.read_text() + HALF + "Optimizer.step = late\n")
    (site / "half.py").write_text("engine = None\n")
    run(
        """
        import half, importlib.machinery
        half.engine = engine
        import megatron.core.optimizer.optimizer as optimizer
        assert type(optimizer.__spec__) is importlib.machinery.ModuleSpec
        assert states()["method"] == "applied"
        assert optimizer.Optimizer().step(1) == ["patched", "late", 1]
        """
    )


def test_a_half_imported_module_that_fails_is_patched_at_the_next_try(run: RunPython, site: Path) -> None:
    optimizer = site / "megatron/core/optimizer/optimizer.py"
    optimizer.write_text(optimizer.read_text() + "import half\nhalf.engine.apply()\nhalf.fail()\n")
    (site / "half.py").write_text("engine = None\ndef fail(): raise ImportError\n")
    run(
        """
        import half
        half.engine = engine
        try:
            import megatron.core.optimizer
        except ImportError:
            pass
        assert states()["method"] == "pending"
        half.fail = lambda: None
        import megatron.core.optimizer
        import wrapt
        if wrapt.__version__.startswith("1.14."):  # cannot wait for a module a second time
            engine.apply()
        assert states()["method"] == "applied"
        """
    )


def test_a_hook_never_makes_an_import_fail(run: RunPython) -> None:
    out = run(
        """
        logging.basicConfig(stream=sys.stdout)
        engine.apply()
        def broken(*args): raise ValueError("broken")
        engine._advance = broken
        import megatron.core.optimizer
        """
    )
    assert "import hook of megatron.core.optimizer.optimizer" in out
    assert "ValueError: broken" in out


def test_status_never_raises(run: RunPython) -> None:
    run(
        """
        def broken(*args): raise ValueError("broken")
        engine._decide = broken
        assert "broken" in engine.status().detail
        assert "broken" in engine.status().summary()
        """
    )


def test_hooks_do_nothing_after_revert(run: RunPython) -> None:
    run(
        """
        engine.apply()
        engine.revert()
        before = snapshot()
        assert set(states().values()) == {"off"}
        from megatron.core.dist_checkpointing import load
        assert depth(load) == 0
        """
    )


def test_a_module_that_is_reloaded_is_told_and_patched_anew(run: RunPython) -> None:
    run(
        """
        import importlib
        import megatron.core.optimizer.optimizer as optimizer
        engine.apply()
        importlib.reload(optimizer)
        status = engine.status()
        assert status["method"].reason.value == "replaced"
        assert any("method is not patched" in problem for problem in status.problems)
        assert states(engine.apply()) == {**everything("applied"), "function": "pending"}
        assert depth(vars(optimizer.Optimizer)["step"]) == 1
        engine.revert()
        assert depth(vars(optimizer.Optimizer)["step"]) == 0
        """
    )


def test_a_buried_wrapper_works_again_after_apply(run: RunPython) -> None:
    run(
        """
        import functools
        from megatron.core.optimizer import Optimizer
        engine.apply()
        ours = Optimizer.step
        Optimizer.step = functools.wraps(ours)(lambda self, value: ["theirs", *ours(self, value)])
        assert engine.status()["method"].position == 1
        assert engine.revert()["method"].state == "buried"
        assert Optimizer().step(1) == ["theirs", "step", 1]
        assert engine.apply()["method"].state == "applied"
        assert Optimizer().step(1) == ["theirs", "patched", "step", 1]
        assert engine.revert()["method"].state == "buried"
        Optimizer.step = ours
        assert engine.apply()["method"].position == 0
        assert engine.revert()["method"].state == "reverted"
        assert depth(Optimizer.step) == 0
        """
    )


def test_work_is_not_done_twice_when_an_unmarked_wrapper_lies_between(run: RunPython) -> None:
    run(
        """
        from megatron.core.optimizer import Optimizer
        engine.apply()
        ours = Optimizer.step
        def step(self, value): return ["theirs", *ours(self, value)]
        Optimizer.step = step
        assert engine.status()["method"].reason.value == "replaced"
        status = engine.apply()
        assert (status["method"].state, status["method"].verdict) == ("applied", "unverified")
        assert Optimizer().step(1) == ["patched", "theirs", "step", 1]
        """
    )


FOREIGN = """
        import functools, wrapt
        import megatron.core.dist_checkpointing.serialization as serialization
        from megatron.core.optimizer import Optimizer
        seen = []
        def plain(function, kind):
            @functools.wraps(function)
            def theirs(*args, **kwargs):
                seen.append("plain")
                return ["theirs", *function(*args, **kwargs)]
            return theirs
        def proxy(function, kind):
            def theirs(wrapped, instance, args, kwargs):
                # A method's wrapper is told the instance, and its arguments are without it.
                assert (kind == "method") == isinstance(instance, Optimizer), instance
                return ["theirs", *wrapped(*args, **kwargs)]
            return wrapt.FunctionWrapper(function, theirs)
        places = {
            "function": (serialization, "load"),
            "method": (Optimizer, "step"),
            "class_method": (Optimizer, "make"),
            "static_method": (Optimizer, "check"),
        }
        calls = {
            "function": lambda: serialization.load({}),
            "method": lambda: Optimizer(3).step(2),
            "class_method": lambda: Optimizer.make(2),
            "static_method": lambda: Optimizer.check(2),
        }
        stock = {kind: call() for kind, call in calls.items()}
        def wrap(with_):
            \"\"\"Put a wrapper on top of each slot, as its kind wants it; what is in the slots then.\"\"\"
            for kind, (owner, name) in places.items():
                raw = vars(owner)[name]
                if type(raw) in (classmethod, staticmethod):
                    setattr(owner, name, type(raw)(with_(raw.__func__, kind)))
                else:
                    setattr(owner, name, with_(raw, kind))
            return {kind: vars(owner)[name] for kind, (owner, name) in places.items()}
"""


@pytest.mark.parametrize("theirs", ["plain", "proxy"])
def test_a_foreign_wrapper_below_is_kept_and_comes_back_by_identity(run: RunPython, theirs: str) -> None:
    run(
        f"""
{FOREIGN}
        below = wrap({theirs})
        for _ in range(2):
            assert states(engine.apply()) == everything("applied"), engine.status()
            for kind, call in calls.items():
                assert call() == ["patched", "theirs", *stock[kind]], (kind, call())
            engine.revert()
            for kind, (owner, name) in places.items():
                assert vars(owner)[name] is below[kind]
                assert calls[kind]() == ["theirs", *stock[kind]]
        """
    )


@pytest.mark.parametrize("theirs", ["plain", "proxy"])
def test_a_foreign_wrapper_above_stays_and_ours_is_told_to_lie_under_it(run: RunPython, theirs: str) -> None:
    run(
        f"""
{FOREIGN}
        engine.apply()
        above = wrap({theirs})
        for _ in range(2):
            status = engine.apply()
            assert states(status) == everything("applied")
            assert {{target.position for target in status.targets}} == {{1}}
            for kind, call in calls.items():
                assert call() == ["theirs", "patched", *stock[kind]], (kind, call())
            assert states(engine.revert()) == everything("buried")
            for kind, (owner, name) in places.items():
                assert vars(owner)[name] is above[kind]
                assert calls[kind]() == ["theirs", *stock[kind]]
        """
    )


def test_a_proxy_around_a_class_method_is_no_function(run: RunPython) -> None:
    run(
        f"""
{FOREIGN}
        for kind in ("class_method", "static_method"):
            owner, name = places[kind]
            setattr(owner, name, proxy(vars(owner)[name], kind))
        status = engine.apply()
        for kind in ("class_method", "static_method"):
            assert (status[kind].state, status[kind].reason.value) == ("skipped", "not-a-function")
            assert "FunctionWrapper" in status[kind].detail
            assert calls[kind]() == ["theirs", *stock[kind]]
        assert (status["function"].state, status["method"].state) == ("applied", "applied")
        """
    )


def test_reloading_this_package_changes_nothing_that_is_patched(run_python: RunPython) -> None:
    run_python(
        """
        import importlib, mcore_patch
        from mcore_patch._engine import ENGINE
        mcore_patch.apply()
        importlib.reload(mcore_patch)
        assert mcore_patch.status().active
        mcore_patch.revert()
        assert not ENGINE.status().active
        """
    )


def test_two_copies_of_the_package_leave_one_wrapper(run: RunPython) -> None:
    run(
        """
        import megatron.core.dist_checkpointing
        from megatron.core.optimizer import Optimizer
        first = engine
        assert states(first.apply()) == everything("applied")
        for name in list(sys.modules):
            if name.partition(".")[0] in ("mcore_patch", "engine_fakes"):
                del sys.modules[name]
        import engine_fakes
        second = engine_fakes.make_engine(scratch)
        assert type(second) is not type(first)
        status = second.apply()
        assert {target.reason.value for target in status.targets} == {"already-patched"}
        assert depth(vars(Optimizer)["step"]) == 1
        second.revert()
        assert states(first.status()) == everything("applied")
        first.revert()
        assert states(second.apply()) == everything("applied")
        assert depth(vars(Optimizer)["step"]) == 1
        """
    )


def test_strict_raises_one_error_with_all_and_changes_nothing(run: RunPython, site: Path) -> None:
    optimizer = site / "megatron/core/optimizer/optimizer.py"
    optimizer.write_text(
        optimizer.read_text()
        .replace("def step(self, value)", "def step(self, value, x=1)")
        .replace("def make", "def made")
    )
    run(
        """
        before = snapshot()
        try:
            engine.apply(strict=True)
        except PatchError as error:
            text = str(error)
        assert "method is not patched" in text and "signature-unknown" in text
        assert "class_method is not patched" in text and "attribute-missing" in text
        assert snapshot() == before and not engine.status().active and not engine.is_strict
        assert states(engine.apply())["function"] == "applied"
        try:
            engine.apply(strict=True, disable=["function"])
        except PatchError:
            pass
        assert states()["function"] == "applied" and not engine.is_strict
        engine.apply(strict=True, only=["function"])
        assert engine.is_strict
        engine.revert()
        assert not engine.is_strict
        """
    )


def test_a_wrapper_that_cannot_be_made_is_a_problem_of_its_target_alone(run: RunPython) -> None:
    run(
        """
        def failing(original, line): raise OSError("no such thing")
        engine = make_engine(scratch, {**WRAPPERS, "method": failing})
        import megatron.core.optimizer, megatron.core.dist_checkpointing
        status = engine.apply()
        assert states(status) == {**everything("applied"), "method": "skipped"}
        assert status["method"].reason.value == "wrapper-failed"
        assert "OSError: no such thing" in status["method"].detail
        """
    )


def test_only_and_disable_choose_and_the_last_call_holds(run: RunPython) -> None:
    run(
        """
        import megatron.core.optimizer, megatron.core.dist_checkpointing
        engine.apply(only=["method", "function"], disable=["function"])
        assert states() == {**everything("off"), "method": "applied"}
        assert engine.status()["function"].reason.value == "disabled"
        engine.apply(disable=["method"])
        assert states() == {**everything("applied"), "method": "off"}
        assert not engine.status().problems
        """
    )


@pytest.mark.parametrize(
    "env, applied",
    [
        ({"MCORE_PATCH": "0"}, []),
        ({"MCORE_PATCH": "1"}, ["function", "method", "class_method", "static_method"]),
        ({"MCORE_PATCH_DISABLE": "method, function"}, ["class_method", "static_method"]),
        ({"MCORE_PATCH_ONLY": "method"}, ["method"]),
        ({"MCORE_PATCH_ONLY": "method,function", "MCORE_PATCH_DISABLE": "method"}, ["function"]),
    ],
)
def test_the_environment_switches(run: RunPython, env: dict[str, str], applied: list[str]) -> None:
    run(
        f"""
        import megatron.core.optimizer, megatron.core.dist_checkpointing
        status = engine.apply()
        assert status.applied == {tuple(applied)!r}, status
        assert not status.problems
        assert status.active or status.detail == "MCORE_PATCH=0"
        """,
        **env,
    )


def test_arguments_win_over_the_environment(run: RunPython) -> None:
    run(
        """
        import megatron.core.optimizer, megatron.core.dist_checkpointing
        status = engine.apply(only=["function", "class_method"], disable=["class_method"])
        assert status.applied == ("function",)
        """,
        MCORE_PATCH_ONLY="method",
        MCORE_PATCH_DISABLE="function",
    )


LOGGING = """
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
"""


def test_a_summary_and_a_warning_per_problem_are_logged_once(run: RunPython, site: Path) -> None:
    optimizer = site / "megatron/core/optimizer/optimizer.py"
    optimizer.write_text(optimizer.read_text().replace("def step", "def stop"))
    code = f"""
        {LOGGING.strip()}
        engine.apply(disable=["mehtod"])
        engine.apply(disable=["mehtod"])
        import megatron.core.optimizer
        """
    lines = run(code).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["WARNING", "INFO", "WARNING", "WARNING"]
    assert "unknown targets: mehtod; known are function, method" in lines[0]
    assert "megatron-core 0.19.2 (line 0.19): 3 pending, 1 skipped" in lines[1]
    assert "method is not patched: expected a function at megatron.core.optimizer.optimizer:Opt" in lines[2]
    assert run(code, RANK="1") == ""


@pytest.mark.parametrize("version, words", [((0, 99, 0, ""), "newer"), ((0, 5, 0, ""), "too old")])
def test_a_release_that_is_not_covered_is_one_warning(
    run: RunPython, site: Path, version: tuple[int, int, int, str], words: str
) -> None:
    def edit(texts: dict[str, str]) -> None:
        for name in texts:
            texts[name] = texts[name].replace("return", "pass;  return")

    write_tree(site, version, edit=edit)
    out = run(
        f"""
        {LOGGING.strip()}
        status = engine.apply()
        import megatron.core.optimizer, megatron.core.dist_checkpointing
        assert states() == everything("skipped") and not engine.status().applied
        try:
            engine.apply(strict=True)
        except PatchError as error:
            assert str(error).count("\\n") == 1
        else:
            raise AssertionError
        """
    )
    warnings = [line for line in out.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert words in warnings[0]


def test_stand_ins_in_sys_modules_are_patched_by_version_and_live_signature(run_python: RunPython) -> None:
    run_python(
        SETUP
        + """
import types
from engine_fakes import OPTIMIZER
for name in ("megatron", "megatron.core", "megatron.core.optimizer", "megatron.core.optimizer.optimizer"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["megatron.core"].__version__ = "0.19.0+abc"
exec(OPTIMIZER, vars(sys.modules["megatron.core.optimizer.optimizer"]))
status = engine.apply()
assert status["method"].state == "applied" and status["method"].verdict == "unverified", status
assert status.unverified == tuple(TARGETS)
assert "unverified" in status.summary()
"""
    )


def test_a_target_outside_megatron_waits_for_the_line_and_for_its_package(run: RunPython, site: Path) -> None:
    (site / "fake_torch").mkdir()
    (site / "fake_torch/__init__.py").write_text("from . import module\nready = True\n")
    (site / "fake_torch/module.py").write_text("class Module:\n    def load(self, state): return ['load']\n")
    run(
        """
        from mcore_patch.compat import Checked, Target
        target = Target("torch", "fake_torch.module", "Module.load", "", "", "", after="fake_torch",
                        checked=Checked(("(self, state)",)))
        made = []
        def factory(original, line):
            made.append(hasattr(sys.modules["fake_torch"], "ready"))
            return marking("patched")(original, line)
        engine = make_engine(scratch, {**WRAPPERS, "torch": factory}, torch=target)
        engine.apply()
        assert engine.status()["torch"].state == "pending"
        from fake_torch.module import Module
        assert Module().load({}) == ["patched", "load"]
        assert engine.status()["torch"].verdict == "verified"
        assert made == [True]
        engine.revert()
        assert Module().load({}) == ["load"]
        """
    )


def test_without_megatron_nothing_outside_it_is_patched(run_python: RunPython, site: Path) -> None:
    write_tree(site, (0, 99, 0, ""))
    run_python(
        SETUP
        + """
from mcore_patch.compat import Checked, Target
import json
target = Target("outside", "json", "dumps", "", "", "", checked=Checked(("()",)))
engine = make_engine(scratch, WRAPPERS, outside=target)
assert engine.apply()["outside"].reason.value == "release-newer"
"""
    )
