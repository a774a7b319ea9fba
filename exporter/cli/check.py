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
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, FLAGS, PROGRAM, Parser, add_flags, value_of
from exporter.cli.probes import PROBES, Finding, Machine, python
from exporter.cli.resolve import resolve
from exporter.errors import ConfigurationError
from exporter.version import __version__

DESCRIPTION = """\
Finds out why nothing shows up. Changes nothing; the exit status is 1 when something fails.

    training-exporter check
    training-exporter check --check.python=/opt/conda/bin/python
"""
DEADLINE_SECONDS = 10.0
WIDTH = 110
INDENT = " " * 5

Probe = Callable[[], Iterable[Finding]]


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Ask, and print the answers; 0 when nothing failed, otherwise 1."""
    parser = Parser(f"{PROGRAM} check", DESCRIPTION)
    add_flags(parser)
    own = parser.add_argument_group("check")
    own.add_argument(
        "--check.format", choices=("text", "json"), default="text", help="text (default) or json"
    )
    own.add_argument("--check.python", metavar="PATH", help="the job's interpreter, to be asked too")
    given = parser.parse_flags(arguments)
    findings = list(_examine(given, environ))
    failed = any(finding.status == "FAIL" for finding in findings)
    if value_of(given, "--check.format") == "json":
        told = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"version": __version__, "ok": not failed, "findings": told}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.status:<{len(INDENT)}}{finding.subject}: {finding.found}")
            if finding.remedy:
                text = f"-> {finding.remedy}"
                print(textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + " " * 3))
    return 1 if failed else 0


def _examine(given: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that can be found out, in the order in which a person would look."""
    configurations: list[Configuration] = []
    yield from ask({"configuration": partial(_configuration, given, environ, configurations)})
    probes: dict[str, Probe] = {}
    for path in dict.fromkeys(filter(None, (sys.executable, value_of(given, "--check.python")))):
        probes[f"python {path}"] = partial(python, path, environ)
    for configuration in configurations:
        for probe in PROBES:
            probes[probe.__name__.replace("_", " ")] = partial(probe, Machine(configuration, environ))
    yield from ask(probes)


def ask(probes: Mapping[str, Probe], deadline_seconds: float = DEADLINE_SECONDS) -> Iterator[Finding]:
    """Ask all at once and give the answers in order; one that does not come is a finding too."""
    answers: dict[str, queue.SimpleQueue[list[Finding]]] = {}
    for subject, probe in probes.items():
        answers[subject] = queue.SimpleQueue()
        arguments = (subject, probe, answers[subject])
        threading.Thread(target=_answer, args=arguments, name=f"check {subject}", daemon=True).start()
    until = time.monotonic() + deadline_seconds
    for subject, answer in answers.items():
        try:
            yield from answer.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:  # noqa: PERF203  # each may be late
            remedy = "a file system or server that hangs? see what it is asked, by hand"
            yield Finding("FAIL", subject, f"no answer within {deadline_seconds:g} s", remedy)


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
    try:
        made.append(resolve(given, environ))
    except ConfigurationError as error:
        for problem in error.problems:
            yield Finding("FAIL", "configuration", str(problem), "the exporter does not start with it")
        return
    file = value_of(given, "--config.file")
    sources = [] if file is None else [str(file)]
    sources += [f"${FEED_DIRECTORY_VARIABLE}"] if environ.get(FEED_DIRECTORY_VARIABLE) else []
    sources += [flag for flag in list(FLAGS)[1:] if value_of(given, flag) is not None]
    yield Finding("ok", "configuration", f"valid; from {', '.join(sources) or 'the defaults alone'}")
