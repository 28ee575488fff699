"""Every way from a checkpoint to the masters, on the installed megatron-core release: stock loses, patched does not."""

from __future__ import annotations

import pytest
from harness import Scenario
from harness.__main__ import SCENARIOS

from .conftest import Runs, skip_unless_available

# What every run does; the rest is the wide ring.
FAST = {
    "torch",
    "torch_dist",
    "torch_dist parallel",
    "zarr on device",
    "tp 2 from tp 1",
    "pp 2 tied",
    "moe vpp torch",
    "weights before ddp",
    "in place",
    "optimizer state without masters",
    "missing torch",
    "fp16 disk",
    "change",
}
LOSSLESS = {"bf16 disk", "bf16 disk torch", "fp32 params", "fp32 params torch"}
# zarr without load_directly_on_device keeps the dtype on disk up to load_state_dict, like torch. What is missing from a
# state dict that was loaded in place is in the parameters all the same, so there is nothing to expect of "missing".
PASSED_OVER = {"missing"}

LOSING = [name for name in SCENARIOS if name not in LOSSLESS | PASSED_OVER and not name.startswith("resume")]
RESUMING = [name for name in SCENARIOS if name.startswith("resume")]


def _ring(names: list[str], fast: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.wide) for name in names]


@pytest.mark.parametrize("name", _ring(LOSING, FAST))
def test_masters_are_the_checkpoints_where_stock_rounds_them(run: Runs, name: str) -> None:
    scenario = SCENARIOS[name]
    skip_unless_available(scenario)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing > stock.numel // 2, "stock does not show the defect: the scenario proves nothing"
    assert patched.numel == stock.numel
    assert [master for master in patched.masters if master.differing] == []
    assert patched.snapshots == stock.snapshots, "a parameter or buffer is not what stock leaves"


@pytest.mark.parametrize("name", _ring(LOSING, {"torch_dist", "moe vpp torch", "vpp torch"}))
def test_a_state_dict_given_to_reload_reaches_every_master(run: Runs, name: str) -> None:
    scenario = SCENARIOS[name]
    if scenario.missing:
        pytest.skip("a parameter without a tensor is an error here, see test_pipelines")
    skip_unless_available(scenario, "patched-native")
    patched = run(scenario, "patched-native")
    assert [master for master in patched.masters if master.differing] == []
    assert patched.snapshots == run(scenario, "stock").snapshots


@pytest.mark.parametrize("name", _ring(sorted(LOSSLESS), {"bf16 disk"}))
def test_where_nothing_is_lost_masters_are_what_stock_makes_them(run: Runs, name: str) -> None:
    stock, patched = run(SCENARIOS[name], "stock"), run(SCENARIOS[name], "patched")
    assert stock.differing == patched.differing == 0
    assert patched.snapshots == stock.snapshots


@pytest.mark.parametrize("name", _ring(RESUMING, {"resume torch", "resume dp_zero_gather_scatter"}))
def test_masters_from_optimizer_state_win(run: Runs, name: str) -> None:
    scenario = SCENARIOS[name]
    skip_unless_available(scenario)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    assert stock.differing == 0
    assert [master for master in patched.masters if master.differing] == []
    assert patched.snapshots == stock.snapshots


@pytest.mark.wide
@pytest.mark.parametrize("disk", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("params", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["torch", "torch_dist"])
def test_every_pair_of_dtypes(run: Runs, fmt: str, disk: str, params: str) -> None:
    scenario = Scenario(fmt=fmt, disk=disk, params=params)
    stock, patched = run(scenario, "stock"), run(scenario, "patched")
    loses = params != "float32" and disk != params
    assert (stock.differing > 0) == loses
    assert patched.differing == 0
    assert patched.snapshots == stock.snapshots
