"""``mcore_patch.testing`` without megatron: ranks that answer, fail, die and hang; ``torch.cuda`` on a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mcore_patch.testing import RankFailed, run_ranks


def _sum_of_ranks(start: int) -> int:
    total = torch.tensor(start + torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ranks_talk_to_each_other_and_answer(start: str) -> None:
    # A function of this file can be imported by name only where pytest's import mode allows it.
    function = _sum_of_ranks if start == "fork" else torch.distributed.get_world_size
    arguments = (10,) if start == "fork" else ()
    answers = run_ranks(function, 2, *arguments, start=start)
    assert answers == ([21, 21] if start == "fork" else [2, 2])


def test_a_failure_has_the_traceback_of_its_rank() -> None:
    def fail_on_rank_1() -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("only here")
        torch.distributed.barrier()

    with pytest.raises(RankFailed, match=r"rank 1 failed:[\s\S]*fail_on_rank_1[\s\S]*only here") as caught:
        run_ranks(fail_on_rank_1, 2)
    assert caught.value.rank == 1


def test_a_rank_that_dies_is_told_at_once() -> None:
    def die_on_rank_0() -> None:
        if torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailed, match="rank 0 died"):
        run_ranks(die_on_rank_0, 2)


def test_a_rank_that_hangs_is_ended() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 has not answered within 3 s"):
        run_ranks(time.sleep, 1, 60, timeout=3)


def test_helpers_of_a_rank_are_ended_with_it(tmp_path: Path) -> None:
    def leave_a_helper() -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    (helper,) = run_ranks(leave_a_helper, 1)
    for _ in range(100):
        state = Path(f"/proc/{helper}/stat")
        # A helper that nobody has waited for yet is a zombie.
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the helper is still alive")


def test_cuda_is_the_cpu() -> None:
    code = """
import torch
from mcore_patch.testing import stand_in_for_cuda
stand_in_for_cuda()
stand_in_for_cuda()
here = torch.device("cpu")
assert torch.cuda.current_device() == here
assert torch.cuda.device_count() == 1
assert torch.zeros(2, device="cuda").device == here
assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device == here
assert torch.zeros(2, device=0).to("cuda:0").cuda().device == here
assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device == here
assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
assert torch.zeros(2).bfloat16().type() == "torch.cuda.BFloat16Tensor"
torch.cuda.manual_seed(7)
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3))
torch.cuda.random.default_generators[here].manual_seed(7)
assert torch.equal(first, torch.rand(3))
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().record_event(torch.cuda.Event()).synchronize()
torch.cuda.synchronize()
assert torch.cuda.memory_allocated() == 0
assert torch.cuda.get_device_properties(0).multi_processor_count
assert not torch.cuda.is_available()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
