"""The command line: ``mcore-patch COMMAND``. Every command is a module with three names, listed in one table.

* the first line of its docstring is what ``--help`` says of it;
* ``add_arguments(parser)`` declares its arguments;
* ``run(options) -> int`` does the work and returns the exit code.

Importing such a module imports neither torch nor megatron-core, so that ``--help`` answers at once and a missing one
is a message of ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Protocol

from mcore_patch import __version__

from . import demo, doctor, inspect_checkpoint, run


class Command(Protocol):
    """What a module has to have to be a command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Do what the command is for; returns the exit code."""


COMMANDS: dict[str, Command] = {
    "demo": demo,
    "doctor": doctor,
    "inspect": inspect_checkpoint,
    "run": run,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that *argv* (default: ``sys.argv[1:]``) names; returns its exit code.

    Exit codes: 0, the command did it and found nothing wrong; 1, it found something wrong; 2, it could not start
    (wrong arguments, something is not installed); 141, who reads its output has gone (``| head``), as for a command
    that SIGPIPE ends. Those of ``run`` are the script's.
    """
    parser = argparse.ArgumentParser(
        prog="mcore-patch",
        description="Makes the fp32 masters of megatron-core's optimizers come from the checkpoint.",
    )
    parser.add_argument("--version", action="version", version=f"mcore-patch {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").partition("\n")[0]
        command.add_arguments(subparsers.add_parser(name, help=about, description=about))
    options = parser.parse_args(argv)
    command = COMMANDS[options.command]
    if options.command == "run":  # What the script does with a pipe that is closed is its own matter.
        return command.run(options)
    try:
        code = command.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return code
