"""Transformer Engine absent, broken, or newer than any that is known: what stock does, the patched process does too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mcore_patch.compat import PAIRS

from .conftest import pair

TESTS = Path(__file__).parents[1]
# Seven processes that import megatron-core: on every run with one pair only.
pytestmark = [] if pair() == [each for each in PAIRS if each.fast][-1] else [pytest.mark.wide]

BROKEN = {
    "not there": "raise ModuleNotFoundError(\"No module named 'transformer_engine'\", name='transformer_engine')",
    # What 2.17 to 2.19 say where there is no driver; megatron-core catches ImportError only.
    "without libcuda": "raise OSError('libcuda.so.1: cannot open shared object file: No such file or directory')",
}
IMPORT = """
try:
    import megatron.core.optimizer.distrib_optimizer, megatron.core.dist_checkpointing
except Exception as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("imported")
"""
PATCH = """
import mcore_patch
mcore_patch.apply(strict=True)
"""
LOOK = """
print(len(mcore_patch.status().targets) > 0, mcore_patch.report() == ())
mcore_patch.revert()
"""
RUN = """
import tempfile
from pathlib import Path
from standins.install import stand_in_for_transformer_engine
stand_in_for_transformer_engine()
from importlib import metadata
from standins import fp8_pipelines
from mcore_patch.testing import run_ranks
outcomes = [
    run_ranks(fp8_pipelines.run, 1, "reload", patched, Path(tempfile.mkdtemp()), {"disk": "float32"})[0]
    for patched in (False, True)
]
stock, patched = outcomes
print(metadata.version("transformer-engine"), stock.differing > stock.total // 2, patched.differing)
print(patched.model == stock.model)
"""


def python(code: str, site: Path) -> list[str]:
    """The lines that ``code`` prints in a fresh process that finds ``site`` before anything else."""
    path = [str(site), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=site,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", BROKEN)
def test_where_it_cannot_be_imported_megatron_core_does_what_it_does_without_us(what: str, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN[what])
    stock = python(IMPORT, tmp_path)
    assert python(PATCH + IMPORT + LOOK, tmp_path) == [*stock, "True True"]


def test_a_release_that_is_newer_than_all_that_are_known(tmp_path: Path) -> None:
    distribution = tmp_path / "transformer_engine-99.0.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 99.0.0\n")
    assert python(RUN, tmp_path) == ["99.0.0 True 0", "True"]
