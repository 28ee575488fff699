"""The demo's picture. Importing this module imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw(file: Path, title: str, subtitle: str, stock: Sequence[float], patched: Sequence[float]) -> None:
    """Write a PNG of |loss - loss of the never-rounded run| by step; *stock* and *patched* hold these differences."""
    steps = range(1, len(stock) + 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, stock, color="tab:red", label=f"stock (at most {max(stock):.1e})")
    worst = max(patched)
    label = f"patched (at most {worst:.1e})" if worst else "patched (0 at every step)"
    # Exactly 0 lies on the axis: drawn over it.
    axes.plot(steps, patched, color="tab:blue", linewidth=3, label=label, clip_on=False, zorder=3)
    axes.set(xlabel="training step", ylabel="|loss - loss of the run never rounded|", xlim=(1, len(stock)))
    # Room for the legend; and an axis to be drawn on even if all is 0.
    axes.set_ylim(0, 1.3 * max(*stock, *patched) or 1)
    axes.ticklabel_format(axis="y", scilimits=(0, 0), useMathText=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", ncols=2)
    figure.suptitle(title)
    axes.set_title(subtitle, fontsize="small")
    figure.savefig(file, dpi=150)
