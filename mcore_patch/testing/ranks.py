"""Several gloo ranks in one call: a small stand-in for ``torchrun``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_DEFAULT_TIMEOUT = 120.0


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds the rank's own traceback."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(rank, what)
        self.rank = rank
        self.what = what

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = _DEFAULT_TIMEOUT,
    start: str = "fork",
) -> list[Any]:
    """Runs ``function(*args)`` on *world_size* ranks at once and returns their results, by rank.

    Every rank is a process in which ``torch.distributed`` is initialised with gloo. *start* is ``"fork"`` (what this
    process has imported is there already, and *function* may be any callable) or ``"spawn"`` (a fresh interpreter;
    *function* and *args* are pickled, so *function* must be importable). Results are pickled in either case.

    Raises :class:`RankFailed` as soon as one rank raises or dies, or when *timeout* seconds are over. In every case no
    process is left: each rank leads a session of its own, because distributed savers leave helpers that outlive a rank.
    """
    context: Any = multiprocessing.get_context(start)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _one_thread():
        processes: list[BaseProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank, args=(theirs, rank, world_size, Path(folder, "store"), timeout, function, args)
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            return _collect(processes, connections, timeout)
        finally:
            for process in processes:
                _end(process)
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """``OMP_NUM_THREADS=1`` for the processes that are started inside, unless the caller has chosen."""
    chosen = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if not chosen:
            del os.environ["OMP_NUM_THREADS"]


def _collect(processes: list[BaseProcess], connections: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = [rank for rank in range(len(processes)) if rank not in results]
        sources: list[Any] = [connections[rank] for rank in waiting]
        sources += [processes[rank].sentinel for rank in waiting]
        ready = wait(sources, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(waiting[0], f"has not answered within {timeout:g} s; nor have ranks {waiting[1:]}")
        for rank in waiting:
            if connections[rank] in ready:
                results[rank] = _receive(rank, connections[rank])
            elif processes[rank].sentinel in ready and not connections[rank].poll():
                raise RankFailed(rank, f"died with exit code {processes[rank].exitcode}")
    return [results[rank] for rank in range(len(processes))]


def _receive(rank: int, connection: Connection) -> Any:
    try:
        succeeded, payload = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise RankFailed(rank, "died before it answered") from None
    if not succeeded:
        raise RankFailed(rank, f"failed:\n{payload}")
    return payload


def _end(process: BaseProcess) -> None:
    """Kills the rank and all that it has started. The rank has led its own session since its first statement."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Killed before it had a session of its own?
    process.kill()
    process.join()


def _rank(
    connection: Connection,
    rank: int,
    world_size: int,
    store: Path,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.setsid()
    parent = os.getppid()
    try:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        answer = pickle.dumps((True, function(*args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with contextlib.suppress(OSError):
        connection.send_bytes(answer)
    # Stay until the parent ends all ranks together, for a peer may still be reading from this one; or until it is gone.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)
