"""Every optimizer that holds masters, on the installed megatron-core release; see also SCENARIOS, in test_masters."""

from __future__ import annotations

from typing import get_args

import pytest
from harness import Scenario, Session, release
from harness.scenario import Dtype, Optimizer

from .conftest import Runs, skip_unless_available

pytestmark = pytest.mark.edges

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
PLAIN = Scenario(fmt="torch", optimizer="plain")
FIRST = {"order": "weights-first", "then": "nothing"}


def _scenario(optimizer: str, **more: object) -> Scenario:
    scenario = Scenario().but(optimizer=optimizer, **more)
    skip_unless_available(scenario)
    return scenario


@pytest.mark.parametrize("order", [{}, FIRST], ids=["optimizer first", "weights first"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stock_loses_and_patched_does_not(run: Runs, optimizer: str, order: dict[str, str]) -> None:
    scenario = _scenario(optimizer, **order)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing > stock.numel // 2
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots


@pytest.mark.parametrize("disk", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_left_of_training_after_a_load(session: Session, optimizer: str, disk: Dtype) -> None:
    scenario = _scenario(optimizer, disk=disk)
    assert session.behave("after_training", scenario, True) == [0, 0]
    stock = sum(session.behave("after_training", scenario, False))
    # mcore-held masters are refreshed by every release; CPU copies of fp32 masters by none, those of shards from 0.13.
    never = optimizer == "offload" or (optimizer.startswith("offload") and release() < (0, 13))
    assert (stock > 0) == (disk == "float32" or never)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_goes_as_from_masters_that_were_set_by_hand(session: Session, optimizer: str) -> None:
    scenario = _scenario(optimizer)
    by_hand, patched = (session.behave("after_a_step", scenario, patched) for patched in (False, True))
    assert patched == by_hand


HOLDERS = {
    "distributed": "UsersDistributedOptimizer",
    "plain": "UsersFloat16OptimizerWithFloat16Params",
    "offload": "HybridDeviceOptimizer",
}


@pytest.mark.parametrize("optimizer", HOLDERS)
def test_a_users_subclass_is_what_its_base_is(session: Session, optimizer: str) -> None:
    scenario = _scenario(optimizer, experts=4, ep=2)
    for differing, held_by in session.behave("subclassed", scenario):
        assert differing == 0
        assert held_by == [HOLDERS[optimizer]]


def test_an_optimizer_that_is_not_known_is_left_alone_and_reported(session: Session) -> None:
    for given, differing, said in session.behave("stranger", Scenario()):
        assert given is True, "its state dict was kept from it"
        assert differing == 0
        assert said == [("Users", "an optimizer that we do not know holds it")]


@pytest.mark.parametrize("scenario", [PLAIN, PLAIN.but(pp=2, vpp=2, dp=1), PLAIN.but(experts=4, ep=2)], ids=str)
def test_a_state_dict_reaches_optimizers_that_know_no_model(session: Session, scenario: Scenario) -> None:
    skip_unless_available(scenario)
    answers = session.behave("more_exact_state_dict", scenario)
    assert [differing for differing, _ in answers] == [0] * scenario.world_size
    assert [chunks for _, chunks in answers] == [0] * scenario.world_size


def test_a_state_dict_is_refused_where_no_load_told_the_names(session: Session) -> None:
    assert all("no load of it was seen" in answer for answer in session.behave("names_unknown", PLAIN))


@pytest.mark.skipif(release() < (0, 17), reason="MimoOptimizer has come in 0.17")
def test_a_mimo_optimizer_hands_on_what_it_is_given(session: Session) -> None:
    assert session.behave("mimo", Scenario(fmt="torch")) == [(0, 0, 1)] * 2


@pytest.mark.parametrize("then", ["build", "reload", "state"])
def test_what_other_ranks_hold_is_not_remembered_here(session: Session, then: str) -> None:
    for before, after in session.behave("remembered_by_layer_wise", _scenario("layer-wise"), then):
        assert before > 0
        assert after == 0


@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
@pytest.mark.parametrize("disk", ["float32", "bfloat16"])
def test_nothing_is_done_for_fp32_parameters(session: Session, optimizer: str, disk: Dtype) -> None:
    fp32 = _scenario(optimizer, params="float32", disk=disk)
    assert session.behave("untouched", fp32) == [(0, 0, 0)] * 2


@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
def test_fp32_parameters_among_others_are_their_own_masters(run: Runs, optimizer: str) -> None:
    scenario = _scenario(optimizer, mixed=True)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert {m.name for m in stock.masters if not m.differing} == {m.name for m in stock.masters if "norm" in m.name}
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}], ids=str)
def test_expert_and_other_parallelism_at_once(run: Runs, optimizer: str, layout: dict[str, int]) -> None:
    scenario = _scenario(optimizer, dp=2, ep=2, experts=4, fmt="torch", **layout)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing > stock.numel // 2
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots
