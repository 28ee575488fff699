"""The words in which the registry is written. Standard library only: tools read it without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Checked:
    """What was read, for one target, in the releases of one line.

    `signatures` are in the normal form of `mcore_patch._engine.source` (names, kinds, and `=` for "has a
    default"). `fingerprints` maps the hash of the target's source text to the releases that carry that text;
    it is empty where only the signature is checked.
    """

    signatures: tuple[str, ...]
    fingerprints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """An attribute that may be patched, and why.

    `checked` is set for targets outside megatron-core, which belong to no release line. `after` is a module
    that must have been imported to its end as well, because the wrapper needs it. `accepts_also` names
    parameters, default None, that the patched callable takes on releases whose own does not. A target that is
    not `needed` may be skipped without a warning. `until` says what upstream must do for the patch to go.
    """

    id: str
    module: str
    qualname: str
    why: str
    url: str
    until: str
    kind: Literal["wrap"] = "wrap"
    needed: bool = True
    after: str = ""
    accepts_also: tuple[str, ...] = ()
    checked: Checked | None = None

    @property
    def path(self) -> str:
        """`module:qualname`, as entry points write it."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Quirks:
    """How the releases of a line differ in ways that the patches must know at run time.

    `reload_accepts_state_dict`: `reload_model_params` takes the checkpoint's state dict.
    `zarr`: the zarr format can be loaded.
    `state_dict_normalizers`: static methods of `DistributedOptimizer`, called in this order with
    `(flat state dict, model chunk)`, that rewrite a state dict in place to the model's parameter names.
    """

    reload_accepts_state_dict: bool
    zarr: bool
    state_dict_normalizers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReleaseLine:
    """One megatron-core minor release: what was checked of every target in its releases.

    A target that is absent from `targets` is in none of the releases; a build of this line that has it all the same (a
    commit on the way to the next line) is judged by the other lines' checks. `native` says in one sentence what
    upstream does by itself. `pythons` are those from 3.10 on that its wheels are built for and allow. `torch` is the
    newest that there was when the line came out (for the newest line, the newest of all), and `numpy_2` whether its
    releases run with numpy 2. `also_needs` are requirements that its releases import and do not declare, where today's
    versions will not do.
    """

    name: str
    releases: tuple[str, ...]
    pythons: tuple[str, ...]
    torch: str
    numpy_2: bool
    native: str
    quirks: Quirks
    targets: Mapping[str, Checked]
    also_needs: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, ...]:
        """The name as a tuple of numbers, to order lines and to compare releases with them."""
        return tuple(int(part) for part in self.name.split("."))


@dataclass(frozen=True)
class Pair:
    """A megatron-core release and a Transformer Engine release that the fp8 tests run together.

    `recipes` are those that the pair supports for parameters: delayed, tensorwise, blockwise, mxfp8. A `fast` pair is
    tested on every run, with delayed and tensorwise; the others on demand. `steps` is False where upstream's own
    training step does not work with the pair, or has no stand-in: there, masters are compared and no step is taken.
    """

    mcore: str
    te: str
    recipes: tuple[str, ...]
    fast: bool = False
    steps: bool = True
