"""``python -m offload_core``: plan a run, look at this machine or at a checkpoint, or take its weights out."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .commands import export, info, inspect, plan
from .errors import OffloadError
from .ranks.consistency import VERSION

COMMANDS = {"plan": plan, "info": info, "inspect": inspect, "export": export}
"""Each is a module with ``HELP``, ``EXAMPLE``, ``add_arguments(parser)`` and ``run(args)``, which returns the exit
status."""
WRONG_ARGUMENTS = 2
READER_GONE = 128 + signal.SIGPIPE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_ARGUMENTS, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="python -m offload_core", description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"offload-core {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, command in COMMANDS.items():
        about = command.HELP
        command.add_arguments(
            commands.add_parser(
                name,
                help=about,
                description=about,
                epilog=command.EXAMPLE,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path, or a file, may hold unwritable characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = COMMANDS[args.command].run(args)
        if sys.stdout is not None:  # None if it is closed
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return READER_GONE
    except (OffloadError, OSError) as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS


if __name__ == "__main__":
    sys.exit(main())
