"""One fork server, its checkpoints, and the results that several tests look at, for the release that is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import Result, Scenario, release, unavailable
from harness import Session as PlainSession
from harness.scenario import Mode

_asked: list[Scenario] = []


class Session(PlainSession):
    """A session that notes which scenarios a test asks for."""

    def run(self, scenario: Scenario, mode: Mode = "stock", *args: Any, **kwargs: Any) -> Result:
        _asked.append(scenario)
        return super().run(scenario, mode, *args, **kwargs)

    def behave(self, name: str, scenario: Scenario, *args: Any) -> list[Any]:
        _asked.append(scenario)
        return super().behave(name, scenario, *args)


class Runs:
    """Runs scenarios, each once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._results: dict[tuple[Scenario, Mode], Result] = {}

    def __call__(self, scenario: Scenario, mode: Mode) -> Result:
        _asked.append(scenario)
        if (scenario, mode) not in self._results:
            self._results[scenario, mode] = self.session.run(scenario, mode)
        return self._results[scenario, mode]


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    with Session() as opened:
        yield opened


@pytest.fixture(scope="session")
def run(session: Session) -> Runs:
    return Runs(session)


@pytest.fixture(autouse=True)
def _scenario_in_the_report(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """The optimizer and the format of a test are those of the first scenario that it asks for."""
    _asked.clear()
    yield
    for scenario in _asked[:1]:
        record_property("optimizer", scenario.optimizer)
        record_property("format", scenario.fmt)


def skip_unless_available(scenario: Scenario, mode: Mode = "patched") -> None:
    """Skips where the release has no such thing, with the reason."""
    _asked.append(scenario)
    reason = unavailable(scenario, release(), mode)
    if reason:
        pytest.skip(reason)
