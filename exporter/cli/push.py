"""`python -m exporter push TARGET`: the page where no Prometheus can come and fetch it.

A process of its own beside the sidecar: it reads `/metrics` over HTTP, as a Prometheus would, and puts it into a file
for node_exporter's textfile collector, or to a Pushgateway. When the page cannot be read, and when this process ends,
what it has put there is taken away again: both would show the last values for ever, and no data is to be a gap.
The families of the sidecar's own process (`process_*`) are left out.
"""

from __future__ import annotations

import http.client
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode, urlsplit

from exporter.cli.flags import PROGRAM, Parser, parse_duration_flag
from exporter.cli.signals import ENDING, Signals
from exporter.errors import ConfigurationError, Problem

DESCRIPTION = """\
Puts the exporter's page where something else fetches it; takes it away at the end, and while there is none.

    training-exporter push /var/lib/node_exporter/training.prom
    training-exporter push --interval=1m http://gateway:9091/metrics/job/training/instance/node7
    training-exporter push --once --name='training_*' training.prom
"""
TIMEOUT_SECONDS = 10.0
SHORTEST_SECONDS = 0.1
_FROM = "http://127.0.0.1:20909/metrics"


class Target(Protocol):
    """Where the page goes."""

    def put(self, page: bytes) -> None:
        """Put it there, in the place of the one before.

        Raises:
            OSError: It cannot be.
        """
        ...

    def remove(self) -> None:
        """Take it away again.

        Raises:
            OSError: It cannot be.
        """
        ...


class TextFile:
    """A file that is never half written: `textfile` readers take it as it is.

    Args:
        path: Ends in `.prom`, or node_exporter passes it over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, page: bytes) -> None:
        """Write it beside, then rename it."""
        # Not .prom: a reader must not find it.
        descriptor, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        beside = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(page)
                os.fchmod(file.fileno(), 0o644)  # node_exporter is somebody else
            beside.replace(self._path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise

    def remove(self) -> None:
        """Delete the file, if it is there."""
        self._path.unlink(missing_ok=True)


class Gateway:
    """A group of a Pushgateway.

    Args:
        url: `http://HOST:9091/metrics/job/JOB/LABEL/VALUE…`.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def put(self, page: bytes) -> None:
        """Replace the group."""
        self._ask("PUT", page)

    def remove(self) -> None:
        """Delete the group."""
        self._ask("DELETE", None)

    def _ask(self, method: str, body: bytes | None) -> None:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        request = urllib.request.Request(self._url, body, headers, method=method)  # noqa: S310  # http, see target_of
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310  # likewise
            answer.read()


class Push:
    """Reads the page and puts it there, again and again.

    Args:
        source: The page's address.
        target: Where it goes.
    """

    def __init__(self, source: str, target: Target) -> None:
        self._source = source
        self._target = target
        self._there = True  # perhaps, of one that was killed
        self._said: str | None = None
        # The page is on this machine or on this network, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def step(self) -> bool:
        """Do it once; says whether the page is there now."""
        try:
            with self._opener.open(self._source, timeout=TIMEOUT_SECONDS) as answer:
                page = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._say(f"{self._source} cannot be read: {error}")
            self.remove()
            return False
        try:
            # node_exporter and Pushgateway have such families of themselves, and show one of two series of a name.
            self._target.put(without(page, b"process_"))
        except (OSError, http.client.HTTPException) as error:
            self._say(f"the page cannot be put there: {error}")
            self._there = True  # the one before
            self.remove(quiet=True)
            return False
        self._there = True
        self._say(None)
        return True

    def remove(self, *, quiet: bool = False) -> None:
        """Take away what was put there, by this process or by one before it."""
        if self._there:
            try:
                self._target.remove()
            except (OSError, http.client.HTTPException) as error:
                if not quiet:
                    self._say(f"the page cannot be taken away: {error}")
            else:
                self._there = False

    def _say(self, problem: str | None) -> None:
        """Tell a change of the state."""
        if problem != self._said:
            self._said = problem
            print(f"exporter push: {problem or 'the page is there again'}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Push until a signal ends it.

    Args:
        arguments: What follows `push`.
        environ: The environment.

    Returns:
        0, and with `--once` 1 when the page could not be put there.

    Raises:
        ConfigurationError: The command line is wrong.
    """
    del environ
    parser = Parser(f"{PROGRAM} push", DESCRIPTION)
    parser.add_argument("--from", metavar="URL", default=_FROM, help=f"the page ({_FROM})")
    parser.add_argument("--interval", metavar="DURATION", default="15s", help="between two pushes (15s)")
    parser.add_argument("--name", metavar="PATTERN", action="append", default=[], help="these families only")
    parser.add_argument("--once", action="store_true", help="push once and leave it there")
    parser.add_argument("target", metavar="TARGET", help="a file, or the address of a Pushgateway's group")
    flags = vars(parser.parse_flags(arguments))
    seconds = parse_duration_flag("--interval", flags["interval"])
    if seconds < SHORTEST_SECONDS:
        raise ConfigurationError(
            [Problem("--interval", None, None, f"must be at least {SHORTEST_SECONDS} s")]
        )
    source = flags["from"]
    if not _is_web(source):
        raise ConfigurationError([Problem("--from", None, None, f"{source!r} is no http or https address")])
    if flags["name"]:
        source += ("&" if urlsplit(source).query else "?") + urlencode(
            [("name[]", name) for name in flags["name"]]
        )
    push = Push(source, target_of(flags["target"]))
    if flags["once"]:
        return 0 if push.step() else 1
    signals = Signals()
    came: int | None = None
    while came not in ENDING:
        push.step()
        came = signals.wait(seconds)
    signals.ending = True
    push.remove()
    return 0


def without(page: bytes, beginning: bytes) -> bytes:
    """A page in plain text, without the families whose names begin so."""
    kept, keeps = [], True
    for line in page.split(b"\n"):
        if line.startswith(b"# "):
            keeps = not line.split(b" ", 3)[2].startswith(beginning)
        if keeps or not line:
            kept.append(line)
    return b"\n".join(kept)


def target_of(text: str) -> Target:
    """Tell a Pushgateway's address from a file.

    Raises:
        ConfigurationError: It is neither.
    """
    if _is_web(text):
        if not urlsplit(text).path.startswith("/metrics/job"):
            message = f"{text!r} names no group; expected http://HOST:9091/metrics/job/JOB"
            raise ConfigurationError([Problem("target", None, None, message)])
        return Gateway(text)
    path = Path(text)
    if "://" in text or path.is_dir() or not path.parent.is_dir():
        message = (
            f"{text!r} is neither http://HOST:9091/metrics/job/JOB nor a file in a directory that is there"
        )
        raise ConfigurationError([Problem("target", None, None, message)])
    return TextFile(path)


def _is_web(text: str) -> bool:
    """Whether it is an address of the web, with a port that can be."""
    try:
        address = urlsplit(text)
        return address.scheme in {"http", "https"} and bool(address.hostname) and address.port != 0
    except ValueError:
        return False
