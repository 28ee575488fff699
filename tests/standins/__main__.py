"""Shows what the megatron-core and the Transformer Engine on the path do to the masters of fp8 parameters.

``python -m standins --ranks 1 2 --recipes tensorwise delayed`` prints a line for each case; mcore_patch has no
part in it. Cases: B, a state dict and ``reload_model_params()``; C, the same with ``state_dict=``; E, weights before
the optimizer; T, a ``torch_dist`` checkpoint; D, the losses of three steps, with the masters of case B and with the
right ones.
"""

from __future__ import annotations

import argparse
import logging
import time
from importlib import metadata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "delayed"], help="'none' for a bf16 model")
    parser.add_argument("--cases", nargs="+", default=list("BCED"))
    parser.add_argument("--disk", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the checkpoint")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--precision-aware", action="store_true")
    parser.add_argument("--remainders", action="store_true")
    parser.add_argument("--main-params", choices=["float32", "float16"], default="float32")
    arguments = parser.parse_args()

    from standins.install import stand_in_for_transformer_engine

    stand_in_for_transformer_engine()
    import torch

    from mcore_patch.testing import run_ranks
    from standins import fp8_cases
    from standins.fp8_model import Options

    # What megatron says to every user (GPTModel is deprecated, ...) says nothing about a case.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    pair = f"mcore {metadata.version('megatron-core')} TE {metadata.version('transformer-engine')}"
    for ranks in arguments.ranks:
        for recipe in arguments.recipes:
            options = Options(
                recipe=None if recipe == "none" else recipe,
                experts=arguments.experts,
                expert_parallel=arguments.expert_parallel,
                precision_aware=arguments.precision_aware,
                store_param_remainders=arguments.remainders,
                main_params_dtype=getattr(torch, arguments.main_params),
            )
            for case in arguments.cases:
                begin = time.monotonic()
                try:
                    answer = run_ranks(fp8_cases.run, ranks, case, options, getattr(torch, arguments.disk))[0]
                except Exception as error:
                    answer = f"FAILED {error}"
                print(f"{pair} {recipe} {ranks}r {case}: {answer} ({time.monotonic() - begin:.1f} s)", flush=True)


# A saver's helper process imports this module, too.
if __name__ == "__main__":
    main()
