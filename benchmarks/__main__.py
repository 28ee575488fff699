"""Print what mcore_patch costs on the megatron-core that is installed: one table, of ratios to stock.

It measures and judges nothing: the exit code is 0 unless something could not be run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from .measured import Measured
from .processes import WAYS, Way, in_fresh_process, in_turn, seconds_of
from .table import HEAD, Row

SMALL = ("4 M", (4, 256, 1024))
LARGE = ("153 M", (12, 1024, 1024))
"""Name, and (layers, hidden size, vocabulary)."""

STOCK_RELOAD_BYTES = 2 + 4
PATCHED_RELOAD_BYTES = STOCK_RELOAD_BYTES + (4 + 2) + (4 + 4 + 4)
"""Bytes of operands that a reload reads and writes per master, when the checkpoint is fp32 and the parameter bf16.

Stock: the parameter is read, the master written. Patched: that comes first; then the check reads the checkpoint's
tensor and the parameter; then the tensor is read again, the old master is read (to count what changed) and the new one
written. Temporaries are not counted.
"""

FOOTNOTES = f"""
"per byte" counts the operands that are read and written for each master, temporaries left out: {STOCK_RELOAD_BYTES} in
stock (bf16 parameter read, fp32 master written); {PATCHED_RELOAD_BYTES} in patched (the same, then fp32 source and
parameter read to check, then source and old master read and new master written). With bf16 on disk both move
{STOCK_RELOAD_BYTES}. "memory" is how far the first load takes resident memory above what it was, at its peak."""


def main() -> None:
    """Measure, with a line for each piece of work under way, then print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: whether it works, not how fast")
    parser.add_argument("--full", action="store_true", help="let upstream match 31,000 names, too (a minute)")
    options = parser.parse_args()
    # Fused functions would be compiled in every process.
    os.environ.update(CUDA_VISIBLE_DEVICES="", TORCHDYNAMO_DISABLE="1", PYTHONWARNINGS="ignore")

    rows = [
        *_imports(rounds=3 if options.quick else 15),
        *_matching([500] if options.quick else [500, 8_000, 31_000], 31_000 if options.full else 8_000),
    ]
    for name, shape in [SMALL] if options.quick else [SMALL, LARGE]:
        for disk in ("float32", "bfloat16"):
            rounds, repeats = (1, 2) if options.quick else (5, 5)
            rows += _loading(name, shape, disk, rounds, repeats)

    versions = f"megatron-core {metadata.version('megatron-core')}, torch {metadata.version('torch')}"
    print(f"\n{versions}; 1 rank; CPU time, but for memory\n")
    print(HEAD)
    for row in rows:
        print(row)
    print(FOOTNOTES)


def _imports(rounds: int) -> Iterator[Row]:
    print("import", flush=True)
    for statement, goal in (("import mcore_patch", 20.0), ("import mcore_patch; mcore_patch.apply()", None)):
        yield Row(statement, "", None, 1e3 * seconds_of(statement, rounds), "ms", goal)


def _matching(counts: list[int], stock_up_to: int) -> Iterator[Row]:
    """Upstream's and ours; beyond *stock_up_to* names upstream's is left out."""
    for count in counts:
        print(f"match {count:,} names", flush=True)
        stock = in_fresh_process("stock", "match", count, False, 1) if count <= stock_up_to else None
        patched = in_fresh_process("stock", "match", count, True, 5)
        size = f"{count:,}"
        goal = 0.01 if count == 31_000 and stock is not None else None
        yield Row("match names", size, _times(stock, 1e3), _times(patched, 1e3), "ms", goal)
        yield Row("match names, per name", size, _times(stock, 1e6 / count), _times(patched, 1e6 / count), "us")


def _loading(name: str, shape: tuple[int, int, int], disk: str, rounds: int, repeats: int) -> Iterator[Row]:
    """Load, reload and step: *rounds* processes each way, medians over them of their medians."""
    what = f"{disk} -> bfloat16"
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        print(f"load, reload, step: {what}, {name}", flush=True)
        in_fresh_process("stock", "write", shape, disk, Path(folder))
        measured = in_turn(rounds, "measure", shape, Path(folder), repeats)

    def median(way: Way, value: Callable[[Measured], float | None]) -> float | None:
        known = [each for each in map(value, measured[way]) if each is not None]
        return statistics.median(known) if known else None

    def row(
        title: str,
        value: Callable[[Measured], float | None],
        unit: str,
        factor: float,
        goal: float | None = None,
        moved: dict[Way, int] | None = None,
    ) -> Row:
        stock, patched = (_times(median(way, value), factor / (moved[way] if moved else 1)) for way in WAYS)
        return Row(f"{title}, {what}", name, stock, patched, unit, goal)

    lossless = disk == "bfloat16"
    masters = measured["stock"][0].masters
    moved: dict[Way, int] = {
        "stock": masters * STOCK_RELOAD_BYTES,
        "patched": masters * (STOCK_RELOAD_BYTES if lossless else PATCHED_RELOAD_BYTES),
    }
    yield row("load", lambda each: each.load, "ms", 1e3, 1.0 if lossless else None)
    yield row("load, memory", lambda each: each.peak, "MB", 1e-6)
    yield row("reload", lambda each: each.reload, "ms", 1e3)
    yield row("reload per byte", lambda each: each.reload, "ns/B", 1e9, 1.1, moved)
    yield row("optimizer step", lambda each: each.step, "ms", 1e3, 1.0)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


if __name__ == "__main__":
    main()
