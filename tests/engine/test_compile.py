from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from mcore_patch.compat import Quirks, ReleaseLine, Target

from mcore_patch._engine.patching import Live, inspect_live, install

torch = pytest.importorskip("torch")

CODE = """
class Layer:
    def scale(self, x):
        return x * 2

    @classmethod
    def shift(cls, x):
        return x + 1

    @staticmethod
    def square(x):
        return x * x

def half(x):
    return x / 2
"""


@pytest.mark.parametrize("qualname", ["Layer.scale", "Layer.shift", "Layer.square", "half"])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_caller_sees_what_an_eager_one_sees(
    monkeypatch: pytest.MonkeyPatch, qualname: str, compiled_before: bool
) -> None:
    module: Any = types.ModuleType("megatron.compiled")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(CODE, vars(module))
    if compiled_before and qualname == "half":
        module.half = torch.compile(module.half, backend="eager")
    torch._dynamo.reset()
    target = Target("t", module.__name__, qualname, "", "", "")
    live = inspect_live(module, target, frozenset({"(self, x)", "(cls, x)", "(x)"}))
    assert isinstance(live, Live)

    def factory(original: Any, line: ReleaseLine) -> Any:
        return lambda *args: original(*args) + 10

    def caller(x: Any) -> Any:
        layer = module.Layer()
        return layer.scale(x) + layer.shift(x) * layer.square(x) - module.half(x)

    x = torch.arange(4.0)
    plain = caller(x)
    record = install(
        live, target, factory(live.function, ReleaseLine("", (), (), "", True, "", Quirks(False, False), {}))
    )
    compiled = torch.compile(caller, backend="eager", fullgraph=True)
    patched = caller(x)
    assert not torch.equal(patched, plain)
    assert torch.equal(compiled(x), patched)
    record.active = False
    assert torch.equal(compiled(x), plain)
