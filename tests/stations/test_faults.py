"""Each of our own steps fails, at each of its calls, in every kind of pipeline: what is left is stock's.

The steps are found in the sources (see ``harness.faults``), so one that is written tomorrow is in here tomorrow.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import tiny
from harness.faults import Plan, fault, steps, taken
from pipelines import PIPELINES, Bits, run

from mcore_patch._stations import parameters

pytestmark = pytest.mark.edges

# These have no stock behaviour to fall back to: they are what falls back, or what puts back.
EXEMPT = {
    "guard.standing_aside": "it is what stands aside; four statements, none of which can fail",
    "load.through_strategy": "what fails in it before the strategy's own load is guarded",
    "load._read": "runs the strategy's own load, and what that raises is the caller's",
    "load._Widened.write_back": "a parameter must not stay as it was when it could not be given what was loaded",
    "load._restore": "puts the caller's targets back, by assignment",
    "load._Widened.restore": "puts the caller's targets back, by assignment",
    "report.Reporter.records": "only mcore_patch.report() calls it",
    "report.report": "it is mcore_patch.report()",
    "report.Reporter.clear": "only tests call it",
    "report.Reporter.__init__": "runs on import",
    "remember.Memory.__init__": "runs on import",
    "remember.Memory.clear": "only mcore_patch.revert() calls it",
    "identity.ByIdentity.clear": "only mcore_patch.revert() calls it",
    "remember.Memory.__len__": "only tests call it",
    "remember.Memory.empty": "the truth value of a dictionary",
    "identity.ByIdentity.__len__": "the truth value of a dictionary",
    "disk._Shards.set_up_planner": "torch's LoadPlanner demands it, and nobody calls it",
    "disk._Shards.create_global_plan": "torch's LoadPlanner demands it, and nobody calls it",
    "disk._Shards.finish_plan": "torch's LoadPlanner demands it, and nobody calls it",
    "disk._Shards.load_bytes": "torch's LoadPlanner demands it, and nobody calls it",
    "verify._is_on": "reads a variable of the environment",
    "verify.verified": "raises where MCORE_PATCH_VERIFY=1 asks for it",
    "load._is_out_of_memory": "the load has failed already",
    "verify._verify": "raises where MCORE_PATCH_VERIFY=1 asks for it",
    "verify._differing": "raises where MCORE_PATCH_VERIFY=1 asks for it",
    "verify._rank": "raises where MCORE_PATCH_VERIFY=1 asks for it",
}


STOCK: dict[str, tuple[Bits, Bits]] = {}
OURS: dict[str, tuple[Bits, Bits]] = {}
TAKEN: dict[str, set[str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch, tiny.installed():
        monkeypatch.setattr(parameters, "CHUNK", 5)  # so that a master is written, and can fail, in several pieces
        for name in PIPELINES:
            tiny.forget()
            STOCK[name] = run(name)[:2]
        with tiny.patched():
            for name in PIPELINES:
                tiny.forget()
                TAKEN[name] = taken(lambda name=name: OURS.update({name: run(name)[:2]}))
            yield


def discovered() -> list[str]:
    return [step for step in steps() if step not in EXEMPT]


# A master that was written before, in the same pipeline, and is not refreshed by megatron-core.
BEFORE = {
    "forward_then_reload": "torch_rank_0",
    "fp16_masters_reloaded": "precision_aware_fp16",
    "optimizer_state_of_a_hybrid_one": "hybrid",
}


def may_be(name: str) -> list[set[bytes]]:
    """Whose values each master of a pipeline may have: stock's, the checkpoint's, those that it had before."""
    outcomes = [STOCK[name], OURS[name]] + ([OURS[BEFORE[name]]] if name in BEFORE else [])
    return [set(values) for values in zip(*(masters for _, masters in outcomes), strict=True)]


# The step fails at every call; at the second one only, when one master has been written; at the fourth and fifth.
PLANS = [(1, 10**9), (2, 1), (4, 2)]


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.wide)], ids=["few", "all"])
@pytest.mark.parametrize("step", discovered())
def test_a_step_that_fails_leaves_stocks_value_or_the_checkpoints(
    step: str, few: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name for name in PIPELINES if step in TAKEN[name]]
    assert names, "no pipeline takes this step: add one that does"
    few_names = names[:: -(-len(names) // 4)]
    for name, (first, times) in itertools.product(few_names if few else names, PLANS):
        tiny.forget()
        caplog.clear()
        plan = Plan(first, times)
        with caplog.at_level(logging.WARNING, "mcore_patch"), fault(step, plan):
            model, masters, values = run(name)
        for index, (found, value, allowed) in enumerate(zip(masters, values, may_be(name), strict=True)):
            # What the parameter holds is stock's value for it, also where remainders have moved it off a tie.
            assert found in {*allowed, value}, f"{name}, {plan}: master {index} is neither stock's nor the checkpoint's"
        for found, stock, ours in zip(model, STOCK[name][0], OURS[name][0], strict=True):
            assert found in (stock, ours), f"{name}, {plan}: the model is not stock's"
        said = [each.getMessage() for each in caplog.records if "out of memory" not in each.getMessage()]
        assert len(said) == len(set(said)), f"{name}, {plan}: said twice"
        assert all("failed; megatron-core's own behaviour is kept" in each for each in said), said
        assert bool(said) == (plan.hits >= first), f"{name}, {plan}: failed silently, or said so without need"
