"""Show on this machine's CPU what rounded masters do to training, with stock megatron-core and with mcore_patch.

Every run is a set of fresh processes. One picture per case is left in --out, and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import mcore_patch

from .demo_cases import CASES, Case, Run, Trained

NEEDED = {"torch": "torch", "megatron.core": "megatron-core", "psutil": "psutil"}
"""Module -> distribution. Without psutil, megatron-core's ``torch_dist`` writer waits for ever."""

ENVIRONMENT = {
    # A machine with GPUs shows the same as one without.
    "CUDA_VISIBLE_DEVICES": "",
    # megatron-core's fused functions would be compiled, which takes longer than all the rest.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""What the ranks find in their environment on top of this process's."""

RUNS: dict[Run, str] = {
    "stock": "load it, reload_model_params()",
    "patched": "the same, after mcore_patch.apply()",
    "never rounded": "as stock, then set every master by hand to the checkpoint's value",
}

_LOSSES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mcore-patch demo``."""
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where the picture goes (default: here)"
    )
    parser.add_argument(
        "--steps",
        type=_at_least(2),  # The first loss comes before any master is used, so it is the same whatever they are.
        default=60,
        metavar="N",
        help="training steps, at least 2 (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=_at_least(1), default=2, metavar="N", help="data-parallel ranks (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Show every case; 0 if each came out as promised, 1 if not, 2 if the demo cannot run here.

    As promised: patched, no master differs from the checkpoint and every loss is bit for bit that of the run that was
    never rounded; and for stock neither is so.
    """
    missing = [distribution for module, distribution in NEEDED.items() if not _installed(module)]
    if missing:
        needed = " and ".join(missing)
        print(
            f"mcore-patch demo needs {needed}, not found by {sys.executable}. "
            f"To install: pip install 'mcore-patch[demo]' {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    from mcore_patch.testing import RankFailed

    options.out.mkdir(parents=True, exist_ok=True)
    versions = f"{_megatron()}, torch {metadata.version('torch')}"
    print(f"{versions}: a small GPT on the CPU, {options.ranks} data-parallel rank(s), every run in fresh processes")
    try:
        return max([_show(case, options.out, options.ranks, options.steps) for case in CASES])
    except RankFailed as error:
        print(f"\nmcore-patch demo: a run has failed, so there is nothing to compare: {error}", file=sys.stderr)
        return 1


def _show(case: Case, out: Path, ranks: int, steps: int) -> int:
    print(f"\n{case.title}:")
    runs: dict[Run, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="mcore-patch-demo-") as name, _environment():
        with _phase("write the checkpoint with megatron-core (torch_dist)"):
            _on_ranks(1, False, "write", case, Path(name))
        for title, about in RUNS.items():
            with _phase(f"{title}: {about}, train {steps} steps"):
                runs[title] = _on_ranks(ranks, title == "patched", "train", case, Path(name), title, steps)[0]
    differences = {title: _differences(trained, runs["never rounded"]) for title, trained in runs.items()}
    _print_table(runs, differences)
    _draw(out / f"{case.name}.png", case, runs, differences)

    return _judge(runs["stock"], runs["patched"], runs["never rounded"])


def _differences(trained: Trained, truth: Trained) -> list[float]:
    """|loss difference| by step."""
    return [abs(loss - true) for loss, true in zip(trained.losses, truth.losses, strict=True)]


def _judge(stock: Trained, patched: Trained, never_rounded: Trained) -> int:
    """The exit code, and a sentence on it."""
    kept = patched.differing == never_rounded.differing == 0 and patched.losses == never_rounded.losses
    lost = stock.differing > 0 and stock.losses != never_rounded.losses
    if kept and lost:
        print("OK: patched, every master is the checkpoint's and every loss is bit for bit that of 'never rounded'.")
    if not kept:
        print("NOT OK: patched, masters or losses are not exactly those of 'never rounded'.")
    if not lost:
        print("NOT OK: stock has lost nothing here, so that the others equal 'never rounded' shows nothing.")
    return 0 if kept and lost else 1


def _print_table(runs: dict[Run, Trained], differences: dict[Run, list[float]]) -> None:
    print(f"\n  {'':13}  {'masters unlike the checkpoint':>29}  {'max |loss difference|':>21}  first losses")
    for title, trained in runs.items():
        masters = f"{trained.differing:,} of {trained.masters:,}"
        losses = "  ".join(f"{loss:.6f}" for loss in trained.losses[:_LOSSES_SHOWN])
        print(f"  {title:13}  {masters:>29}  {max(differences[title]):>21.3g}  {losses}")
    print("  (Masters are counted before the first step. Loss differences are to 'never rounded'.)\n")


def _draw(file: Path, case: Case, runs: dict[Run, Trained], differences: dict[Run, list[float]]) -> None:
    if not _installed("matplotlib"):
        print("No picture was made: that needs matplotlib (pip install 'mcore-patch[demo]').")
        return
    from .demo_picture import draw

    stock, patched = runs["stock"], runs["patched"]
    subtitle = (
        f"{_megatron()}; masters unlike the checkpoint before step 1: "
        f"stock {stock.differing:,} of {stock.masters:,}, patched {patched.differing:,}"
    )
    draw(
        file,
        f"{case.title}: training against a run that was never rounded",
        subtitle,
        differences["stock"],
        differences["patched"],
    )
    print(f"Picture: {file}")


def _on_ranks(ranks: int, patched: bool, step: str, *args: Any) -> list[Any]:
    """What ``demo_ranks.<step>(*args)`` returns on each of *ranks* fresh processes (*patched*: under apply())."""
    from mcore_patch.testing import run_ranks

    return run_ranks(_on_rank, ranks, patched, step, args, start="spawn")


def _on_rank(patched: bool, step: str, args: tuple[Any, ...]) -> Any:
    import logging

    from mcore_patch.testing import stand_in_for_cuda, stand_in_for_era

    # What megatron-core says about its own age, or about a missing GPU, says nothing about the demo.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if patched:
        mcore_patch.apply()
    stand_in_for_cuda()
    stand_in_for_era()
    from . import demo_ranks

    return getattr(demo_ranks, step)(*args)


@contextmanager
def _phase(what: str) -> Iterator[None]:
    """One line: what is being done, and when it is done, how long it took."""
    print(f"  {what} ...", end=" ", flush=True)
    begin = time.monotonic()
    yield
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name in ENVIRONMENT:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _megatron() -> str:
    return f"megatron-core {mcore_patch.status().versions.stated}"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"at least {least} expected, {value} found")
        return value

    return number
