"""The engine in processes that are forked or spawned from one that has patched, and what goes between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_fakes import write_tree

RunPython = Callable[..., str]

SETUP = """
import copy, functools, logging, multiprocessing, os, pickle, signal, sys, threading
from engine_fakes import TARGETS, depth, make_engine
engine = make_engine(scratch)
import megatron.core.dist_checkpointing.serialization as serialization
from megatron.core.optimizer.optimizer import Child, Optimizer
def in_fork(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            body()
        except BaseException:
            logging.exception("in the child")
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
def slots():
    return [serialization.load, *(vars(Optimizer)[name] for name in ("step", "make", "check"))]
"""


@pytest.fixture
def run(run_python: RunPython, tmp_path: Path) -> RunPython:
    write_tree(tmp_path / "site")
    return lambda code, **env: run_python(SETUP + code, **env)


def test_a_forked_child_has_the_patch_and_takes_back_only_its_own(run: RunPython) -> None:
    run(
        """
before = slots()
engine.apply()
def child():
    assert [depth(slot) for slot in slots()] == [1] * 4
    assert Child(2).step(1) == ["patched", "step", 2]
    engine.apply()
    assert [depth(slot) for slot in slots()] == [1] * 4
    engine.revert()
    assert all(slot is old for slot, old in zip(slots(), before))
in_fork(child)
assert [depth(slot) for slot in slots()] == [1] * 4
assert Child(2).step(1) == ["patched", "step", 2]
engine.revert()
in_fork(lambda: engine.apply())
assert [depth(slot) for slot in slots()] == [0] * 4
"""
    )


def test_a_child_that_is_forked_while_another_thread_patches_does_not_wait_for_that_thread(run: RunPython) -> None:
    run(
        """
sys.setswitchinterval(1e-6)
ended = threading.Event()
def patching():
    while not ended.is_set():
        engine.apply()
        engine.revert()
thread = threading.Thread(target=patching)
thread.start()
def child():
    engine.apply()
    assert [depth(slot) for slot in slots()] == [1] * 4
    engine.revert()
    assert [depth(slot) for slot in slots()] == [0] * 4
try:
    for _ in range(50):
        in_fork(child)
finally:
    ended.set()
    thread.join()
"""
    )


def test_apply_revert_and_import_may_all_race(run_python: RunPython, tmp_path: Path) -> None:
    write_tree(tmp_path / "site")
    early, late = SETUP.split("import megatron.core.dist_checkpointing.serialization as serialization\n")
    run_python(
        early
        + late.replace("from megatron.core.optimizer.optimizer import Child, Optimizer\n", "")
        + """
import contextlib, importlib
sys.setswitchinterval(1e-6)
def imported(name):
    # CPython itself (importlib._bootstrap._load_unlocked) takes a parent out of sys.modules and puts it back when it is
    # loaded, and an import of a submodule that comes between the two raises KeyError.
    with contextlib.suppress(KeyError):
        return importlib.import_module(name)
    return importlib.import_module(name)
def race():
    barrier, failures = threading.Barrier(8), []
    def body(*steps):
        barrier.wait()
        try:
            for step in steps:
                step()
        except BaseException as error:
            failures.append(error)
    names = ["megatron.core.dist_checkpointing.serialization", "megatron.core.optimizer"]
    importing = [functools.partial(imported, name) for name in names]
    bodies = [importing, importing[::-1], *[[engine.apply]] * 2, *[[engine.revert]] * 2]
    bodies += [[engine.status], [engine.apply, engine.revert]]
    threads = [threading.Thread(target=body, args=steps) for steps in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    global serialization, Optimizer
    serialization = sys.modules[names[0]]
    Optimizer = sys.modules[names[1]].Optimizer
    assert {depth(slot) for slot in slots()} <= {0, 1}
    engine.apply()
    assert {target.state for target in engine.status().targets} == {"applied"}
    assert [depth(slot) for slot in slots()] == [1] * 4
    engine.revert()
    assert [depth(slot) for slot in slots()] == [0] * 4
for _ in range(100):
    assert "megatron" not in sys.modules
    in_fork(race)
"""
    )


def test_a_fork_waits_for_the_thread_that_is_patching(run: RunPython) -> None:
    run(
        """
held, order = threading.Event(), []
from mcore_patch._engine import imports
def holding(lock):
    with lock:
        held.set()
        started.wait(60)
        order.append("released")
for lock in (engine._lock, imports._lock):
    held.clear()
    started = threading.Event()
    os.register_at_fork(before=started.set)  # the latest is called first: the fork is under way
    thread = threading.Thread(target=holding, args=(lock,))
    thread.start()
    assert held.wait(60)
    def child():
        assert order[-1] == "released"
        assert lock.acquire(timeout=60)
    in_fork(child)
    thread.join()
assert order == ["released"] * 2
"""
    )


MAIN = """
import multiprocessing, sys
from pathlib import Path
sys.path.insert(0, {support!r})
from engine_fakes import depth, make_engine
def child(scratch, function, method):
    from megatron.core.optimizer import Optimizer
    engine = make_engine(Path(scratch))
    found = [depth(function), depth(method), engine.status().active]
    engine.apply()
    found += [depth(vars(Optimizer)["step"]), engine.status()["method"].state]
    assert Optimizer(2).step(1) == ["patched", "step", 2]
    engine.revert()
    return [*found, depth(vars(Optimizer)["step"])]
if __name__ == "__main__":
    from megatron.core.dist_checkpointing import load
    import megatron.core.dist_checkpointing as package
    from megatron.core.optimizer import Optimizer
    engine = make_engine(Path({scratch!r}))
    engine.apply()
    for start in ("spawn", "forkserver"):
        with multiprocessing.get_context(start).Pool(1) as pool:
            print(pool.apply(child, ({scratch!r}, package.load, Optimizer.step)))
    print(depth(vars(Optimizer)["step"]))
"""


def test_a_spawned_child_starts_unpatched_and_patches_for_itself(run_python: RunPython, tmp_path: Path) -> None:
    support = str(Path(__file__).with_name("support"))
    write_tree(tmp_path / "site")
    (tmp_path / "main.py").write_text(MAIN.format(support=support, scratch=str(tmp_path / "scratch")))
    out = run_python("import runpy; runpy.run_path('main.py', run_name='__main__')")
    # What was pickled patched arrives as what the child has under that name.
    assert out.splitlines() == ["[0, 0, False, 1, 'applied', 0]"] * 2 + ["1"]


def test_what_was_reachable_before_is_pickled_and_copied_as_before(run: RunPython) -> None:
    run(
        """
def reachable():
    optimizer = Child(3)
    return {
        "function": serialization.load,
        "alias": sys.modules["megatron.core.dist_checkpointing"].load,
        "method": Optimizer.step,
        "inherited method": Child.step,
        "bound method": optimizer.step,
        "class method": Optimizer.make,
        "inherited class method": Child.make,
        "static method": Child.check,
        "constructor": Optimizer.__init__,
        "classes": (Optimizer, Child),
        "instance": optimizer,
        "partial": functools.partial(serialization.load, strict=1),
        "nested": {"a": [optimizer.step, (Optimizer.check, serialization)][:1]},
    }
def same(left, right):
    if isinstance(left, Child):
        return type(left) is type(right) and vars(left) == vars(right)
    if isinstance(left, functools.partial):
        return (left.func, left.args, left.keywords) == (right.func, right.args, right.keywords)
    if hasattr(left, "__self__") and isinstance(left.__self__, Child):
        return left.__func__ is right.__func__ and same(left.__self__, right.__self__)
    if isinstance(left, dict):
        return same(left["a"][0], right["a"][0])
    return left == right
def check(things):
    for name, thing in things.items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert same(thing, pickle.loads(pickle.dumps(thing, protocol))), name
        assert same(thing, copy.deepcopy(thing)), name
        assert same(thing, copy.copy(thing)), name
before = reachable()
check(before)
engine.apply()
check(reachable())
# Taken before: methods are pickled by name. A function that was imported by name elsewhere is the one exception, as
# pickle looks whether the name still leads to it; status() lists who holds one.
taken = {name: before[name] for name in ("bound method", "class method", "inherited class method", "instance")}
for name, thing in taken.items():
    pickle.loads(pickle.dumps(thing))
for name in before:
    copy.deepcopy(before[name])
__import__("__main__").held = before["function"]
assert "__main__.held" in engine.status()["function"].holders
try:
    pickle.dumps(before["function"])
except pickle.PicklingError as error:
    assert "not the same object" in str(error)
else:
    raise AssertionError
engine.revert()
check(before)
"""
    )
