"""What `mcore-patch inspect` says of checkpoints that the installed release wrote."""

from __future__ import annotations

from collections import Counter

import pytest
from harness import Scenario, Session, release

from mcore_patch._cli import formats
from mcore_patch._cli.inspect_checkpoint import describe

from .conftest import skip_unless_available

pytestmark = pytest.mark.edges

WEIGHTS = [Scenario(fmt=fmt, disk=disk) for fmt in ("torch_dist", "zarr", "torch") for disk in ("float32", "bfloat16")]
RESUMED = [
    *(Scenario(then="resume", fmt=fmt) for fmt in ("zarr", "torch")),
    Scenario(then="resume", optimizer="plain"),
    Scenario(then="resume", optimizer="plain", fmt="torch"),
    Scenario(then="resume", sharding="fully_sharded_bucket_space"),
    Scenario(then="resume", sharding="fully_sharded_model_space"),
    Scenario(then="resume", sharding="dp_zero_gather_scatter"),
    Scenario(then="resume", sharding="fully_reshardable"),
    Scenario(then="resume", sharding="dp_reshardable"),
]


def contents_of(session: Session, scenario: Scenario) -> formats.Contents:
    skip_unless_available(scenario, "stock")
    contents = formats.read(session.checkpoint(scenario))
    assert contents.format == scenario.fmt
    assert contents.refused == []
    return contents


@pytest.mark.parametrize("scenario", WEIGHTS, ids=str)
def test_weights_have_the_dtype_they_were_written_with(session: Session, scenario: Scenario) -> None:
    contents = contents_of(session, scenario)
    weights = contents.of("weights")
    assert {entry.dtype for entry in weights} == {scenario.disk}
    assert sum(entry.nbytes for entry in weights) == sum(entry.elements for entry in weights) * (
        4 if scenario.disk == "float32" else 2
    )
    assert not contents.of("masters")
    assert not contents.of("optimizer")
    lossless = "The patch makes no difference." in describe(contents, "bf16")
    assert lossless == (scenario.disk == "bfloat16")


@pytest.mark.parametrize("scenario", RESUMED, ids=str)
def test_masters_and_optimizer_state_are_found(session: Session, scenario: Scenario) -> None:
    contents = contents_of(session, scenario)
    sums: Counter[str] = Counter()
    for entry in contents.entries:
        sums[entry.kind] += entry.elements
    assert contents.of("masters"), "the checkpoint has masters"
    assert contents.of("optimizer")
    if scenario.sharding == "dp_zero_gather_scatter":  # in one object, whose dtypes nobody can tell from outside
        return
    assert sums["masters"] >= sums["weights"], "buckets may be padded"
    assert sums["optimizer"] >= 2 * sums["weights"]
    assert {entry.dtype for entry in contents.of("masters")} == {"float32"}


def test_what_upstream_does_is_said_of_the_release_at_hand(session: Session) -> None:
    lines = describe(contents_of(session, Scenario()), "bf16")
    assert f"megatron-core {release()[0]}.{release()[1]} found here" in lines[-1]
