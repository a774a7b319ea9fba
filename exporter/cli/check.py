"""`training-exporter check [flags]`: what a person types first when nothing shows up.

Asks everything that stands between a training process and a number in Prometheus, and says for each what is
the case and what to do. Each question has a thread and a deadline, so that a dead network file system costs a
line and not the answer. Creates and changes nothing. The exit status is 0 when nothing fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from exporter.cli.configuration import Configuration
from exporter.cli.finding import Finding, Surroundings
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, PROGRAM, Parser, add_flags
from exporter.cli.machine_probes import MACHINE_PROBES
from exporter.cli.probes import PROBES, python
from exporter.cli.resolve import resolve
from exporter.errors import ConfigurationError
from exporter.version import __version__

DESCRIPTION = """\
Finds out why nothing shows up. Changes nothing; the exit status is 1 when something fails.

    training-exporter check
    training-exporter check --check.python=/opt/conda/bin/python
"""
FORMATS = ("text", "json")
DEADLINE_SECONDS = 10.0
WIDTH = 110
INDENT = 5

Probe = Callable[[], Iterable[Finding]]


def main(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    around: Surroundings | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> int:
    """Ask, and print the answers.

    Args:
        arguments: What follows `check`.
        environ: The environment.
        around: Where to look; None for this machine.
        deadline_seconds: The longest that a question may take.

    Returns:
        0 when nothing failed, otherwise 1.

    Raises:
        ConfigurationError: A flag is unknown or incomplete.
    """
    parser = Parser(f"{PROGRAM} check", DESCRIPTION)
    add_flags(parser)
    own = parser.add_argument_group("check")
    own.add_argument("--check.format", choices=FORMATS, default=FORMATS[0], help="text (default) or json")
    own.add_argument("--check.python", metavar="PATH", help="the job's interpreter, to be asked too")
    given = parser.parse_flags(arguments)
    findings = list(examine(given, environ, around or Surroundings(environ=environ), deadline_seconds))
    write = _write_json if vars(given)["check.format"] == "json" else _write_text
    write(findings)
    return 1 if any(finding.status == "FAIL" for finding in findings) else 0


def examine(
    given: argparse.Namespace, environ: Mapping[str, str], around: Surroundings, deadline_seconds: float
) -> Iterator[Finding]:
    """Everything that can be found out, in the order in which a person would look."""
    configurations: list[Configuration] = []
    yield from ask(
        {"configuration": partial(_configuration, given, environ, configurations)}, deadline_seconds
    )
    probes: dict[str, Probe] = {}
    for path in dict.fromkeys(filter(None, (sys.executable, vars(given)["check.python"]))):
        probes[f"python {path}"] = partial(python, path, around)
    for configuration in configurations:
        for probe in (*PROBES, *MACHINE_PROBES):
            probes[probe.__name__.replace("_", " ")] = partial(probe, configuration, around)
    yield from ask(probes, deadline_seconds)


def ask(probes: Mapping[str, Probe], deadline_seconds: float) -> Iterator[Finding]:
    """Ask all at once and give the answers in order; one that does not come is a finding too."""
    answers: dict[str, queue.SimpleQueue[list[Finding]]] = {}
    for subject, probe in probes.items():
        answers[subject] = queue.SimpleQueue()
        worker = threading.Thread(
            target=_answer, args=(subject, probe, answers[subject]), name=f"check {subject}", daemon=True
        )
        worker.start()
    until = time.monotonic() + deadline_seconds
    for subject, answer in answers.items():
        try:
            yield from answer.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:  # noqa: PERF203  # each may be late
            hung = f"no answer within {deadline_seconds:g} s"
            yield Finding(
                "FAIL", subject, hung, "a file system or server that hangs? see what it is asked, by hand"
            )


def _answer(subject: str, probe: Probe, answer: queue.SimpleQueue[list[Finding]]) -> None:
    try:
        found = list(probe())
    except OSError as error:
        found = [Finding("FAIL", subject, str(error), "see to it that it can be read")]
    except Exception as error:  # noqa: BLE001  # one broken question must not hide the others
        found = [Finding("FAIL", subject, f"the check itself failed: {error!r}", "please report this")]
    answer.put(found)


def _configuration(
    given: argparse.Namespace, environ: Mapping[str, str], made: list[Configuration]
) -> Iterator[Finding]:
    """Whether the configuration is valid, and where it came from; what it is goes into `made`."""
    file = vars(given)["config.file"]
    try:
        made.append(resolve(given, environ))
    except ConfigurationError as error:
        for problem in error.problems:
            yield Finding("FAIL", "configuration", str(problem), "the exporter does not start with it")
        return
    sources = [] if file is None else [str(file)]
    sources += [f"${FEED_DIRECTORY_VARIABLE}"] if environ.get(FEED_DIRECTORY_VARIABLE) else []
    ours = ("check.", "config.")
    sources += [
        f"--{name.replace('_', '-')}"
        for name, value in vars(given).items()
        if value is not None and not name.startswith(ours)
    ]
    yield Finding(
        "ok", "configuration", f"valid; from {', '.join(sources) if sources else 'the defaults alone'}"
    )


def _write_text(findings: Sequence[Finding]) -> None:
    for finding in findings:
        line = f"{finding.status:<{INDENT}}{finding.subject}: {finding.found}"
        print(line)
        if finding.remedy:
            indent = " " * INDENT
            print(
                textwrap.fill(
                    f"-> {finding.remedy}", WIDTH, initial_indent=indent, subsequent_indent=indent + "   "
                )
            )


def _write_json(findings: Sequence[Finding]) -> None:
    document = {
        "version": __version__,
        "ok": all(finding.status != "FAIL" for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    print(json.dumps(document, indent=2))
