"""Our own steps fail on real megatron-core, on one rank or on both: no rank waits, and what is left is stock's."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Scenario, Session, faults

from .conftest import skip_unless_available

pytestmark = pytest.mark.edges

DIST = Scenario()
PARALLEL = Scenario(save="parallel", load="parallel")
STEPS = [
    "load.targets",
    "load._widen",
    "load.dtypes_on_disk",
    "load.remember",
    "modules.loading",
    "modules.leaf_loaded",
    "remember.Memory.loaded",
    "masters.keep_settled",
    "masters.write",
    "masters._fill",
    "optimizers._distributed_masters",
    "report.summary",
]
# What a fully parallel load asks for must be the same on all ranks. These read the same file and the same kind of state
# dict everywhere; a rank whose file cannot be read fails in stock as well.
ALIKE_ON_ALL_RANKS = {"load._widen", "load.dtypes_on_disk"}


def outcome(session: Session, scenario: Scenario, *how: Any) -> list[Any]:
    return session.call(2, faults.on_ranks, scenario, session.checkpoint(scenario), *how, timeout=60)


@pytest.fixture(scope="module")
def known(session: Session) -> dict[Scenario, tuple[list[Any], list[Any]]]:
    scenarios = [DIST, PARALLEL]
    return {scenario: (outcome(session, scenario, False), outcome(session, scenario, True)) for scenario in scenarios}


@pytest.mark.parametrize("scenario", [DIST, PARALLEL], ids=["dist", "parallel"])
@pytest.mark.parametrize("failing", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_stocks_masters_or_the_checkpoints(
    session: Session, known: Any, step: str, failing: tuple[int, ...], scenario: Scenario
) -> None:
    skip_unless_available(scenario)
    if scenario is PARALLEL and failing == (1,) and step in ALIKE_ON_ALL_RANKS:
        pytest.skip("ranks exchange tensors by dtype, so that one which stands aside alone does not fit")
    stock, patched = known[scenario]
    assert stock != patched, "the scenario proves nothing"
    found = outcome(session, scenario, True, step, failing)
    for rank, (masters, model, warnings) in enumerate(found):
        assert model == stock[rank][1]
        for master, *allowed in zip(masters, stock[rank][0], patched[rank][0], strict=True):
            assert master in allowed
        assert len(warnings) == len(set(warnings))
        assert bool(warnings) == (rank in failing)
