"""Which megatron-core is this? Three sources are asked, none by importing, because each is known to lie.

The tag core_v0.17.0 calls itself 0.17.0rc0 and core_v0.19.0 calls itself 0.19.1, where the wheels of the same
names do not; from 0.18 on `__version__` ends in the commit of whatever git checkout the package lies in.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from .source import PACKAGE, Directory, read_module

_DISTRIBUTIONS = ("megatron-core", "megatron_core")
_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


@dataclass(frozen=True)
class Versions:
    """What the three sources say, as strings; None where a source has nothing to say.

    `metadata`: of the installed distribution. `package_info`: of the file beside the code, read as text.
    `attribute`: `megatron.core.__version__`, if megatron.core was imported already.
    """

    metadata: str | None = None
    package_info: str | None = None
    attribute: str | None = None

    @property
    def stated(self) -> str | None:
        """The one to go by: what lies with the code, then the metadata, then the attribute."""
        return next((v for v in (self.package_info, self.metadata, self.attribute) if release_of(v)), None)

    @property
    def disagreement(self) -> str | None:
        """A sentence if the sources name different releases; pre-release and local parts are not compared."""
        said = {
            "distribution metadata": self.metadata,
            "package_info.py": self.package_info,
            "megatron.core.__version__": self.attribute,
        }
        releases = {release_of(version) for version in said.values()} - {None}
        if len(releases) < 2:
            return None
        claims = ", ".join(f"{source} says {version}" for source, version in said.items() if version)
        return f"the sources of the version disagree: {claims}"


def release_of(version: str | None) -> tuple[int, ...] | None:
    """Return the release numbers of a version, without pre-release and local parts; None if unreadable."""
    try:
        release = Version(version or "").release
    except InvalidVersion:
        return None
    return (*release, 0, 0)[: max(3, len(release))]


def read_versions(package: Directory | None, *, installed: bool = True) -> Versions:
    """Ask the sources. `package` is the directory of `megatron.core`.

    With `installed=False` only the file beside the code is asked: for a tree that is not the installed one.
    """
    package_info = _package_info(package) if package is not None else None
    if not installed:
        return Versions(package_info=package_info)
    return Versions(metadata=_metadata(), package_info=package_info, attribute=_attribute())


def _metadata() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except Exception:  # PackageNotFoundError, or whatever a broken installation raises
            continue
    return None


def _package_info(package: Directory) -> str | None:
    """Read `MAJOR = 0` and the like: the file itself runs git when it is imported."""
    try:
        text = read_module(package, f"{PACKAGE}.package_info")
        body = ast.parse(text).body if text is not None else []
    except (OSError, SyntaxError, ValueError):
        return None
    values = {
        node.targets[0].id: node.value.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    if not all(part in values for part in _PARTS[:3]):
        return None
    return ".".join(str(values[part]) for part in _PARTS[:3]) + str(values.get(_PARTS[3], ""))


def _attribute() -> str | None:
    core = sys.modules.get(PACKAGE)
    version = vars(core).get("__version__") if core is not None else None
    return version if isinstance(version, str) else None
