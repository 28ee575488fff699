"""Every optimizer that holds masters, on the installed megatron-core release; see also SCENARIOS, in test_masters."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from harness import Scenario, Session, probes, release, unavailable
from harness.scenario import Dtype, Optimizer
from mcore_patch.compat import line_named
from mcore_patch.compat._optimizers import HELD

from mcore_patch.testing import RankFailed

from .conftest import Runs, skip_unless_available

pytestmark = pytest.mark.edges

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
PLAIN = Scenario(fmt="torch", optimizer="plain")
FIRST = {"order": "weights-first", "then": "nothing"}


def _scenario(optimizer: str, **more: object) -> Scenario:
    scenario = Scenario().but(optimizer=optimizer, **more)
    skip_unless_available(scenario)
    return scenario


# Which classes hold masters under each optimizer.
HOLDERS = {
    "distributed": {"DistributedOptimizer"},
    "plain": {"Float16OptimizerWithFloat16Params"},
    "offload": {"HybridDeviceOptimizer"},
    "offload-precision-aware": {"HybridDeviceOptimizer"},
    "layer-wise": {"Float16OptimizerWithFloat16Params"},
    "muon": {"Float16OptimizerWithFloat16Params"},
    "muon-layer-wise": {"Float16OptimizerWithFloat16Params"},
    "muon-layout": {"Float16OptimizerWithFloat16Params", "DistributedOptimizer"},
}


@pytest.mark.parametrize("order", [{}, FIRST], ids=["optimizer first", "weights first"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stock_loses_and_patched_does_not(session: Session, optimizer: str, order: dict[str, str]) -> None:
    scenario = _scenario(optimizer, **order)
    stock, patched = session.run(scenario, "stock"), session.run(scenario, "patched", probes.report)
    assert stock.differing > stock.numel // 2
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots
    for rank, records in enumerate(patched.probes):
        assert {record.held_by for record in records} == HOLDERS[optimizer]
        assert {record.source for record in records} == {"checkpoint"}
        held = sorted((master.name, master.numel) for master in patched.masters if master.rank == rank)
        assert sorted((record.name, record.numel) for record in records) == held


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", [optimizer for optimizer in OPTIMIZERS if optimizer != "distributed"])
def test_a_state_dict_helps_stock_nowhere_but_in_the_distributed_optimizer(run: Runs, optimizer: str) -> None:
    scenario = _scenario(optimizer, fmt="torch")
    assert run(scenario, "patched-native").differing == 0
    if release() < (0, 14):
        return
    try:
        noticed = not run(scenario, "native").differing
    except RankFailed as failed:
        noticed = "AssertionError" not in failed.what
    assert not noticed


RESUMED = ["plain", "layer-wise", "muon", "muon-layer-wise", "muon-layout"]


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", RESUMED)  # the others are in test_masters, for each sharding of their state
@pytest.mark.parametrize("experts", [{}, {"experts": 4, "ep": 2}], ids=["dense", "experts"])
def test_masters_from_optimizer_state_win(run: Runs, optimizer: str, experts: dict[str, int]) -> None:
    if optimizer == "muon-layout" and experts:
        pytest.skip("the harness lays out no buffers for experts")
    # A distributed optimizer that Muon's factory builds has no gloo group, which the default asks for.
    sharding = "dp_reshardable" if optimizer == "muon-layout" else None
    scenario = _scenario(optimizer, then="resume", sharding=sharding, **experts)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing == patched.differing == 0
    assert patched.snapshots == stock.snapshots


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["distributed", "plain", "offload-precision-aware"])
def test_masters_from_optimizer_state_win_over_weights_that_came_first(run: Runs, optimizer: str) -> None:
    scenario = _scenario(optimizer, fmt="torch", order="weights-first", then="resume")
    patched = run(scenario, "patched")
    assert patched.differing == 0
    # While it is given state, HybridDeviceOptimizer takes a step, from the masters of before, and so moves parameters.
    assert patched.snapshots == run(scenario, "stock").snapshots or optimizer == "offload-precision-aware"


@pytest.mark.wide
@pytest.mark.parametrize("sharding", ["dp_zero_gather_scatter", "fully_reshardable", "dp_reshardable"])
def test_masters_of_experts_from_optimizer_state_win(run: Runs, sharding: str) -> None:
    scenario = _scenario("distributed", then="resume", sharding=sharding, experts=4, ep=2)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing == patched.differing == 0
    assert patched.snapshots == stock.snapshots


SUBCLASSED = {
    "distributed": "UsersDistributedOptimizer",
    "plain": "UsersFloat16OptimizerWithFloat16Params",
    "offload": "HybridDeviceOptimizer",
}


@pytest.mark.parametrize("optimizer", SUBCLASSED)
def test_a_users_subclass_is_what_its_base_is(session: Session, optimizer: str) -> None:
    scenario = _scenario(optimizer, experts=4, ep=2)
    for differing, held_by in session.behave("subclassed", scenario):
        assert differing == 0
        assert held_by == [SUBCLASSED[optimizer]]


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


has_fsdp = pytest.mark.skipif(release() < (0, 12), reason="FSDP has come in 0.12")
# Since 0.14 its parameters are the masters, and weights are loaded into them.
INTO_FSDP = "reload" if release() < (0, 14) else "fsdp_dtensor"


@has_fsdp
@pytest.mark.parametrize("way", ["weights-first", INTO_FSDP])
def test_masters_in_the_buffers_of_fsdp_are_the_checkpoints(session: Session, way: str) -> None:
    stock, patched = (session.behave("under_fsdp", Scenario(fmt="torch"), patched, way) for patched in (False, True))
    for was, answer in zip(stock, patched, strict=True):
        assert was["differing"] == 0 if way == "fsdp_dtensor" else was["differing"] > was["numel"] // 2
        assert answer["differing"] == answer["remembered"] == 0
        assert answer["reload"] == was["reload"]
        if way != "fsdp_dtensor":
            assert answer["said"] == {("Megatron-FSDP", "checkpoint", "load_state_dict")}


@has_fsdp
def test_parameters_that_fsdp_shares_out_are_left_to_it(session: Session) -> None:
    stock, patched = (
        session.behave("under_fsdp", Scenario(fmt="torch"), patched, "weights-first", "optim_grads_params")
        for patched in (False, True)
    )
    for was, answer in zip(stock, patched, strict=True):
        assert answer["differing"] == was["differing"] > 0
        assert answer["remembered"] == 0
        assert answer["said"] == {("Megatron-FSDP", "model", "Megatron-FSDP has shared out the parameter, too")}


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
def test_fp32_parameters_among_others_are_their_own_masters(session: Session, optimizer: str) -> None:
    scenario = _scenario(optimizer, mixed=True)
    stock, patched = session.run(scenario, "stock"), session.run(scenario, "patched", probes.report)
    norms = {master.name for master in stock.masters if "norm" in master.name}
    assert {master.name for master in stock.masters if not master.differing} == norms
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots
    assert not norms & {record.name for records in patched.probes for record in records}, "something was done"


@pytest.mark.parametrize("optimizer", ["plain", "offload", "layer-wise", "muon-layer-wise"])
def test_frozen_parameters_are_not_looked_at(session: Session, optimizer: str) -> None:
    assert session.behave("frozen", _scenario(optimizer)) == [(0, 0)] * 2


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "dp": 1, "ep": 1},
    {"tp": 2, "pp": 2, "vpp": 2},  # all at once, on eight ranks
    {"dp": 4, "instances": 2, "fmt": "torch_dist"},
]


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_expert_and_other_parallelism_at_once(run: Runs, optimizer: str, layout: dict[str, Any]) -> None:
    scenario = _scenario(optimizer, experts=4, **{"fmt": "torch", "dp": 2, "ep": 2, **layout})
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing > stock.numel // 2
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots


IN_TABLE = {
    "distributed": "`DistributedOptimizer`",
    "plain": "`Float16OptimizerWithFloat16Params`",
    "offload": "`HybridDeviceOptimizer` (CPU offload)",
    "layer-wise": "`LayerWiseDistributedOptimizer`",
}


@pytest.mark.parametrize("optimizer", IN_TABLE)
def test_the_table_in_the_readme_has_what_the_release_has(optimizer: Optimizer) -> None:
    covered = [held for held in HELD if held.optimizer == IN_TABLE[optimizer]]
    lines = [(line_named(held.first).key, line_named(held.last).key) for held in covered]
    listed = any(first <= release()[:2] <= last for first, last in lines)
    assert listed == (unavailable(Scenario(optimizer=optimizer), release()) is None)
