"""The patch on the installed release, in fresh processes: every target verified, on and off again, in any order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

IMPORT = """
from mcore_patch.testing import stand_in_for_cuda, stand_in_for_era
stand_in_for_cuda(); stand_in_for_era()
import megatron.core.dist_checkpointing, megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer
import contextlib
with contextlib.suppress(ModuleNotFoundError):  # 0.6 has none
    import megatron.core.dist_checkpointing.strategies.fully_parallel
"""
APPLY = "import mcore_patch; mcore_patch.apply(strict=True)\n"
SNAPSHOT = """
import sys
from mcore_patch.compat import TARGETS
def snapshot():
    found = {}
    for target in TARGETS.values():
        owner = sys.modules.get(target.module)
        *path, name = target.qualname.split('.')
        for part in path:
            owner = vars(owner).get(part) if owner is not None else None
        if owner is not None:
            found[target.id] = vars(owner).get(name)
    found['alias'] = sys.modules['megatron.core.dist_checkpointing'].load
    return found
"""
REPORT = """
import json
status = mcore_patch.status()
print(json.dumps([[t.id, str(t.state), str(t.verdict)] for t in status.targets]))
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        cwd=tempfile.gettempdir(),  # so that the checkout is not found before the installed package
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(APPLY + IMPORT, id="before", marks=pytest.mark.edges),
        pytest.param(IMPORT + APPLY, id="after", marks=pytest.mark.edges),
        pytest.param(APPLY + IMPORT + APPLY, id="both"),
    ],
)
def test_every_target_is_patched_and_verified_whenever_apply_is_called(code: str) -> None:
    targets = json.loads(python(code + REPORT))
    by_state = {state: [name for name, found, _ in targets if found == state] for _, state, _ in targets}
    assert set(by_state) <= {"applied", "not-needed", "pending"}, by_state
    # The zarr strategies are imported only when zarr is used, the layer-wise optimizer (0.16, 0.17) when it is.
    assert set(by_state.get("pending", [])) <= {
        "tensorstore_load",
        "two_stage_load",
        "layer_wise_init",
        "layer_wise_load",
    }
    assert {verdict for _, state, verdict in targets if state == "applied"} == {"verified"}


def test_reverting_restores_every_attribute_by_identity() -> None:
    code = f"""{IMPORT}{SNAPSHOT}
before = snapshot()
{APPLY}
during = snapshot()
mcore_patch.revert()
after = snapshot()
assert before['alias'] is not during['alias']
untouched = [name for name in before if before[name] is not None and during[name] is before[name]]
assert not untouched, untouched
assert all(after[name] is before[name] for name in before)
print('ok')
"""
    assert python(code) == "ok"


@pytest.mark.edges
def test_the_switch_in_the_environment_leaves_everything_alone() -> None:
    code = f"""{IMPORT}{SNAPSHOT}
before = snapshot()
import mcore_patch; mcore_patch.apply()
assert snapshot() == before
print('ok')
"""
    assert python(code, MCORE_PATCH="0") == "ok"


@pytest.mark.edges
def test_apply_imports_neither_torch_nor_megatron() -> None:
    assert python(
        "import sys, mcore_patch; mcore_patch.apply()\nprint('torch' in sys.modules, 'megatron' in sys.modules)"
    ) == ("False False")
