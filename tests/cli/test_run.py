"""`mcore-patch run` is `python`, with the patches applied."""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]

SHOW = """\
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "names": sorted(globals()),
    "attributes": [repr(globals()[f"__{name}__"]) for name in ("name", "file", "package", "spec", "doc")],
    "cached": repr(__cached__) if "__cached__" in globals() else None,
    "loader": type(__loader__).__name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "repr": repr(sys.modules["__main__"]),
}))

def fail():
    raise ValueError("inner")

what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "raise":
    try:
        fail()
    except ValueError:
        {}["outer"]
if what == "hook":
    sys.excepthook = lambda kind, value, traceback: print(kind, value, traceback.tb_frame.f_code.co_name)
    fail()
if what == "exit":
    sys.exit("goodbye")
if what == "code":
    sys.exit(7)
if what == "thread":
    threading.Timer(0.1, lambda: print("later", sys.modules["__main__"].what)).start()
if what in ("SIGINT", "SIGTERM", "SIGKILL"):
    os.kill(os.getpid(), getattr(signal, what))
if what == "annotations":
    def f(x: fail): ...
    print(f.__annotations__["x"] is fail)
"""

INVOCATIONS = [
    "show.py",
    "show.py -- -m x --version -h --json",
    "show.py -m",
    "show.py raise",
    "show.py hook",
    "show.py exit",
    "show.py code",
    "show.py thread",
    "show.py annotations",
    "show.py SIGINT",
    "show.py SIGTERM",
    "show.py SIGKILL",
    "folder/link.py raise",
    "folder a",
    "archive.zip a",
    "compiled.pyc",
    "broken.py",
    "missing.py",
    "empty",
    "-m show -- -h",
    "-m show raise",
    "-m show SIGINT",
    "-m package a",
    "-m package.inner",
    "-m broken",
    "-m missing",
    "-m package.missing",
    "-m json",
]


@pytest.fixture
def scripts(tmp_path: Path, python: Python) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "empty").mkdir()
    for folder in ("folder", "package"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__main__.py").write_text(SHOW)
    (tmp_path / "package" / "__init__.py").write_text("import sys\nprint('looked for', sys.argv)\n")
    (tmp_path / "package" / "inner.py").write_text(SHOW)
    (tmp_path / "folder" / "link.py").symlink_to(tmp_path / "show.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    assert python("-c", "import py_compile; py_compile.compile('show.py', 'compiled.pyc')").returncode == 0
    return tmp_path


def comparable(text: str) -> str:
    """Without addresses, and without the frames of `runpy` (`python -m` has them, and the frames of importlib)."""
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r'  File "<frozen (runpy|importlib.*)>".*\n', "", text)
    return re.sub(r"^Traceback.*\n(?=  File .*broken.py)", "", text)


@pytest.mark.parametrize("invocation", INVOCATIONS)
def test_a_script_finds_and_leaves_what_it_does_without(invocation: str, scripts: Path, python: Python) -> None:
    expected = python(*invocation.split())
    found = python("-m", "mcore_patch", "run", *invocation.split())
    assert comparable(found.stdout) == comparable(expected.stdout)
    assert comparable(found.stderr) == comparable(expected.stderr)
    assert found.returncode == expected.returncode


@pytest.mark.parametrize("option", ["-P", "-I", "-O", "-u"])
def test_options_of_the_interpreter_hold(option: str, scripts: Path, python: Python) -> None:
    if option == "-P" and python("-P", "-c", "").returncode:
        pytest.skip("this Python has no -P")
    if option == "-I" and python("-I", "-c", "import mcore_patch").returncode:
        pytest.skip("the package is not installed")
    assert python(option, "-m", "mcore_patch", "run", "show.py").stdout == python(option, "show.py").stdout


def test_patches_are_applied_before_the_script_begins(tmp_path: Path, command: Python) -> None:
    (tmp_path / "script.py").write_text("import mcore_patch; print(mcore_patch.status().active)")
    assert command("run", "script.py").stdout == "True\n"
    assert command("run", "-m", "script").stdout == "True\n"
    assert command("run", "script.py", MCORE_PATCH="0").stdout == "False\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("as_module", [False, True])
def test_child_processes_are_patched(method: str, as_module: bool, tmp_path: Path, command: Python) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, sys\n"
        "import mcore_patch\n"
        "class Mine: pass\n"
        "def work(mine):\n"
        "    return type(mine) is Mine, mcore_patch.status().active, sys.argv\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(pool.apply(work, [Mine()]))\n"
    )
    done = command("run", *(["-m", "script"] if as_module else ["script.py"]), "-x")
    script = str(tmp_path / "script.py") if as_module else "script.py"
    assert done.stdout == f"{(True, True, [script, '-x'])}\n", done.stderr


def test_torchrun_needs_no_edit_of_the_script(tmp_path: Path, python: Python) -> None:
    pytest.importorskip("torch")
    (tmp_path / "script.py").write_text(
        "import os, sys, mcore_patch\n"
        "open(f'rank{os.environ[\"RANK\"]}', 'w').write(f'{mcore_patch.status().active} {sys.argv}')\n"
    )
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = python(*launch, "-m", "mcore_patch", "run", "script.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "True ['script.py', '--lr', '1']"


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--strict", "script.py"]])
def test_an_invocation_without_a_script_is_refused(arguments: list[str], command: Python) -> None:
    done = command("run", *arguments)
    assert done.returncode == 2
    assert "expected -m MODULE or a SCRIPT" in done.stderr


def test_help_is_ours_only_before_the_script(scripts: Path, command: Python) -> None:
    assert command("run", "--help").stdout.startswith("usage: mcore-patch run")
    assert '"argv": ["show.py", "--help"]' in command("run", "show.py", "--help").stdout
