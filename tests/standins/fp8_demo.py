"""The fp8 case of the demo: a bf16 checkpoint, fp8 parameters, real Transformer Engine Python over stand-in kernels.

``tox -e demo-fp8``, or ``PYTHONPATH=tests python -m standins.fp8_demo [--out DIR] [--steps N]`` with megatron-core and
transformer-engine installed. It stands with the stand-ins, which are no part of the package.
"""

from __future__ import annotations

import argparse
import logging
from importlib import metadata
from pathlib import Path


def main() -> int:
    """Train stock, patched and never rounded on two ranks; 0 if patched is never rounded, and stock is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="where the picture goes (default: here)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipe", default="tensorwise")
    chosen = parser.parse_args()

    print("import megatron-core and transformer-engine over stand-in kernels ...", flush=True)
    from standins.install import stand_in_for_transformer_engine

    stand_in_for_transformer_engine()
    from mcore_patch._cli.demo_picture import draw
    from mcore_patch.testing import run_ranks
    from standins import fp8_pipelines

    logging.getLogger("megatron").setLevel(logging.ERROR)
    cases = {"stock": ("reload", False), "patched": ("reload", True), "never rounded": ("masters_by_hand", False)}
    runs = {}
    for title, (case, with_patch) in cases.items():
        print(f"{title}: load bf16 weights into an fp8 GPT, reload, train {chosen.steps} steps ...", flush=True)
        options = {"recipe": chosen.recipe, "disk": "bfloat16", "steps": chosen.steps}
        runs[title] = run_ranks(fp8_pipelines.run, 2, case, with_patch, chosen.out, options, timeout=900)[0]
    truth = runs["never rounded"].losses
    differences = {}
    for title, run in runs.items():
        differences[title] = [abs(loss - true) for loss, true in zip(run.losses, truth, strict=True)]
        losses = "  ".join(f"{loss:.6f}" for loss in run.losses[:5])
        worst = max(differences[title])
        masters = f"{run.differing} of {run.total} masters differ"
        print(f"  {title:13}  {masters:>33}  max |loss difference| {worst:<8.3g}  {losses}")
    stock, patched = runs["stock"], runs["patched"]
    subtitle = (
        f"megatron-core {metadata.version('megatron-core')}, Transformer Engine "
        f"{metadata.version('transformer-engine')}, {chosen.recipe}; masters unlike the checkpoint: "
        f"stock {stock.differing:,}, patched {patched.differing:,} of {stock.total:,}"
    )
    chosen.out.mkdir(parents=True, exist_ok=True)
    picture = chosen.out / "bf16-to-fp8.png"
    title = "bf16 checkpoint, fp8 parameters: training against a run that was never rounded"
    draw(picture, title, subtitle, differences["stock"], differences["patched"])
    print(f"Picture: {picture}")
    held = patched.differing == 0 and patched.losses == truth and stock.losses != truth
    print("OK: patched is never rounded, bit for bit." if held else "NOT OK: patched is not what was never rounded.")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
