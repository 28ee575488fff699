"""The environments that scripts/generate.py makes of compat/."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from mcore_patch.compat import LINES

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("generate", SCRIPTS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_up_to_date(generate: ModuleType) -> None:
    stale = [path.name for path, text in generate.generated().items() if path.read_text() != text]
    assert stale == [], "run python scripts/generate.py"


def test_the_eras_have_each_line_once_on_each_of_its_pythons_and_both_ends_of_all_else(generate: ModuleType) -> None:
    seen: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name in generate.era_environments():
        match = re.fullmatch(r"py3(\d+)-mcore([\d.]+)-torch([\d.]+)-numpy(\d)-wrapt([\d.]+)-packaging(\d+)-era", name)
        assert match is not None
        seen[match[2]].append(match.groups())
    assert list(seen) == [line.releases[-1] for line in LINES]
    for line, runs in zip(LINES, seen.values(), strict=True):
        pythons, _, torches, numpys, wrapts, packagings = zip(*runs, strict=True)
        assert [f"3.{python}" for python in pythons] == list(line.pythons)
        assert set(torches) == {line.torch}
        assert set(wrapts) == set(generate.WRAPT)
        assert set(packagings) == set(generate.PACKAGING)
        assert ("2" in numpys) == (line.numpy_2 or "3.13" in line.pythons)
        assert "1" in numpys
