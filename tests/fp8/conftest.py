"""The pair of megatron-core and Transformer Engine that is installed, over stand-in kernels, in this very process."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from mcore_patch.compat import PAIRS, Pair
from standins.install import stand_in_for_transformer_engine

stand_in_for_transformer_engine()
logging.getLogger("megatron").setLevel(logging.ERROR)

FAST_RECIPES = {"delayed", "tensorwise"}


def pair() -> Pair:
    """The entry of compat/ for what is installed."""
    installed = metadata.version("megatron-core"), metadata.version("transformer-engine")
    return next(pair for pair in PAIRS if (pair.mcore, pair.te) == installed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``recipe`` runs with each that the pair supports; the slow ones in the wide ring."""
    if "recipe" in metafunc.fixturenames:
        recipes = [
            pytest.param(name, marks=() if name in FAST_RECIPES else pytest.mark.wide) for name in pair().recipes
        ]
        metafunc.parametrize("recipe", recipes)


class Runs:
    """Runs cases of ``pipelines`` on forked ranks, each once; checkpoints are written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cached = lru_cache(maxsize=None)(self._run)

    def __call__(self, case: str, patched: bool, ranks: int = 1, **options: Any) -> list[Any]:
        return self._cached(case, patched, ranks, tuple(sorted(options.items())))

    def _run(self, case: str, patched: bool, ranks: int, options: tuple[tuple[str, Any], ...]) -> list[Any]:
        from standins import fp8_pipelines

        from mcore_patch.testing import run_ranks

        return run_ranks(fp8_pipelines.run, ranks, case, patched, self._folder, dict(options), timeout=300)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fp8"))
