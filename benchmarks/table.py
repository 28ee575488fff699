"""The table that is printed."""

from __future__ import annotations

from dataclasses import dataclass

NOISE = 0.05
"""How far above its goal, as a part of it, a figure may lie before it is called missed: a quiet machine is as noisy."""


@dataclass(frozen=True)
class Row:
    """One line: *stock* and *patched* in *unit* (None: could not be measured), and the goal for their ratio.

    Where there is no stock to compare with, the goal is one for *patched* itself.
    """

    what: str
    size: str
    stock: float | None
    patched: float | None
    unit: str
    goal: float | None = None

    @property
    def ratio(self) -> float | None:
        """Patched to stock; None without both."""
        return self.patched / self.stock if self.stock and self.patched is not None else None

    @property
    def judged(self) -> float | None:
        """What the goal is for."""
        return self.ratio if self.stock is not None else self.patched

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"<= {self.goal:g}"
        missed = self.goal is not None and self.judged is not None and self.judged > self.goal * (1 + NOISE)
        cells = [_number(self.stock), _number(self.patched), self.unit, _number(self.ratio), goal]
        return (
            f"{self.what:42}{self.size:>16}{cells[0]:>11}{cells[1]:>11} {cells[2]:6}{cells[3]:>9}{cells[4]:>10}"
            f"{'  missed' if missed else ''}"
        )


HEAD = f"{'':42}{'size':>16}{'stock':>11}{'patched':>11} {'':6}{'ratio':>9}{'goal':>10}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
