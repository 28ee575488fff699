"""One fork server, its checkpoints, and the results that several tests look at, for the release that is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Result, Scenario, Session, release, unavailable
from harness.scenario import Mode


class Runs:
    """Runs scenarios, each once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._results: dict[tuple[Scenario, Mode], Result] = {}

    def __call__(self, scenario: Scenario, mode: Mode) -> Result:
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


def skip_unless_available(scenario: Scenario, mode: Mode = "patched") -> None:
    """Skips where the release has no such thing, with the reason."""
    reason = unavailable(scenario, release(), mode)
    if reason:
        pytest.skip(reason)
