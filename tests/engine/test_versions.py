from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from engine_fakes import write_tree

from mcore_patch._engine.source import package_in
from mcore_patch._engine.versions import Versions, read_versions, release_of


@pytest.mark.parametrize(
    "version, release",
    [
        ("0.19.2", (0, 19, 2)),
        ("0.17.0rc0", (0, 17, 0)),
        ("0.19.0+1a2b3c4", (0, 19, 0)),
        ("0.16.0rc0.dev123", (0, 16, 0)),
        ("0.20", (0, 20, 0)),
        ("1", (1, 0, 0)),
        ("1!2.0", (2, 0, 0)),
        ("unknown", None),
        ("", None),
        (None, None),
    ],
)
def test_a_release_has_neither_pre_release_nor_local_part(version: str | None, release: tuple[int, ...] | None) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize(
    "versions, stated, disagrees",
    [
        (Versions("0.19.0", "0.19.0", "0.19.0+1a2b3c4"), "0.19.0", False),
        (Versions("0.17.0", "0.17.0rc0"), "0.17.0rc0", False),
        (Versions("0.19.0", "0.19.1"), "0.19.1", True),
        (Versions(metadata="0.16.1"), "0.16.1", False),
        (Versions(attribute="0.16.1"), "0.16.1", False),
        (Versions("0.16.1", "garbage"), "0.16.1", False),
        (Versions(package_info="garbage"), None, False),
        (Versions(), None, False),
    ],
)
def test_the_sources_are_weighed(versions: Versions, stated: str | None, disagrees: bool) -> None:
    assert versions.stated == stated
    assert (versions.disagreement is not None) == disagrees


def test_a_disagreement_quotes_every_source() -> None:
    assert Versions("0.16.1", "0.17.0").disagreement == (
        "the sources of the version disagree: distribution metadata says 0.16.1, package_info.py says 0.17.0"
    )


def test_package_info_is_read_and_not_imported(tmp_path: Path) -> None:
    package = package_in(write_tree(tmp_path, (0, 17, 0, "rc0")))
    assert read_versions(package, installed=False) == Versions(package_info="0.17.0rc0")
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\n")
    assert read_versions(package, installed=False) == Versions(package_info="0.17.1")


@pytest.mark.parametrize("text", [b"MAJOR = 0\n", b"MAJOR = (", b"\xff\xfe", b"MAJOR, MINOR = 0, 1\nx = f()\n", None])
def test_an_unreadable_package_info_says_nothing(tmp_path: Path, text: bytes | None) -> None:
    package = package_in(write_tree(tmp_path, None))
    if text is not None:
        (tmp_path / "megatron" / "core" / "package_info.py").write_bytes(text)
    assert read_versions(package, installed=False) == Versions()


def test_metadata_and_attribute_are_asked_for_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = type(sys)("megatron.core")
    core.__version__ = "0.19.0+abc"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"megatron_core": "0.19.0"}[name])
    assert read_versions(None) == Versions("0.19.0", None, "0.19.0+abc")
    package = package_in(write_tree(tmp_path))
    assert read_versions(package) == Versions("0.19.0", "0.19.2", "0.19.0+abc")
    core.__version__ = 19  # type: ignore[attr-defined]
    assert read_versions(None) == Versions("0.19.0", None, None)
