"""Checkpoints as they lie on disk: which one a scenario needs, and the ways to load it."""

from __future__ import annotations

from .scenario import Scenario


def writer_of(scenario: Scenario) -> Scenario:
    """The scenario that writes the checkpoint of *scenario*; equal for scenarios that can share one."""
    tp, pp = scenario.saved_as or (scenario.tp, scenario.pp)
    resume = scenario.then == "resume"
    return Scenario(
        then="resume" if resume else "nothing",
        optimizer=scenario.optimizer if resume else "distributed",
        sharding=scenario.sharding,
        fmt=scenario.fmt,
        disk=scenario.disk,
        save=scenario.save,
        params=scenario.params if resume else scenario.disk,
        dp=scenario.dp,
        tp=tp,
        pp=pp,
        vpp=scenario.vpp if pp > 1 else 1,
        ep=scenario.ep,
        experts=scenario.experts,
        tied=scenario.tied,
        mixed=scenario.mixed and resume,
    )


def name_of(writer: Scenario) -> str:
    return str(writer).replace(" ", ",") or "default"
