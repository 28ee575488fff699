"""The main case on real CUDA tensors and NCCL: an fp32 ``torch_dist`` checkpoint, a bf16 GPT, a distributed optimizer.

Needs torch with CUDA and megatron-core 0.10 or later, and nothing else; skipped without a GPU. It has been run on none
yet, only on a CPU with the stand-ins of ``mcore_patch.testing`` and gloo.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = min(2, torch.cuda.device_count())
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_cuda import main
main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), patched=sys.argv[5] == "patched")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_masters_are_the_checkpoints_on_cuda_and_parameters_are_stocks(tmp_path: Path) -> None:
    stock, patched = (run(tmp_path, mode) for mode in ("stock", "patched"))
    assert stock["devices"] == patched["devices"] == ["cuda"]
    assert stock["differing"] > 0.9 * stock["total"]
    assert patched["differing"] == 0
    assert patched["model"] == stock["model"]
    assert patched["stepped"] != patched["model"]


def run(folder: Path, mode: str) -> dict[str, Any]:
    """What the first of the ranks, each a fresh process, saw."""
    answer = folder / f"{mode}.json"
    started = [sys.executable, "-W", "ignore", "-c", CODE, str(Path(__file__).parent), str(answer)]
    ranks = [
        subprocess.Popen([*started, str(rank), str(RANKS), mode], stderr=subprocess.PIPE, text=True, cwd=folder)
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=600)
            assert rank.returncode == 0, errors[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def main(answer: str, rank: int, ranks: int, patched: bool) -> None:
    """One rank: write the checkpoint, load it as Megatron-LM does, compare the masters with it, step."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    torch.cuda.set_device(rank)
    store = Path(answer).with_suffix(".store").as_uri()
    torch.distributed.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    if patched:
        import mcore_patch

        mcore_patch.apply(strict=True)

    checkpoint = Path(answer).with_suffix("")
    if rank == 0:
        checkpoint.mkdir()
    torch.distributed.barrier()
    plain = build(torch.float32)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
    dist_checkpointing.save({"model": plain.sharded_state_dict()}, str(checkpoint))
    torch.distributed.barrier()

    model = build(torch.bfloat16)
    chunk = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), Float16Module(model.config, model)
    )
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, [chunk])
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    model.load_state_dict(loaded["model"], strict=False)
    optimizer.reload_model_params()

    part = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    wanted = dict(plain.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    devices = set()
    for parameters, mains in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
        for parameter, main_ in zip(parameters, mains, strict=True):
            place = part._get_model_param_range_map(parameter)["param"]
            source = wanted[names[id(parameter)]].detach().view(-1)[place.start : place.end]
            counts[0] += (main_.view(torch.int32) != source.view(torch.int32)).sum()
            counts[1] += source.numel()
            devices.add(main_.device.type)
    torch.distributed.all_reduce(counts)
    before = digest(model)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()
    if rank == 0:
        differing, total = counts.tolist()
        found = {"differing": differing, "total": total, "devices": sorted(devices), "model": before}
        Path(answer).write_text(json.dumps({**found, "stepped": digest(model)}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def build(dtype: torch.dtype) -> Any:
    """A GPT on the GPU, of plain torch modules."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    model: Any = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=64)
    return model.cuda()


def digest(model: Any) -> str:
    """A digest of the bits of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
