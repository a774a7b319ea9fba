"""`training-exporter push TARGET`: pushes the metrics to a textfile, a Pushgateway or an OTLP endpoint.

While the exporter does not respond or a push fails, the textfile or group is removed, because the pushed values would become stale.
Without `--once`, the textfile or group is also removed at exit.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import ssl
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from exporter.cli.flags import PROGRAM, Parser, flag_error, parse_duration_flag, print_notice
from exporter.cli.otlp import Otlp
from exporter.cli.signals import ENDING_SIGNALS, Signals

DESCRIPTION = """\
Pushes the exporter's metrics to a file for node_exporter, a Pushgateway or an OTLP endpoint. Removes the file or group
while the exporter does not respond and, without --once, at exit.

    training-exporter push /var/lib/node_exporter/training.prom
    training-exporter push --interval=1m http://gateway:9091/metrics/job/training/instance/node7
    training-exporter push otlp http://collector:4318
    training-exporter push --once --name='training_*' training.prom
"""
TIMEOUT_SECONDS = 10.0
"""Timeout of a request to the exporter or to a Pushgateway."""
MIN_INTERVAL_SECONDS = 0.1
"""Minimum of `--interval`."""
_DEFAULT_SOURCE = "http://127.0.0.1:20909/metrics"
_FAILURES = (OSError, http.client.HTTPException, ValueError)
"""Exceptions of a failed push. ValueError: the response is not a page of metrics."""

_SAMPLE = re.compile(
    rb"(?:[a-z_:][a-z0-9_:]*[ \t]*(?:\{.*\})?|\{.*\})[ \t]*(?<=[ \t}])[-+]?(?:[0-9.][0-9e.+-]*|inf|nan)"
    rb"(?:[ \t]+-?[0-9]+)?",
    re.IGNORECASE,
)
"""Sample of the text format: name, labels, value and optional timestamp."""
_MAX_SHOWN_BYTES = 80
"""Maximum length of an invalid line in the message about it."""


class PushTarget(Protocol):
    """Destination of the page."""

    def put(self, page: bytes) -> None:
        """Replace the previous page. Raises OSError, HTTPException or ValueError."""

    def remove(self) -> None:
        """Remove the page if it exists. Raises the same exceptions as `put`."""


class TextFile:
    """File for the textfile collector of node_exporter, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, page: bytes) -> None:
        """Write a temporary file and rename it."""
        # The name of the temporary file does not end with .prom, so node_exporter ignores it.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(page)
                os.fchmod(file.fileno(), 0o644)  # node_exporter runs as a different user
            Path(temporary).replace(self._path)
        except OSError:
            with suppress(OSError):
                Path(temporary).unlink()
            raise

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


class Gateway:
    """Group of a Pushgateway: `http://HOST:9091/metrics/job/JOB/LABEL/VALUE…`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def put(self, page: bytes) -> None:
        """Replace the group."""
        self._send("PUT", page)

    def remove(self) -> None:
        """Delete the group."""
        self._send("DELETE", None)

    def _send(self, method: str, body: bytes | None) -> None:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        request = urllib.request.Request(self._url, body, headers, method=method)  # noqa: S310  # target_of accepts only http and https
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310  # target_of accepts only http and https
            response.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials with which the page is requested."""

    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """Return the Authorization header, if any. The password file is read at each call, because the password may change."""
        if not self.user:
            return {}
        password = "" if self.password_file is None else self.password_file.read_text().rstrip("\n")
        credentials = base64.b64encode(f"{self.user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {credentials}"}

    def context(self) -> ssl.SSLContext:
        """Return the TLS settings. Raises OSError if a file cannot be loaded."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class Push:
    """Periodic push of the metrics of an exporter to a target."""

    def __init__(self, source: str, target: PushTarget, access: Access | None = None) -> None:
        self._source = source
        self._access = access or Access()
        self._target = target
        self._may_exist = True  # a killed process may have left a page at the target
        self._logged_problem: str | None = None
        # The proxies of the environment are ignored: the exporter is on this machine or network.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._access.context())
        )

    def push_once(self) -> bool:
        """Push the page once, or remove the previous page if that fails. Return True on success."""
        problem = f"{self._source} cannot be read"
        try:
            request = urllib.request.Request(self._source, headers=self._access.headers())  # noqa: S310  # main accepts only http and https
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                page = response.read()
            _check_page(page)
            problem, self._may_exist = "the metrics cannot be pushed", True
            self._target.put(_without_process_families(page))
        except _FAILURES as error:
            self._log_change(f"{problem}: {error}")
            self.remove()
            return False
        self._log_change(None)
        return True

    def remove(self) -> None:
        """Remove the page that this process or an earlier process has pushed."""
        if self._may_exist:
            try:
                self._target.remove()
                self._may_exist = False
            except _FAILURES as error:
                if self._logged_problem is None:
                    self._log_change(f"the pushed metrics cannot be removed: {error}")

    def _log_change(self, problem: str | None) -> None:
        """Log a new problem, or the end of a problem."""
        if problem != self._logged_problem:
            self._logged_problem = problem
            print_notice(f"push: {problem or 'works again'}")


def main(arguments: Sequence[str], _environ: Mapping[str, str] = os.environ) -> int:
    """Push until SIGTERM or SIGINT. With `--once`, push once and return 1 on failure. Raises ConfigurationError."""
    flags = vars(_parser().parse_flags(arguments))
    interval_seconds, source = parse_duration_flag("--interval", flags["interval"]), flags["from"]
    if interval_seconds < MIN_INTERVAL_SECONDS:
        raise flag_error("--interval", f"must be at least {MIN_INTERVAL_SECONDS} s")
    if _has_user(source):
        remedy = "use --from.user and --from.password-file"
        raise flag_error("--from", f"a user name and a password in the URL are not supported; {remedy}")
    if not _is_web(source):
        raise flag_error("--from", f"{source!r} is not an http or https address")
    if flags["name"]:
        names = urlencode([("name[]", name) for name in flags["name"]])
        source += f"{'&' if urlsplit(source).query else '?'}{names}"
    push = Push(source, target_of(flags["target"], source), _access(flags))
    if flags["once"]:
        return 0 if push.push_once() else 1
    signals = Signals()
    signal_number: int | None = None
    while signal_number not in ENDING_SIGNALS:
        push.push_once()
        signal_number = signals.wait(interval_seconds)
    signals.is_ending = True
    push.remove()
    return 0


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(f"{PROGRAM} push", DESCRIPTION, " TARGET")
    for flag, metavar, default, text in (
        ("--from", "URL", _DEFAULT_SOURCE, f"read the metrics here (default {_DEFAULT_SOURCE})"),
        ("--interval", "DURATION", "15s", "time between pushes (default 15s)"),
    ):
        parser.add_argument(flag, metavar=metavar, default=default, help=text)
    for flag, metavar, text in (
        ("--from.user", "NAME", "user name for the page, if the exporter has passwords"),
        ("--from.password-file", "FILE", "file with the password of --from.user"),
        ("--from.ca-file", "FILE", "certificate authority of the exporter (default: the system's)"),
        ("--from.cert-file", "FILE", "client certificate, if the exporter requires one"),
        ("--from.key-file", "FILE", "key of the client certificate"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    text = "push these families only; repeatable, * matches any characters"
    parser.add_argument("--name", metavar="PATTERN", action="append", default=[], help=text)
    parser.add_argument(
        "--once", action="store_true", help="push once, and do not remove the metrics at exit"
    )
    text = "FILE.prom, the URL of a Pushgateway's group, or otlp ENDPOINT"
    parser.add_argument("target", nargs="+", metavar="TARGET", help=text)
    return parser


def _access(flags: Mapping[str, Any]) -> Access:
    """Return the credentials of a command line. Raises ConfigurationError for files that cannot be loaded."""
    files = {
        name: Path(text)
        for name in ("password_file", "ca_file", "cert_file", "key_file")
        if (text := flags[f"from.{name}"]) is not None
    }
    access = Access(user=flags["from.user"] or "", **files)
    try:
        access.headers()
        access.context()
    except (OSError, ValueError) as error:  # ValueError: the password is not UTF-8
        raise flag_error("--from", f"cannot load the credentials: {error}") from None
    return access


def _check_page(page: bytes) -> None:
    """Raise ValueError if a line of the page is not in the Prometheus text format, such as HTML of a proxy."""
    for number, line in enumerate(page.split(b"\n"), 1):
        text = line.strip()
        if text and not text.startswith(b"#") and _SAMPLE.fullmatch(text) is None:
            shown_text = text[:_MAX_SHOWN_BYTES].decode(errors="replace")
            raise ValueError(
                f"the response is not in the Prometheus text format (line {number}: {shown_text!r}); "
                "set --from to the address of an exporter's metrics"
            )


def _without_process_families(page: bytes) -> bytes:
    """Return the page without the families `process_*`, whose names node_exporter and Pushgateway use for themselves."""
    lines, is_kept = [], True
    for line in page.split(b"\n"):
        fields = line.split(b" ", 3)
        if len(fields) > 2 and fields[0] == b"#" and fields[1] in {b"HELP", b"TYPE"}:
            is_kept = not fields[2].startswith(b"process_")
        if is_kept or not line:
            lines.append(line)
    return b"\n".join(lines)


def target_of(arguments: Sequence[str], source: str = _DEFAULT_SOURCE) -> PushTarget:
    """Return the target of a command line. Raises ConfigurationError."""
    text = arguments[-1]
    if len(arguments) == 1 and _has_user(text):
        raise flag_error("target", "a user name and a password in the URL of a Pushgateway are not supported")
    if len(arguments) == 2 and arguments[0] == "otlp" and _is_web(text):
        try:
            return Otlp(text, source)
        except ImportError as error:
            remedy = f"pip install opentelemetry-exporter-otlp-proto-http ({error})"
            raise flag_error("otlp", f"OpenTelemetry's exporter is not installed: {remedy}") from None
    if len(arguments) == 1 and _is_web(text) and urlsplit(text).path.startswith("/metrics/job"):
        return Gateway(text)
    if len(arguments) == 1 and "://" not in text and not Path(text).is_dir() and Path(text).parent.is_dir():
        return TextFile(Path(text))
    expected = "a file in an existing directory, http://HOST:9091/metrics/job/JOB or otlp http://HOST:4318"
    # A mistyped URL may contain a user name and a password, which end at the last "@".
    shown = " ".join(argument.rpartition("@")[2] for argument in arguments)
    raise flag_error("target", f"{shown!r} is not a target; expected {expected}")


def _has_user(text: str) -> bool:
    """Return True for a URL with a user name or a password: urllib does not send them, and messages about the URL would show them."""
    _, _, rest = text.partition("://")
    return "@" in re.split(r"[/?#]", rest, maxsplit=1)[0]


def _is_web(text: str) -> bool:
    """Return True for an http or https URL with a valid port."""
    try:
        address = urlsplit(text)
        return address.scheme in {"http", "https"} and bool(address.hostname) and address.port != 0
    except ValueError:
        return False
