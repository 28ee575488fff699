"""What holds for the registry of the real releases; the releases themselves are read elsewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
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
    written = script.draft(
        line.name, line.releases, line.pythons, dict(line.targets), line.quirks.state_dict_normalizers, line
    )
    assert written[written.index("LINE = ") :] in path.read_text(encoding="utf-8")


FILES = {
    "megatron/core/optimizer/optimizer.py": """
class FP32Optimizer:
    def reload_model_params(self, state_dict=None): ...
""",
    "megatron/core/optimizer/distrib_optimizer.py": """
class DistributedOptimizer:
    @staticmethod
    def _second_in_the_alphabet(state_dict_flat, model_chunk): ...
    @staticmethod
    def _first_in_the_alphabet(state_dict_flat, model_chunk): ...
    def load_state_dict(self, state_dict): ...
""",
    "megatron/core/dist_checkpointing/serialization.py": "def load(a): ...\n",
    "megatron_core-0.20.0.dist-info/METADATA": "Requires-Python: >=3.13\n\ntext",
}


def test_the_script_drafts_a_new_line_and_tells_what_moved_and_what_to_judge(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, tree = tmp_path / "megatron_core-0.20.0-py3-none-any.whl", tmp_path / "0.20.1"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text.replace("load(a)", "load(a, b=1)"))
    monkeypatch.setattr(sys, "argv", ["release_line.py", f"0.20.1={tree}", f"0.20.0={wheel}"])
    script.main()
    draft, said = capsys.readouterr()
    nearest = LINES[-1]
    assert f"torch_dist_load: gone since {nearest.name}\n" in said
    assert f"fp32_reload: same signature as in {nearest.name}, other source\n" in said
    assert "dist_load: signature (a), (a, b=); " in said
    assert "- optimizers: DistributedOptimizer, FP32Optimizer: is one new" in said
    namespace: dict[str, ReleaseLine] = {"__name__": "mcore_patch.compat.v0_20"}
    exec(draft, namespace)
    line = namespace["LINE"]
    assert (line.name, line.releases, line.pythons) == ("0.20", ("0.20.0", "0.20.1"), ("3.13",))
    assert line.native.startswith("DRAFT")
    assert line.torch == nearest.torch
    assert not line.quirks.zarr
    assert line.quirks.state_dict_normalizers == ("_second_in_the_alphabet", "_first_in_the_alphabet")
    assert set(line.targets) == {"dist_load", "distributed_optimizer_load", "fp32_reload"}
    assert line.targets["dist_load"].signatures == ("(a)", "(a, b=)")
    assert sorted(line.targets["dist_load"].fingerprints.values()) == [("0.20.0",), ("0.20.1",)]
    assert list(line.targets["fp32_reload"].fingerprints.values()) == [("0.20.0", "0.20.1")]
