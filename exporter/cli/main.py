"""`training-exporter`: parses the command line and runs the command.

If a command cannot start, each problem is written to standard error on a line, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence

from exporter.cli.flags import (
    EXIT_FAILED,
    EXIT_REFUSED,
    PROGRAM,
    Parser,
    add_flags,
    flag_error,
    parse_duration_flag,
    print_notice,
)
from exporter.errors import ConfigurationError, FeedDirectoryError, ListenError, StartError, StateError
from exporter.version import __version__

COMMANDS = ("run", "check", "stacks", "demo", "push", "assets")

_DESCRIPTION = """\
Prometheus exporter for training jobs.

  training-exporter [flags]                     serve the metrics of this machine and of its jobs
  training-exporter run [flags] COMMAND ARG...  run a job with the exporter beside it
  training-exporter check [flags]               find out why metrics are missing
  training-exporter stacks [flags]              print where each rank of the jobs in a feed directory waits
  training-exporter demo [flags]                serve the metrics of a small simulated job
  training-exporter push [flags] TARGET         push the metrics to a file, a Pushgateway or an OTLP endpoint
  training-exporter assets --output DIR         write dashboards, rules, scrape configurations and a systemd unit

Each command has its own --help. `python -m exporter` is the same program.
"""
_EXTERNAL_ERRORS = {
    errno.EPIPE,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
}
"""Errors that are no defect of the program: a closed pipe, and a shortage of threads, descriptors, memory or disk space."""


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command line and return the exit status. The default is the command line of this process.

    The status is 2 if the command line is refused and 130 after Ctrl-C. It is 1 if the reader of standard output has exited, or if memory,
    threads, descriptors or disk space run out. Otherwise, the command decides.
    """
    # A pass over the feed replaces thousands of objects that form no cycles. With the default thresholds, the search for cycles took
    # a fifth of the CPU time of the passes.
    gc.set_threshold(10_000, 20, 20)
    _occupy_standard_descriptors()
    try:
        status = _dispatch(list(sys.argv[1:] if arguments is None else arguments), environ)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error such as a full disk is reported
    except (ConfigurationError, FeedDirectoryError, ListenError, StartError, StateError) as error:
        for line in str(error).splitlines():
            print_notice(line)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 130
    except (MemoryError, OSError, RuntimeError) as error:
        # An external error and a lack of memory or threads are reported in one line. Any other error is internal, and needs a traceback.
        number = error.errno if isinstance(error, OSError) else None
        if (
            number not in _EXTERNAL_ERRORS
            and not isinstance(error, MemoryError)
            and "new thread" not in str(error)
        ):
            raise
        if number != errno.EPIPE:  # the reader of the pipe has exited
            print_notice(
                f"cannot continue: {str(error) or type(error).__name__}; check the limits of this process (ulimit -a)"
            )
        with contextlib.suppress(OSError, AttributeError):  # otherwise the flush at exit would fail too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.unraisablehook = lambda _: None  # of partially constructed objects, such as asyncio's event loop
        return EXIT_FAILED
    return status


def _dispatch(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run the command that the first argument names, or the sidecar if there is none."""
    if not arguments or arguments[0].startswith("-"):
        return _serve(arguments, environ)
    command = arguments[0]
    if command not in COMMANDS:
        from exporter.config.expectation import suggest  # noqa: PLC0415  (the job of `run` must not wait for this import)

        raise flag_error("command line", f"unknown command {command!r}, {suggest(command, COMMANDS)}")
    # Imported here, because the job of `run` must not wait for the imports of a web server.
    with _no_garbage_collection():
        module = importlib.import_module(f"exporter.cli.{command}")
    status: int = module.main(arguments[1:], environ)
    return status


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection during imports, whose objects stay. It took a seventh of the CPU time of the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _serve(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the sidecar, or check its configuration with `--config.check`."""
    with _no_garbage_collection():
        from exporter.cli.configuration import resolve  # noqa: PLC0415  (other commands must not wait for this import)

    parser = Parser(PROGRAM, _DESCRIPTION)
    add_flags(parser)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    version = f"training-exporter, version {__version__} ({python})"
    parser.add_argument("--version", action="version", version=version)
    check_help = "check the configuration, print ok or every problem, and exit"
    parser.add_argument("--config.check", action="store_true", help=check_help)
    # `run` and `demo` pass these flags.
    parser.add_argument("--run.attached", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run.linger", metavar="DURATION", default="30s", help=argparse.SUPPRESS)
    flags = parser.parse_flags(arguments)
    flag_values = vars(flags)
    linger_seconds = parse_duration_flag("--run.linger", flag_values["run.linger"])
    configuration = resolve(flags, environ)
    if flag_values["config.check"]:
        from exporter.cli.config_check import check_configuration  # noqa: PLC0415  (other commands must not wait for this import)

        check_configuration(configuration)
        print("ok")
        return 0
    with _no_garbage_collection():
        from exporter.cli.serve import serve  # noqa: PLC0415  (--config.check and --version do not need the server)

    attached_linger_seconds = linger_seconds if flag_values["run.attached"] else None
    return serve(configuration, read=lambda: resolve(flags, environ), linger_seconds=attached_linger_seconds)


def _occupy_standard_descriptors() -> None:
    """Open /dev/null for closed standard streams, whose descriptors the next opened files would receive otherwise."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  (each descriptor may be closed)
            null_descriptor = os.open(os.devnull, os.O_RDWR)
            if null_descriptor != descriptor:
                os.dup2(null_descriptor, descriptor)
                os.close(null_descriptor)
            os.set_inheritable(descriptor, True)
