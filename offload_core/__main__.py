"""``python -m offload_core``: plan a run, look at this machine or at a checkpoint, take its weights out, or
prove that bits are equal."""

import argparse
import difflib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .commands import export, info, inspect, plan, prove
from .errors import OffloadError
from .ranks.consistency import VERSION

COMMANDS = {"plan": plan, "info": info, "inspect": inspect, "export": export, "prove": prove}
"""Each is a module with ``HELP``, ``EXAMPLE``, ``add_arguments(parser)`` and ``run(args)``, which returns the exit
status."""
WRONG_ARGUMENTS = 2
READER_GONE = 128 + signal.SIGPIPE


_INSTEAD = dict.fromkeys(("ranks", "gpus", "devices", "processes", "nproc-per-node", "num-gpus", "tp"), "--world-size")
"""Options of other programs, and ours that mean the same."""


class _Parser(argparse.ArgumentParser):
    """A parser whose error names the option that was probably meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("--"):
                name = word.partition("=")[0].lstrip("-").replace("_", "-")
                known = [option for action in self._actions for option in action.option_strings]
                near = [_INSTEAD.get(name), *difflib.get_close_matches(f"--{name}", known, 1)]
                for option in [option for option in near if option in known][:1]:
                    self.error(f"unknown option {word}; did you mean {option}?")
        return found, unknown

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
