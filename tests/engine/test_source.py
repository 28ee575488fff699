from __future__ import annotations

import ast
import hashlib
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FILES, TARGETS, write_tree
from hypothesis import given
from hypothesis import strategies as st

from mcore_patch._engine import source
from mcore_patch._engine.source import Found, find_package, find_target, package_in, signature_of

MODULE = "megatron.core.m"


def read(tmp_path: Path, text: str | bytes, qualname: str) -> Found:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True, exist_ok=True)
    (package / "m.py").write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return find_target(package, MODULE, qualname)


@st.composite
def parameter_lists(draw: st.DrawFn) -> str:
    """A valid parameter list, of every kind and in every mix."""
    names = (f"p{index}" for index in range(100))
    positional_only, ordinary, keyword_only = (draw(st.integers(0, 2)) for _ in range(3))
    first_default = draw(st.integers(0, positional_only + ordinary))
    parts = []
    for index in range(positional_only + ordinary):
        parts.append(next(names) + (": int = 1" if index >= first_default else ""))
        if index + 1 == positional_only:
            parts.append("/")
    variadic = draw(st.booleans())
    if variadic or keyword_only:
        parts.append("*rest" if variadic else "*")
    parts += [next(names) + draw(st.sampled_from(["", "=None", ": str", ': "X" = 2'])) for _ in range(keyword_only)]
    if draw(st.booleans()):
        parts.append("**more")
    return ", ".join(parts)


@given(parameter_lists())
def test_the_signature_in_the_source_is_the_signature_of_the_live_function(parameters: str) -> None:
    text = f"def f({parameters}): pass"
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert source._signature_in(node.args) == signature_of(namespace["f"])


def test_the_normal_form_has_names_kinds_and_whether_there_is_a_default(tmp_path: Path) -> None:
    text = """\
        def f(a, b: int = 1, /, c: "X" = None, *, d, e=3, **g) -> int: ...
        def h(a, /): ...
        def i(*a, b): ...
        """
    assert read(tmp_path, text, "f").signature == "(a, b=, /, c=, *, d, e=, **g)"
    assert read(tmp_path, text, "h").signature == "(a, /)"
    assert read(tmp_path, text, "i").signature == "(*a, b)"


CLASS = """\
class C:
    @decorated
    def f(self, x):
        text = '''
  less indented
'''

        return x
"""


@pytest.mark.parametrize(
    "same",
    [
        CLASS.replace("\n", "\r\n").encode(),
        CLASS.replace("\n", "\r").encode(),
        CLASS.replace("return x", "return x  \t").encode(),
        b"# moved\n" + CLASS.encode() + b"\n\nother = 1\n",
        textwrap.indent(CLASS, "    ").replace("    class", "if True:\n    class", 1).encode(),
    ],
    ids=["crlf", "cr", "trailing-blanks", "moved", "indented"],
)
def test_the_fingerprint_ignores_place_line_endings_and_trailing_blanks(tmp_path: Path, same: bytes) -> None:
    expected = read(tmp_path, CLASS, "C.f")
    if b"if True" in same:  # inside the string, blanks count
        same = same.replace(b"      less", b"  less").replace(b"    '''\n", b"'''\n")
    assert read(tmp_path, same, "C.f").signature == "(self, x)"
    if b"if True" not in same:
        assert read(tmp_path, same, "C.f").fingerprint == expected.fingerprint


def test_a_fingerprint_is_what_is_kept_in_compat(tmp_path: Path) -> None:
    assert read(tmp_path, CLASS, "C.f").fingerprint == "4bb6c6f69dae17c0"
    lines = ["@decorated", "def f(self, x):", "    text = '''", "  less indented", "'''", "", "    return x"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest().startswith("4bb6c6f69dae17c0")


def test_a_package_reads_from_its_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "megatron" / "core" / "m"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def f(a): ...")
    assert find_target(folder.parent, MODULE, "f").signature == "(a)"


def test_an_indented_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    text = "def f(x):\n    return x\n"
    indented = "try:\n    def f(x):\n        return x\nexcept ImportError:\n    pass\n"
    assert read(tmp_path, text, "f").fingerprint == read(tmp_path, indented, "f").fingerprint


@pytest.mark.parametrize("old, new", [("return x", "return x + 1"), ("@decorated", "@other"), ("x):", "x=1):")])
def test_the_fingerprint_sees_body_decorators_and_defaults(tmp_path: Path, old: str, new: str) -> None:
    assert read(tmp_path, CLASS, "C.f").fingerprint != read(tmp_path, CLASS.replace(old, new), "C.f").fingerprint


def test_the_last_definition_of_a_name_counts(tmp_path: Path) -> None:
    text = """\
        try:
            import fast
        except ImportError:
            def f(a): ...
        else:
            def f(a, b): ...
        if fast:
            def f(a, b, c): ...
        with fast:
            async def g(): ...
        """
    assert read(tmp_path, text, "f").signature == "(a, b, c)"
    assert read(tmp_path, text, "g").signature == "()"


def test_every_branch_of_a_condition_is_read(tmp_path: Path) -> None:
    text = """\
        if fast:
            def f1(): ...
        elif slow:
            def f2(): ...
        else:
            def f3(): ...
        try:
            def f4(): ...
        except ValueError:
            def f5(): ...
        except TypeError:
            def f6(): ...
        else:
            def f7(): ...
        finally:
            def f8(): ...
        """
    for number in range(1, 9):
        assert read(tmp_path, text, f"f{number}").signature == "()"


@pytest.mark.parametrize(
    "qualname, problem",
    [
        ("missing", "attribute-missing"),
        ("Missing.f", "attribute-missing"),
        ("Child.missing", "attribute-missing"),
        ("Child.f", "inherited"),
        ("alias", "not-a-function"),
        ("Base.alias", "not-a-function"),
        ("Outer.Inner.f", "inherited"),
        ("Elsewhere.f", "attribute-missing"),
        ("Loop.f", "attribute-missing"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, qualname: str, problem: str) -> None:
    text = """\
        class Base:
            def f(self): ...
            alias = f
        class Middle(Base, Child): ...
        class Child(Middle): ...
        alias = 1
        class Outer:
            class Inner(Base): ...
        class Elsewhere(Imported): ...
        class Loop(One): ...
        class One(Two): ...
        class Two(One): ...
        """
    assert read(tmp_path, text, qualname) == Found(problem=problem)  # type: ignore[arg-type]


def test_a_file_for_a_newer_python_has_no_targets(tmp_path: Path) -> None:
    assert read(tmp_path, "def f(: new syntax", "f").problem == "attribute-missing"


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    assert read(tmp_path, "def f(a): ...", "f").signature == "(a)"
    assert read(tmp_path, "def f(b): ...", "f").signature == "(b)"


def test_a_missing_module_or_package_is_said() -> None:
    target = TARGETS["function"]
    assert find_target(None, target.module, target.qualname).problem == "source-missing"
    assert find_target(Path("nowhere"), target.module, target.qualname).problem == "module-missing"


def test_a_wheel_reads_like_the_tree_it_was_made_of(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    wheel = tmp_path / "m.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.write(tree / name, name)
    for target in TARGETS.values():
        found = find_target(package_in(wheel), target.module, target.qualname)
        assert found.fingerprint is not None
        assert found == find_target(package_in(tree), target.module, target.qualname)


def test_a_path_without_megatron_core_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*megatron/core"):
        package_in(tmp_path)


@pytest.fixture
def _no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("_no_megatron")
def test_the_package_is_found_in_any_portion_of_the_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "megatron" / "training").mkdir(parents=True)
    second = write_tree(tmp_path / "second")
    monkeypatch.syspath_prepend(second)
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert find_package() == second / "megatron" / "core"
    assert "megatron" not in sys.modules


@pytest.mark.usefixtures("_no_megatron")
def test_the_package_that_was_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported, other = write_tree(tmp_path / "imported"), write_tree(tmp_path / "other")
    core = type(sys)("megatron.core")
    core.__path__ = [str(imported / "megatron" / "core")]
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.syspath_prepend(other)
    assert find_package() == imported / "megatron" / "core"


@pytest.mark.usefixtures("_no_megatron")
def test_stand_ins_without_a_path_have_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", type(sys)("megatron.core"))
    assert find_package() is None
    monkeypatch.delitem(sys.modules, "megatron.core")
    monkeypatch.setitem(sys.modules, "megatron", type(sys)("megatron"))
    assert find_package() is None
