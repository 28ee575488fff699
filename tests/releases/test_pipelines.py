"""Pipelines that do more than load once, on the installed megatron-core release."""

from __future__ import annotations

import pytest
from harness import Scenario, Session, release

from .conftest import skip_unless_available

DIST = Scenario()
TORCH = Scenario(fmt="torch")
IN_PLACE_FIRST = Scenario(order="weights-first", then="nothing")
WIDE = pytest.mark.wide
EDGES = pytest.mark.edges


def _ring(fast: list[str], slow: list[str], ring: pytest.MarkDecorator = WIDE) -> list[object]:
    return [*fast, *(pytest.param(each, marks=ring) for each in slow)]


@pytest.mark.parametrize("scenario", [DIST, TORCH], ids=str)
def test_a_second_reload_keeps_the_checkpoints_values(session: Session, scenario: Scenario) -> None:
    assert session.behave("reload_twice", scenario) == [[0, 0]] * 2


@EDGES
def test_a_reload_after_training_has_begun_is_stocks(session: Session) -> None:
    assert session.behave("reload_after_forward", DIST) == [0, 0]


@pytest.mark.parametrize("second", ["float32", "bfloat16"])
def test_a_second_load_replaces_what_the_first_left(session: Session, second: str) -> None:
    other = Scenario(fmt="torch", disk=second)
    answers = session.behave("second_load", DIST, other, session.checkpoint(other))
    assert all(answer["second"] == 0 for answer in answers)
    assert all((answer["model"] == 0) == (second == "bfloat16") for answer in answers)
    assert (answers[0]["first"] == 0) == (second == "float32"), "both checkpoints have the same fp32 values"


@EDGES
def test_a_second_optimizer_over_the_same_model_gets_the_checkpoints_values(session: Session) -> None:
    assert session.behave("two_optimizers", IN_PLACE_FIRST) == [[0, 0]] * 2


@pytest.mark.parametrize("end", _ring(["reload", "forward"], ["load", "death"], EDGES))
@pytest.mark.parametrize("scenario", [DIST, pytest.param(TORCH, marks=WIDE)], ids=str)
def test_no_loaded_tensor_outlives_its_use(session: Session, scenario: Scenario, end: str) -> None:
    for remembered, after in session.behave("lifetime", scenario, end):
        assert remembered > 0, "nothing was remembered: the test proves nothing"
        assert after == 0


def test_a_load_that_loses_nothing_is_not_remembered(session: Session) -> None:
    lossless = Scenario(disk="bfloat16")
    assert session.behave("remembered_after_load", lossless) == [0, 0]
    assert all(count > 0 for count in session.behave("remembered_after_load", DIST))


@pytest.mark.parametrize(
    "scenario",
    [Scenario(save="parallel", load="parallel"), *(pytest.param(each, marks=WIDE) for each in (DIST, IN_PLACE_FIRST))],
    ids=str,
)
def test_no_collective_is_added(session: Session, scenario: Scenario) -> None:
    skip_unless_available(scenario)
    stock, patched = (session.behave("collectives", scenario, patched) for patched in (False, True))
    assert any(stock[0].values()), "no collective was counted: the test proves nothing"
    assert patched == stock


def test_frozen_parameters_are_not_looked_at(session: Session) -> None:
    assert session.behave("frozen", TORCH) == [(0, 0)] * 2


@pytest.mark.parametrize("layout", _ring(["flat", "module."], ["model", "model_0", "prefix"]))
def test_a_state_dict_may_be_in_any_layout_that_upstream_accepts(session: Session, layout: str) -> None:
    if layout == "prefix" and release() < (0, 9):
        pytest.skip("an optimizer of 0.6 to 0.8 knows no model, so a parameter goes by the whole name of its last load")
    assert session.behave("layouts", TORCH, layout) == [0, 0]


@pytest.mark.parametrize("layout", _ring(["model_0"], ["model", "module."]))
def test_a_state_dict_of_several_chunks_may_be_in_any_layout(session: Session, layout: str) -> None:
    scenario = Scenario(fmt="torch", pp=3, vpp=2, dp=1)
    assert session.behave("layouts", scenario, layout) == [0, 0, 0]


def test_a_state_dict_that_does_not_fit_is_one_error_that_names_names_and_shapes(session: Session) -> None:
    for answer in session.behave("mismatch", TORCH):
        missing, misshapen, text = answer.split("|")
        assert missing in text
        assert misshapen in text
        assert "(3, 5)" in text


BAD_CHECKPOINTS = ["no such directory", "empty directory"]
REST_OF_THE_BAD = ["no such directory", "extra", "missing", "non-contiguous", "non-finite"]


@pytest.mark.parametrize("what", _ring(["empty directory", "shape", "meta"], REST_OF_THE_BAD))
def test_bad_input_does_what_it_does_in_stock(session: Session, what: str) -> None:
    scenario = DIST if what in BAD_CHECKPOINTS else TORCH
    stock, patched = (session.behave("bad_input", scenario, what, patched) for patched in (False, True))
    if what in ("missing", "non-contiguous", "non-finite"):
        assert [answer[:200] for answer, _ in patched] == [answer[:200] for answer, _ in stock]
    else:
        assert [answer for answer, _ in patched] == [answer for answer, _ in stock]
    assert all(len(warnings) <= 1 for _, warnings in patched)


def test_non_finite_values_of_the_checkpoint_reach_the_masters(session: Session) -> None:
    assert session.behave("non_finite", TORCH) == [0, 0]


def test_reverting_gives_stock_back(session: Session) -> None:
    assert all(differing > 0 for differing in session.behave("reverted", DIST))


def test_one_line_on_the_first_rank_says_where_masters_came_from(session: Session) -> None:
    first, second = session.behave("log_lines", DIST)
    assert [level for level, _ in first] == ["INFO"]
    assert [level for level, _ in second] == ["DEBUG"]
    assert "from the checkpoint" in first[0][1]


def test_the_callers_sharded_tensors_are_as_they_were(session: Session) -> None:
    assert session.behave("template_is_untouched", DIST) == [True, True]


@pytest.mark.parametrize("reading", [False, True], ids=["every rank, allocating", "one rank, reading"])
def test_out_of_memory_at_disk_precision_falls_back_to_stock_for_that_load(session: Session, reading: bool) -> None:
    answers = session.behave("out_of_memory", DIST, reading)
    for rank, (differing_from_model, model_as_in_stock, warnings) in enumerate(answers):
        assert model_as_in_stock
        assert [("out of memory" in warning) for warning in warnings] == [True] * len(warnings)
        assert (differing_from_model == 0) == bool(warnings)
        # What one rank meets in reading, torch tells the others, but not from 0.18 on, where each rank reads by itself.
        assert warnings or (reading and rank > 0 and release() >= (0, 18))
