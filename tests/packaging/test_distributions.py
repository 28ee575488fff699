"""The sdist and the wheel, built from a copy of the checkout, and the package as a user gets it from that wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "compat", "constraints", "docs", "mcore_patch", "scripts", "tests")

Done = subprocess.CompletedProcess[str]


def python(*arguments: str | Path, cwd: Path, executable: Path | str = sys.executable, **env: str) -> Done:
    """Run `python *arguments`, away from the checkout and without what else the environment would put on its path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MCORE_PATCH"))}
    return subprocess.run(
        [executable, *arguments], cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=300
    )


def succeeds(*arguments: str | Path, cwd: Path, executable: Path | str = sys.executable, **env: str) -> str:
    """What it prints."""
    done = python(*arguments, cwd=cwd, executable=executable, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree: Path, kind: str) -> Path:
    """Build an sdist or a wheel, with the setuptools that is installed, at a fixed time."""
    out = tree / "dist"
    arguments = ["-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(tree)]
    succeeds(*arguments, cwd=tree.parent, SOURCE_DATE_EPOCH="1700000000")
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because building writes into the tree."""
    copy = tmp_path_factory.mktemp("checkout") / "mcore-patch"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "out")
    )
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    return build(checkout, "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist gives."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [tree] = folder.iterdir()
    return build(tree, "wheel")


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    succeeds("-m", "venv", folder, cwd=folder)
    interpreter = folder / "bin" / "python"
    succeeds("-m", "pip", "install", "-q", wheel, cwd=folder, executable=interpreter)
    return interpreter


def test_the_sdist_holds_the_checkout(checkout: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    files = {str(path.relative_to(checkout)) for name in FOLDERS for path in (checkout / name).rglob("*")}
    assert files - held == set()
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", "tox.ini"} <= held


def test_the_sdist_gives_the_wheel_of_the_checkout(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkout, tmp_path / "again", ignore=shutil.ignore_patterns("dist", "*.egg-info"))
    assert build(copy, "wheel").read_bytes() == wheel.read_bytes()


def test_the_wheel_holds_one_package_of_typed_python(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {str(path.relative_to(checkout)) for path in (checkout / "mcore_patch").rglob("*.py")}
    expected |= {f"mcore_patch/compat/{path.name}" for path in (checkout / "compat").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == expected | {"mcore_patch/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_twine_and_check_wheel_contents_find_nothing(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    succeeds("-m", "twine", "check", "--strict", str(sdist), str(wheel), cwd=tmp_path)
    succeeds("-m", "check_wheel_contents", str(wheel), cwd=tmp_path)


def test_an_installation_brings_its_dependencies_and_no_more(clean: Path, tmp_path: Path) -> None:
    listed = json.loads(succeeds("-m", "pip", "list", "--format", "json", cwd=tmp_path, executable=clean))
    assert {each["name"] for each in listed} - {"pip", "setuptools"} == {"mcore-patch", "packaging", "wrapt"}


def test_importing_it_imports_no_torch(clean: Path, tmp_path: Path) -> None:
    for name in ("torch", "megatron"):
        (tmp_path / f"{name}.py").write_text("")
    code = "import mcore_patch, sys; mcore_patch.apply(); print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    assert succeeds("-c", code, cwd=tmp_path, executable=clean) == "[]\n"


def test_apply_without_megatron_core_does_nothing_and_says_so(clean: Path, tmp_path: Path) -> None:
    code = "import mcore_patch; s = mcore_patch.apply(); print(s.line, s.reason.value)"
    assert succeeds("-c", code, cwd=tmp_path, executable=clean) == "None release-absent\n"


def test_the_command_and_the_module_are_the_same(clean: Path, tmp_path: Path) -> None:
    command = clean.with_name("mcore-patch")
    assert succeeds("--help", cwd=tmp_path, executable=command) == succeeds(
        "-m", "mcore_patch", "--help", cwd=tmp_path, executable=clean
    )


def test_doctor_without_megatron_core_says_that_there_is_none(clean: Path, tmp_path: Path) -> None:
    done = python("-m", "mcore_patch", "doctor", "--static", cwd=tmp_path, executable=clean)
    assert done.returncode == 2
    assert "ERROR: " in done.stdout
    assert done.stderr == ""


def test_doctor_judges_a_release_that_is_not_installed(clean: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("no megatron-core")
    tree = Path(spec.origin).parents[2]
    said = succeeds("-m", "mcore_patch", "doctor", "--static", tree, "--json", cwd=tmp_path, executable=clean)
    judged = {target["verdict"] for target in json.loads(said)["targets"]}
    assert "verified" in judged
    assert not {"unverified", "skipped"} & judged


def test_mypy_finds_its_types_in_a_users_file(clean: Path, tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text("import mcore_patch\n\nactive: bool = mcore_patch.apply(strict=True).active\n")
    check = ["-m", "mypy", "--strict", "--python-executable", str(clean), str(user)]
    succeeds(*check, cwd=tmp_path)
    user.write_text("import mcore_patch\n\nactive: bytes = mcore_patch.apply(strict=1).active\n")
    done = python(*check, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("error:") == 2, done.stdout
    assert "[arg-type]" in done.stdout
    assert "[assignment]" in done.stdout
