"""Runs scenarios on the release on the path and prints a line for each: ``python -m tests.harness [WORD...]``."""

from __future__ import annotations

import argparse
from importlib import metadata
from typing import get_args

from .scenario import Mode, Scenario, unavailable
from .session import Session, release

_MOE = Scenario(dp=2, ep=2, experts=24)
_PARALLEL = Scenario(save="parallel", load="parallel")
_ZARR = Scenario(fmt="zarr")
_OFFLOAD_RESUME = Scenario(optimizer="offload-precision-aware", then="resume")
_FIRST = Scenario(order="weights-first", then="nothing")

SCENARIOS: dict[str, Scenario] = {
    "torch": Scenario(fmt="torch"),
    "torch, ddp.load_state_dict": Scenario(fmt="torch", write="ddp"),
    "torch_dist": Scenario(),
    "torch_dist parallel": _PARALLEL,
    "torch_dist, no dp": Scenario(dp=1),
    "zarr": _ZARR,
    "zarr parallel": _PARALLEL.but(fmt="zarr"),
    "zarr on device": _ZARR.but(load="on-device"),
    "zarr two-stage": _ZARR.but(load="two-stage", dp=1),
    "zarr two-stage, tp 2": _ZARR.but(load="two-stage", dp=1, tp=2),
    "tp 2": Scenario(tp=2),
    "tp 2 from tp 1": Scenario(tp=2, dp=1, saved_as=(1, 1)),
    "pp 2": Scenario(pp=2, dp=1),
    "pp 2 tied": Scenario(pp=2, dp=1, tied=True),
    "tied": Scenario(tied=True),
    "vpp": Scenario(pp=2, vpp=2, dp=1),
    "vpp torch": Scenario(fmt="torch", pp=2, vpp=2, dp=1),
    "vpp pp 3": Scenario(pp=3, vpp=2, dp=1),
    "vpp pp 3 torch": Scenario(fmt="torch", pp=3, vpp=2, dp=1),
    "moe": _MOE,
    "moe parallel": _MOE.but(save="parallel", load="parallel"),
    "moe torch": _MOE.but(fmt="torch"),
    "moe vpp torch": _MOE.but(fmt="torch", pp=2, vpp=2),
    "plain optimizer": Scenario(optimizer="plain"),
    "plain optimizer torch": Scenario(fmt="torch", optimizer="plain"),
    "weights before optimizer": _FIRST,
    "weights before optimizer torch": _FIRST.but(fmt="torch"),
    "weights before optimizer zarr": _FIRST.but(fmt="zarr"),
    "weights before plain optimizer": _FIRST.but(optimizer="plain"),
    "weights before ddp": _FIRST.but(order="before-ddp"),
    "weights before ddp torch": _FIRST.but(fmt="torch", order="before-ddp"),
    "in place": _FIRST.but(write="in-place"),
    "in place, optimizer first": Scenario(write="in-place"),
    "in place, zarr on device": _FIRST.but(write="in-place", fmt="zarr", load="on-device"),
    "in place, zarr two-stage": _FIRST.but(write="in-place", fmt="zarr", load="two-stage", dp=1, tp=2),
    "optimizer state without masters": Scenario(then="optimizer-state-without-masters"),
    "optimizer state without masters torch": Scenario(fmt="torch", then="optimizer-state-without-masters"),
    "offload": Scenario(optimizer="offload"),
    "offload torch": Scenario(fmt="torch", optimizer="offload"),
    "offload precision-aware": Scenario(optimizer="offload-precision-aware"),
    "offload precision-aware torch": Scenario(fmt="torch", optimizer="offload-precision-aware"),
    "weights before offload precision-aware": _FIRST.but(optimizer="offload-precision-aware"),
    "weights before offload": _FIRST.but(optimizer="offload"),
    "layer-wise": Scenario(optimizer="layer-wise"),
    "layer-wise torch": Scenario(fmt="torch", optimizer="layer-wise"),
    "layer-wise moe": _MOE.but(optimizer="layer-wise"),
    "weights before layer-wise": _FIRST.but(optimizer="layer-wise"),
    "plain optimizer vpp torch": Scenario(fmt="torch", optimizer="plain", pp=2, vpp=2, dp=1),
    "plain optimizer moe": _MOE.but(optimizer="plain"),
    "mixed": Scenario(mixed=True),
    "mixed plain optimizer": Scenario(mixed=True, optimizer="plain"),
    "two instances": Scenario(instances=2),
    "two instances of dp 2": Scenario(dp=4, instances=2),
    "moe, tp 2": _MOE.but(tp=2),
    "moe, pp 2": _MOE.but(pp=2),
    "missing": Scenario(missing=3),
    "missing torch": Scenario(fmt="torch", missing=3),
    "fp16 disk": Scenario(disk="float16"),
    "fp16 disk torch": Scenario(fmt="torch", disk="float16"),
    "fp16 disk moe": _MOE.but(disk="float16"),
    "fp16 params": Scenario(params="float16"),
    "change": Scenario(change=True),
    "change torch": Scenario(fmt="torch", change=True),
    "bf16 disk": Scenario(disk="bfloat16"),
    "bf16 disk torch": Scenario(fmt="torch", disk="bfloat16"),
    "fp32 params": Scenario(params="float32"),
    "fp32 params torch": Scenario(fmt="torch", params="float32"),
    "resume torch": Scenario(fmt="torch", then="resume"),
    "resume plain optimizer torch": Scenario(fmt="torch", optimizer="plain", then="resume"),
    "resume plain optimizer": Scenario(optimizer="plain", then="resume"),
    # Upstream restores these masters into tensors that are not stepped.
    "offload, resume torch": _OFFLOAD_RESUME.but(fmt="torch"),
    "offload, resume dp_zero_gather_scatter": _OFFLOAD_RESUME.but(sharding="dp_zero_gather_scatter"),
    "resume offload fully_sharded_model_space": _OFFLOAD_RESUME.but(sharding="fully_sharded_model_space"),
    "resume offload fully_reshardable": _OFFLOAD_RESUME.but(sharding="fully_reshardable"),
    "resume offload dp_reshardable": _OFFLOAD_RESUME.but(sharding="dp_reshardable"),
    "resume layer-wise": Scenario(optimizer="layer-wise", then="resume"),
    "resume fully_sharded_model_space": Scenario(then="resume", sharding="fully_sharded_model_space"),
    "resume fully_sharded_bucket_space": Scenario(then="resume", sharding="fully_sharded_bucket_space"),
    "resume dp_zero_gather_scatter": Scenario(then="resume", sharding="dp_zero_gather_scatter"),
    "resume fully_reshardable": Scenario(then="resume", sharding="fully_reshardable"),
    "resume dp_reshardable": Scenario(then="resume", sharding="dp_reshardable"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run the scenarios whose name contains one of these (default: all)")
    parser.add_argument("--mode", choices=get_args(Mode), action="append")
    options = parser.parse_args()
    modes: list[Mode] = options.mode or ["stock", "native"]
    print(f"megatron-core {metadata.version('megatron-core')}")
    with Session() as session:
        for name, scenario in SCENARIOS.items():
            if options.words and not any(word in name for word in options.words):
                continue
            for mode in modes:
                if unavailable(scenario, release(), mode):
                    continue
                print(f"{name:44} {mode:14} {_line(session, scenario, mode)}", flush=True)


def _line(session: Session, scenario: Scenario, mode: Mode) -> str:
    try:
        result = session.run(scenario, mode)
    except Exception as error:
        return f"{scenario.world_size} ranks  {str(error).strip().splitlines()[-1]}"
    return f"{scenario.world_size} ranks {result.differing:7} / {result.numel:7} {result.seconds:5.1f} s"


if __name__ == "__main__":
    main()
