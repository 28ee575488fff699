"""What a test of a megatron-core pipeline needs on a machine without a GPU.

Nothing in here is loaded by ``mcore_patch.apply()``. Four parts, each named for what it stands in for:

* :func:`stand_in_for_cuda` (``testing/cuda.py``): ``torch.cuda`` on a CPU;
* :func:`stand_in_for_era` (``testing/era.py``): the torch, apex and transformer-engine of a release's time;
* :func:`stand_in_for_offload` (``testing/offload.py``): host memory, for CPU offloading of the optimizer;
* :func:`run_ranks` (``testing/ranks.py``): a job of several gloo ranks in one call.

The order matters: ``stand_in_for_cuda()``, then the others, then whatever else imports ``megatron``.
"""

from __future__ import annotations

from mcore_patch.testing.cuda import stand_in_for_cuda
from mcore_patch.testing.era import stand_in_for_era
from mcore_patch.testing.offload import stand_in_for_offload
from mcore_patch.testing.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks", "stand_in_for_cuda", "stand_in_for_era", "stand_in_for_offload"]
