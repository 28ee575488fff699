"""What holds for the registry of the real releases; the releases themselves are read elsewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from mcore_patch.compat import LINES, TARGETS, ReleaseLine, Target, line_named

from mcore_patch import compat

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_target_says_what_why_and_until_when(target: Target) -> None:
    assert target.kind == "wrap"
    assert re.fullmatch(r"[a-z0-9_]+", target.id)
    assert re.fullmatch(r"[\w.]+:[\w.]+", target.path)
    assert target.why.endswith(".")
    assert target.url.startswith("https://github.com/")
    assert len(target.until) > 20
    assert (target.checked is not None) == (not target.module.startswith("megatron."))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_every_line_is_complete(line: ReleaseLine) -> None:
    assert line_named(line.name) is line
    assert line.releases
    assert all(release.startswith(f"{line.name}.") for release in line.releases)
    assert line.native.endswith(".")
    assert not line.native.startswith("DRAFT")
    assert set(line.targets) <= {target.id for target in TARGETS.values() if target.checked is None}
    for checked in line.targets.values():
        assert checked.signatures
        assert {release for releases in checked.fingerprints.values() for release in releases} == set(line.releases)
    accepts = line.targets["mixed_precision_reload"].signatures
    assert line.quirks.reload_accepts_state_dict == all("state_dict" in signature for signature in accepts)
    assert line.quirks.zarr == ("tensorstore_load" in line.targets)


def test_the_lines_are_in_order_and_every_target_is_in_one() -> None:
    assert [line.key for line in LINES] == sorted(line.key for line in LINES)
    listed = {target_id for line in LINES for target_id in line.targets}
    assert listed == {target.id for target in TARGETS.values() if target.checked is None}


def test_an_unknown_line_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"0\.99.*0\.10"):
        line_named("0.99")


def test_the_registry_needs_the_standard_library_only(run_python: Callable[..., str]) -> None:
    code = "import sys; old = set(sys.modules); import mcore_patch.compat; print(*(set(sys.modules) - old))"
    tops = {name.partition(".")[0] for name in run_python(code).split()}
    assert tops - sys.stdlib_module_names == {"mcore_patch"}


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_line", ROOT / "scripts" / "release_line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_line_is_written_as_the_script_writes_it(script: ModuleType, line: ReleaseLine) -> None:
    major, minor = line.key
    path = Path(compat.__file__).with_name(f"v{major}_{minor:02}.py")
    written = script.draft(line.name, line.releases, line.pythons, dict(line.targets), line)
    assert written[written.index("LINE = ") :] in path.read_text(encoding="utf-8")


def test_the_script_drafts_a_new_line_and_tells_what_moved(script: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    for name, text in {
        "optimizer/optimizer.py": ("class FP32Optimizer:\n    def reload_model_params(self, state_dict=None): ...\n"),
        "dist_checkpointing/serialization.py": "def load(a): ...\n",
    }.items():
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text(text)
    (tmp_path / "megatron_core-0.20.0.dist-info").mkdir()
    (tmp_path / "megatron_core-0.20.0.dist-info" / "METADATA").write_text("Requires-Python: >=3.13\n\ntext")
    checks = script.read({"0.20.0": tmp_path})
    nearest = script.nearest_line("0.20")
    assert nearest is LINES[-1]
    moved = list(script.moved(checks, nearest))
    assert f"torch_dist_load: gone since {nearest.name}" in moved
    assert f"fp32_reload: same signature as in {nearest.name}, other source" in moved
    assert any(text.startswith("dist_load: signature (a); ") for text in moved)
    draft = script.draft("0.20", ("0.20.0",), script.pythons(script.requires_python(tmp_path)), checks, nearest)
    namespace: dict[str, ReleaseLine] = {"__name__": "mcore_patch.compat.v0_20"}
    exec(draft, namespace)
    assert namespace["LINE"].pythons == ("3.13",)
    assert namespace["LINE"].native.startswith("DRAFT")
    assert namespace["LINE"].targets["dist_load"].signatures == ("(a)",)
