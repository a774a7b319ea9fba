"""`training-exporter`: takes the command line apart and starts what it asks for.

Runs in the sidecar and in its subcommands, on the main thread. Starting is loud: what is wrong with the command
line, the configuration, the directories or the address is told on standard error, a line per problem, and the
exit status is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import platform
import sys
from collections.abc import Mapping, Sequence

from exporter.cli.flags import PROGRAM, Parser, add_flags, parse_duration_flag
from exporter.errors import (
    ConfigurationError,
    FeedDirectoryError,
    ListenError,
    Problem,
    StartError,
    StateError,
)
from exporter.version import __version__

FAILED = 1
REFUSED = 2
"""Exit status of a start that could not be."""

COMMANDS = ("run", "check", "demo", "push")

_DESCRIPTION = """\
Prometheus exporter that runs beside a training job.

  training-exporter [flags]                     serve the metrics of this machine and of the jobs on it
  training-exporter run [flags] COMMAND ARG...  run a job with the exporter beside it
  training-exporter check [flags]               find out why nothing shows up
  training-exporter demo [flags]                serve a small simulated job
  training-exporter push [flags] TARGET         put the metrics into a file or a Pushgateway

The same as python -m exporter, except that nothing else called exporter can take its place.
"""


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Do what a command line asks for.

    Args:
        arguments: Without the program's name; None takes the process's own.
        environ: The environment.

    Returns:
        The exit status: 2 for a start that could not be, otherwise the subcommand's.
    """
    _occupy_standard_descriptors()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(given, environ)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can be told
    except (ConfigurationError, FeedDirectoryError, ListenError, StartError, StateError) as error:
        for line in str(error).splitlines():
            _say(f"exporter: {line}")
        return REFUSED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has what they wanted
        _forget_output()
        return FAILED
    except (MemoryError, OSError, RuntimeError) as error:
        # No memory, thread, descriptor or room on a disk; anything else is a defect, and its traceback of use.
        if not _is_shortage(error):
            raise
        _say(
            f"exporter: cannot go on: {str(error) or type(error).__name__}; see the limits of this process: ulimit -a"
        )
        _forget_output()
        sys.unraisablehook = lambda _: None  # of what is half made (asyncio's event loop), and goes now
        return FAILED
    return status


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in {
            errno.EAGAIN,
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOMEM,
            errno.ENOSPC,
            errno.EDQUOT,
        }
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _forget_output() -> None:
    """Let what is left in standard output's buffer go, which would fail once more at the interpreter's end."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str], environ: Mapping[str, str]) -> int:
    # Subcommands are imported where they are started: `run` must not keep the job waiting for a web server's
    # imports, nor the sidecar hold what only a demo needs.
    command = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if command == "run":
        from exporter.cli import run  # noqa: PLC0415  (as said above)

        return run.main(arguments[1:], environ)
    if command == "check":
        from exporter.cli import check  # noqa: PLC0415  (as said above)

        return check.main(arguments[1:], environ)
    if command == "demo":
        from exporter.cli import demo  # noqa: PLC0415  (as said above)

        return demo.main(arguments[1:], environ)
    if command == "push":
        from exporter.cli import push  # noqa: PLC0415  (as said above)

        return push.main(arguments[1:], environ)
    if command is not None:
        from exporter.config.loader import suggest  # noqa: PLC0415  (as above)

        raise ConfigurationError(
            [
                Problem(
                    "command line", None, None, f"unknown command {command!r}, {suggest(command, COMMANDS)}"
                )
            ]
        )
    return _serve(arguments, environ)


def _serve(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    from exporter.cli.resolve import resolve  # noqa: PLC0415  (as above)

    parser = Parser(PROGRAM, _DESCRIPTION)
    add_flags(parser)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    parser.add_argument(
        "--version", action="version", version=f"training-exporter, version {__version__} ({python})"
    )
    parser.add_argument(
        "--config.check", action="store_true", help="check the configuration, say ok or all problems, and end"
    )
    # What `run` and `demo` start the exporter with.
    parser.add_argument("--run.attached", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run.linger", metavar="DURATION", default="30s", help=argparse.SUPPRESS)
    flags = parser.parse_flags(arguments)
    given = vars(flags)
    linger_seconds = parse_duration_flag("--run.linger", given["run.linger"])
    configuration = resolve(flags, environ)
    if given["config.check"]:
        if configuration.web.config_file is not None:
            from exporter.web.webconfig import load_web_config  # noqa: PLC0415  (as above)

            load_web_config(configuration.web.config_file)
        print("ok")
        return 0
    from exporter.cli.serve import serve  # noqa: PLC0415  (--config.check and --version need none of it)

    return serve(
        configuration,
        read=lambda: resolve(flags, environ),
        linger_seconds=linger_seconds if given["run.attached"] else None,
    )


def _say(line: str) -> None:
    if sys.stderr is not None:
        try:
            print(line, file=sys.stderr)
        except OSError:  # nobody reads it
            return


def _occupy_standard_descriptors() -> None:
    """Open /dev/null where the process was started without stdin, stdout or stderr.

    Otherwise the next file opened would get the number 2, and be written to by whatever writes to stderr.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  (each may be closed)
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
