"""Tell what lies in a checkpoint, and what masters would be made from it. Runs nothing that is in it.

Only metadata is read, without torch, a GPU or a process group. Exit codes: 0, all of it was read; 1, something in it
was refused or is broken, and the rest was read; 2, it is no checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Literal, get_args

from .formats import Contents, Entry, Kind, NotACheckpoint, read

Params = Literal["bf16", "fp16", "fp8", "fp32"]

_DTYPES: dict[Params, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_HOLDS = {
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "float32": {"float32", "bfloat16", "float16"},
}
"""The dtypes on disk that a parameter's dtype holds without loss."""

_KINDS: tuple[Kind, ...] = ("weights", "masters", "optimizer", "other")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mcore-patch inspect``."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a torch_dist, zarr, torch, DCP or safetensors checkpoint: a directory, or one file",
    )
    parser.add_argument(
        "--params",
        choices=get_args(Params),
        default="bf16",
        help="what the model that loads it holds its parameters in (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Print what lies in the checkpoint; the module's docstring has the exit codes."""
    progress = _Progress()
    try:
        contents = read(options.checkpoint, progress)
    except NotACheckpoint as error:
        print(f"mcore-patch inspect: {_printable(str(error))}", file=sys.stderr)
        return 2
    finally:
        progress.end()
    print(*map(_printable, describe(contents, options.params)), sep="\n")
    if contents.refused:
        print("\nNot read:", *map(_printable, contents.refused), sep="\n  ")
    return 1 if contents.refused else 0


def _printable(line: str) -> str:
    """The line without what a terminal would obey: names are the checkpoint's, and may be hostile, too."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def describe(contents: Contents, params: Params) -> list[str]:
    """The report as lines."""
    lines = [f"{contents.path}: {contents.format}", ""]
    lines += _table(contents)
    masters, optimizer = contents.of("masters"), contents.of("masters") + contents.of("optimizer")
    lines += ["", f"Optimizer state: {_held(optimizer)}.", f"Masters: {_held(masters)}.", ""]
    lines += _predict(contents, params)
    return lines


def _table(contents: Contents) -> list[str]:
    lines = [f"  {'':9}  {'dtype':13}  {'tensors':>9}  {'elements':>17}  {'bytes':>19}"]
    for kind in _KINDS:
        for dtype, entries in _by_dtype(contents.of(kind)).items():
            elements, nbytes = sum(e.elements for e in entries), sum(e.nbytes for e in entries)
            lines.append(f"  {kind:9}  {dtype:13}  {len(entries):>9,}  {elements:>17,}  {nbytes:>19,}")
    return lines


def _by_dtype(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Entries by dtype, most elements first. Objects, whose dtypes nobody can tell from outside, come last."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.dtype or "(objects)", []).append(entry)
    return dict(sorted(grouped.items(), key=lambda item: -sum(entry.elements for entry in item[1])))


def _held(entries: list[Entry]) -> str:
    if not entries:
        return "none"
    return "yes, " + ", ".join(f"{len(group)} x {dtype}" for dtype, group in _by_dtype(entries).items())


def _predict(contents: Contents, params: Params) -> list[str]:
    """What the masters would be, with stock and with patched megatron-core."""
    lines = []
    if contents.of("masters"):
        lines += [
            "If the pipeline loads the optimizer state: stock and patched restore the masters from it, and the weights "
            "do not matter.",
            "If it does not (--finetune, --no-load-optim):",
        ]
    weights = _by_dtype(contents.of("weights"))
    if not weights:
        return [*lines, "No weights were found, so no masters can be made from them."]
    lines.append(f"Masters made from the weights, for parameters in {params}:")
    lost = 0
    for dtype, entries in weights.items():
        stock, patched, loses = masters_from(dtype, params)
        elements = sum(entry.elements for entry in entries)
        lost += elements if loses else 0
        lines += [f"  {dtype}, {elements:,} elements", f"    stock:   {stock}", f"    patched: {patched}"]
    if params == "fp8":
        lines.append("  Parameters that such a model keeps in bf16 (norms, embeddings): see --params bf16.")
    lines.append(
        f"The patch makes a difference for up to {lost:,} elements." if lost else "The patch makes no difference."
    )
    return [*lines, *_upstream()]


def masters_from(disk: str, params: Params) -> tuple[str, str, bool]:
    """What stock, and what patched megatron-core makes a master from, and whether these differ.

    ``disk`` is the dtype of the checkpoint's tensor.
    """
    if disk.startswith("float8") or "float" not in disk:
        same = f"what the parameter holds: no other value can be had from {disk}"
        return same, same, False
    if params == "fp32":
        same = "no separate master: the parameter itself is fp32"
        return same, same, False
    patched = f"the checkpoint's {disk} value" + ("" if disk == "float32" else ", as fp32")
    if params == "fp8":
        return "the value after quantization to fp8 and back, or the random initial value", patched, True
    if disk in _HOLDS[_DTYPES[params]]:
        return patched, patched, False
    return f"the value rounded to {_DTYPES[params]}", patched, True


def _upstream() -> list[str]:
    """What the megatron-core at hand does by itself, if there is one."""
    import mcore_patch
    from mcore_patch.compat import line_named

    line = mcore_patch.status().line
    if line is None:
        return []
    return [f"Stock, in the megatron-core {line} found here: {line_named(line).native}"]


class _Progress:
    """Says on stderr how far it is: in place on a terminal, else a line now and then. Silent where all is quick."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + 1
        self._shown = False

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now >= self._next and done < of:
            self._next = now + (0.2 if self._terminal else 10)
            self._shown = True
            text = f"reading metadata: {done:,} of {of:,} ({100 * done // of} %)"
            print(
                f"\r{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True
            )

    def end(self) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)
