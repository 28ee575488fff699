"""The fork server: one process that has imported megatron, from which the ranks of every scenario are forked."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from .scenario import Mode, Result, Scenario


def release() -> tuple[int, ...]:
    """The megatron-core release on the path, as numbers; from metadata, so nothing is imported."""
    return Version(metadata.version("megatron-core")).release[:3]


class Session:
    """Runs scenarios; checkpoints that they share are written once and kept until :meth:`close`.

    Importing megatron takes 4 s and happens once, in the server; forking the ranks of a scenario takes 0.2 to 1.5 s.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="harness-"))
        self._server: Any = None
        self._connection: Any = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.close_server()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close_server(self) -> None:
        """Ends the server, if there is one; the next call starts another. Checkpoints stay."""
        if self._server is not None:
            self._connection.close()
            self._server.join(10)
            self._server.kill()
            self._server = None

    def call(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """``function(*args)`` on *world_size* ranks forked from the server; both must be picklable. Results by rank.

        Raises what ``run_ranks`` raises.
        """
        if self._server is None:
            self._start()
        request = pickle.dumps((world_size, function, args, timeout))
        try:
            self._connection.send_bytes(request)
            succeeded, answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close_server()
            raise RuntimeError("the server that ranks are forked from has died; its output says why") from error
        if not succeeded:
            raise answer
        results: list[Any] = answer
        return results

    def checkpoint(self, scenario: Scenario) -> Path:
        """The checkpoint that *scenario* loads, written now if no scenario before needed the same."""
        from . import checkpoints

        writer = checkpoints.writer_of(scenario)
        folder = self.folder / checkpoints.name_of(writer)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self.call(writer.world_size, _write, writer, folder)
            (folder / "complete").touch()
        return folder

    def run(
        self,
        scenario: Scenario,
        mode: Mode = "stock",
        probe: Callable[..., Any] | None = None,
        timeout: float = 120,
    ) -> Result:
        """Runs *scenario*. When it is done, *probe*, if any, is called on every rank with its ``pipeline.Pipeline``.

        *probe* is pickled by name, so the server must be able to import it; ``probes`` has some. Raises
        ``RankFailed`` with the traceback if a rank fails, so what upstream asserts on can be tested as well.
        """
        folder = self.checkpoint(scenario)
        begin = time.monotonic()
        ranks = self.call(scenario.world_size, _run, scenario, mode, folder, probe, timeout=timeout)
        return Result(
            scenario=scenario,
            mode=mode,
            masters=[master for masters, _, _ in ranks for master in masters],
            snapshots=[snapshot for _, snapshot, _ in ranks],
            seconds=time.monotonic() - begin,
            probes=[probed for _, _, probed in ranks],
        )

    def behave(self, name: str, scenario: Scenario, *args: Any) -> list[Any]:
        """The function *name* of ``behaviours`` on the ranks of *scenario*, with its checkpoint; answers by rank."""
        return self.call(scenario.world_size, _behave, name, scenario, self.checkpoint(scenario), *args)

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # megatron's fused functions would be compiled for nothing: the figures do not depend on it.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._server = context.Process(target=_serve, args=(theirs,), daemon=False)
        self._server.start()
        theirs.close()


def _serve(connection: Any) -> None:
    """The server's life: import everything once, then fork ranks on request until the other end closes."""
    from mcore_patch.testing import run_ranks, stand_in_for_cuda, stand_in_for_era, stand_in_for_offload

    stand_in_for_cuda()
    stand_in_for_era()
    stand_in_for_offload()
    # What megatron says to every user of this release (GPTModel is deprecated, ...) says nothing about a scenario.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from . import pipeline  # noqa: F401

    while True:
        try:
            world_size, function, args, timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, run_ranks(function, world_size, *args, timeout=timeout))
        except Exception as error:
            answer = (False, error)
        try:
            payload = pickle.dumps(answer)
        except Exception:
            payload = pickle.dumps((False, RuntimeError(traceback.format_exc())))
        connection.send_bytes(payload)


def _write(writer: Scenario, folder: Path) -> None:
    from . import pipeline

    pipeline.write(writer, folder)


def _run(scenario: Scenario, mode: Mode, folder: Path, probe: Callable[..., Any] | None) -> tuple[Any, Any, Any]:
    from . import pipeline

    return pipeline.run(scenario, mode, folder, probe)


def _behave(name: str, *args: Any) -> Any:
    from . import behaviours

    return getattr(behaviours, name)(*args)
