"""Masters that Transformer Engine's FusedAdam holds: fp32, fp16 with a scale, and 16-bit remainders of the parameters.

On the installed pair of megatron-core (0.11 and later) and Transformer Engine (2.1 and later).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from .conftest import pair

MCORE = tuple(int(part) for part in pair().mcore.split("."))
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(MCORE < (0, 11), reason="the precision-aware optimizer has come in 0.11"),
    pytest.mark.skipif(pair().te.startswith("1."), reason="0.11 and 0.12 ask for a newer FusedAdam"),
]

# 0.11 and 0.12 store remainders whenever masters are fp32, and take them for an option from 0.13 on.
MODES = ["remainders", "fp16"] if MCORE < (0, 13) else ["fp32", "remainders", "fp16"]
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("precision-aware")

    @cache
    def runs(
        case: str, patched: bool, mode: str, disk: str, ranks: int = 1, steps: int = 0, sharding: str | None = None
    ) -> list[Any]:
        from standins import precision_aware

        from mcore_patch.testing import run_ranks

        arguments = (case, patched, folder, mode, disk, steps, sharding)
        return run_ranks(precision_aware.run, ranks, *arguments, timeout=200)

    return runs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["reload", "weights_first"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stock_loses_and_patched_does_not(run: Run, case: str, mode: str, ranks: int) -> None:
    stock, patched = (run(case, patched, mode, "float32", ranks) for patched in (False, True))
    assert stock[0].differing > stock[0].total // 2
    assert patched[0].differing == 0
    assert {rank.model for rank in patched} == {patched[0].model}, "data-parallel ranks hold the same parameters"
    assert (patched[0].model == stock[0].model) == (mode != "remainders"), "exact ties are rounded half away there"
    assert patched[0].held_by == ("FusedAdam",)


@pytest.mark.skipif(MCORE < (0, 12), reason="the experts of these tests need a grouped MLP of 0.12 or later")
@pytest.mark.parametrize("mode", MODES)
def test_experts_have_an_optimizer_of_their_own(run: Run, mode: str) -> None:
    stock, patched = (run("experts", patched, mode, "float32", 2) for patched in (False, True))
    assert [rank.extra for rank in patched] == [2, 2], "dense and expert parameters share one"
    assert stock[0].differing > stock[0].total // 2
    assert patched[0].differing == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_reload_keeps_them(run: Run, mode: str, ranks: int) -> None:
    answers = run("reload_again", True, mode, "float32", ranks)
    assert answers[0].differing == 0
    assert [rank.masters for rank in answers] == [rank.masters for rank in run("reload", True, mode, "float32", ranks)]
    assert {rank.model for rank in answers} == {answers[0].model}


@pytest.mark.skipif(not pair().steps, reason="upstream's own step does not work with this pair, see compat/")
@pytest.mark.parametrize("mode", MODES)
def test_the_first_step_takes_the_state_as_it_is(run: Run, mode: str) -> None:
    by_hand, stock = (run(case, False, mode, "float32", steps=3)[0] for case in ("by_hand", "reload"))
    patched = run("reload", True, mode, "float32", steps=3)[0]
    assert by_hand.differing == 0
    assert patched.losses == by_hand.losses
    assert patched.masters == by_hand.masters
    assert stock.masters != by_hand.masters


@pytest.mark.skipif(not pair().steps, reason="upstream's own step does not work with this pair, see compat/")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("disk", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["after_training", "unseen_after_training"])
def test_nothing_is_left_of_training_after_a_load(run: Run, case: str, mode: str, disk: str) -> None:
    stock, patched = (run(case, patched, mode, disk)[0] for patched in (False, True))
    assert stock.differing > stock.total // 2
    assert patched.differing == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_was_changed_wins(run: Run, mode: str) -> None:
    assert run("edited", True, mode, "float32")[0].differing == 0


@pytest.mark.skipif(not pair().steps, reason="upstream's own step does not work with this pair, see compat/")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("disk", ["bfloat16", "float32"])
def test_optimizer_state_without_masters_leaves_the_checkpoints(run: Run, mode: str, disk: str) -> None:
    if mode == "remainders" and MCORE < (0, 13):
        pytest.skip("upstream makes fp32 entries for remainders, and FusedAdam refuses them (AssertionError)")
    stock, patched = (run("state_without_masters", patched, mode, disk)[0] for patched in (False, True))
    assert stock.differing > stock.total // 2
    assert patched.differing == 0


SHARDINGS = {
    None: ((0, 11), (0, 19)),
    "fully_sharded_model_space": ((0, 11), (0, 15)),
    "dp_zero_gather_scatter": ((0, 11), (0, 19)),
    "fully_reshardable": ((0, 15), (0, 19)),
    # Up to 0.16 upstream gives FusedAdam the mark of a padding, a bool, for a tensor (AttributeError).
    "dp_reshardable": ((0, 17), (0, 19)),
}
_GATHERED = (None, "dp_zero_gather_scatter", "fully_reshardable")
OFFERED = [name for name, (first, last) in SHARDINGS.items() if first <= MCORE[:2] <= last]


@pytest.mark.skipif(not pair().steps, reason="upstream's own step does not work with this pair, see compat/")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharding", OFFERED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_from_optimizer_state_win(run: Run, mode: str, sharding: str | None, ranks: int) -> None:
    if mode == "remainders" and (MCORE < (0, 13) or sharding in _GATHERED):
        pytest.skip("upstream takes remainders for fp32 on the way, and FusedAdam refuses them (AssertionError)")
    stock, patched = (run("resume", patched, mode, "float32", ranks, sharding=sharding) for patched in (False, True))
    for answer in patched:
        wrong, moved = answer.extra
        assert moved > 0, "masters are what parameters are: the test proves nothing"
        assert wrong == 0
    assert [answer.extra[0] for answer in stock] == [0] * ranks


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_of_fp32_parameters_is_what_was_loaded(run: Run, mode: str) -> None:
    stock, patched = (run("fp32_parameters", patched, mode, "float32")[0] for patched in (False, True))
    assert stock.extra[0] > 0
    assert patched.extra[0] == 0
    assert patched.differing == 0
