"""`training-exporter push TARGET`: the page where no Prometheus can fetch it: a textfile, a Pushgateway, OTLP.

What it has put there is taken away when the page cannot be read and at the end: it would show the last values forever.
"""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.cli.flags import PROGRAM, Parser, mistake, parse_duration_flag, say
from exporter.cli.signals import ENDING, Signals
from exporter.version import __version__

DESCRIPTION = """\
Pushes the exporter's metrics to a file for node_exporter, a Pushgateway or an OTLP endpoint. Removes the file or group
when it ends and while the exporter does not answer.

    training-exporter push /var/lib/node_exporter/training.prom
    training-exporter push --interval=1m http://gateway:9091/metrics/job/training/instance/node7
    training-exporter push otlp http://collector:4318
    training-exporter push --once --name='training_*' training.prom
"""
TIMEOUT_SECONDS = 10.0
SHORTEST_SECONDS = 0.1
_FROM = "http://127.0.0.1:20909/metrics"
_FAILURES = (OSError, http.client.HTTPException)


class Target(Protocol):
    """Where the page goes."""

    def put(self, page: bytes) -> None:
        """Put it there, in place of the one before; raises OSError or HTTPException."""

    def remove(self) -> None:
        """Take it away, if it is there; raises as `put`."""


class TextFile:
    """A file that is never half written; its name ends in `.prom`, or node_exporter passes it over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, page: bytes) -> None:
        """Write it beside, then rename it."""
        # Not .prom: a reader must not find it.
        descriptor, beside = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(page)
                os.fchmod(file.fileno(), 0o644)  # node_exporter is somebody else
            Path(beside).replace(self._path)
        except OSError:
            with suppress(OSError):
                Path(beside).unlink()
            raise

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


class Gateway:
    """A group of a Pushgateway: `http://HOST:9091/metrics/job/JOB/LABEL/VALUE…`."""

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


class Otlp:
    """An OTLP endpoint, `http://HOST:4318` or with a path of its own, through OpenTelemetry's exporter over HTTP.

    What is not on the page is not sent: a gap stays a gap. Start times are 0, OTLP's word for unknown: totals go on over
    restarts of the exporter. `source`, the page's address, names this instance.
    """

    def __init__(self, endpoint: str, source: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: PLC0415  (an extra)
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415  (likewise)
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  (likewise)
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415  (likewise)

        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/metrics"
        self._exporter = metric_exporter.OTLPMetricExporter(endpoint=url, timeout=TIMEOUT_SECONDS)
        page = urlsplit(source)
        here = page.hostname in {"127.0.0.1", "::1", "localhost"}
        about = {"service.instance.id": f"{socket.gethostname()}:{page.port}" if here else page.netloc}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = "training-exporter"
        self._resource = Resource.create(about)
        self._scope = InstrumentationScope("training-exporter", __version__)
        self._sdk = export
        self._cumulative = export.AggregationTemporality.CUMULATIVE

    def put(self, page: bytes) -> None:
        """Send a page; raises OSError, after OpenTelemetry has logged why."""
        sdk, now = self._sdk, time.time_ns()
        families = text_string_to_metric_families(page.decode())
        metrics = [metric for family in families for metric in self._metrics(family, now)]
        scope = sdk.ScopeMetrics(self._scope, metrics, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not sdk.MetricExportResult.SUCCESS:
            raise OSError("the endpoint did not accept the metrics")

    def remove(self) -> None:
        """Nothing: what is not sent is a gap."""

    def _metrics(self, family: Metric, now: int) -> Iterator[Any]:
        """A family of the page as metrics; a summary becomes two sums, as the SDK has none."""
        sdk = self._sdk
        points: dict[Any, list[Any]] = {}
        if family.type == "histogram":
            for sample in family.samples:
                labels = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
                points.setdefault(labels, []).append(sample)
            made = [self._histogram_point(dict(labels), points[labels], now) for labels in points]
            yield sdk.Metric(family.name, family.documentation, "", sdk.Histogram(made, self._cumulative))
            return
        for sample in family.samples:
            point = sdk.NumberDataPoint(sample.labels, 0, now, sample.value)
            points.setdefault(sample.name, []).append(point)
        for name, made in points.items():
            counts = family.type in {"counter", "summary"}
            data = sdk.Sum(made, self._cumulative, is_monotonic=True) if counts else sdk.Gauge(made)
            yield sdk.Metric(name, family.documentation, "", data)

    def _histogram_point(self, labels: Mapping[str, str], samples: Sequence[Sample], now: int) -> Any:
        """Cumulative buckets up to a bound become counts between bounds; the last is beyond all bounds."""
        buckets = sorted((float(each.labels["le"]), each.value) for each in samples if "le" in each.labels)
        totals = {each.name.rpartition("_")[2]: each.value for each in samples if "le" not in each.labels}
        below = [0.0, *(count for _, count in buckets)]
        return self._sdk.HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=0,
            time_unix_nano=now,
            count=int(totals["count"]),
            sum=totals.get("sum"),
            bucket_counts=[int(high - low) for low, high in pairwise(below)],
            explicit_bounds=[bound for bound, _ in buckets[:-1]],
            min=None,
            max=None,
        )


class Push:
    """Reads the page from an address and puts it there, again and again."""

    def __init__(self, source: str, target: Target) -> None:
        self._source = source
        self._target = target
        self._there = True  # perhaps, of one that was killed
        self._said: str | None = None
        # The page is on this machine or on this network, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def step(self) -> bool:
        """Do it once; says whether the page is there now."""
        problem = f"{self._source} cannot be read"
        try:
            with self._opener.open(self._source, timeout=TIMEOUT_SECONDS) as answer:
                page = answer.read()
            problem, self._there = "the metrics cannot be pushed", True
            self._target.put(_without_process(page))
        except _FAILURES as error:
            self._say(f"{problem}: {error}")
            self.remove()  # the one before
            return False
        self._say(None)
        return True

    def remove(self) -> None:
        """Take away what was put there, by this process or by one before it."""
        if self._there:
            try:
                self._target.remove()
                self._there = False
            except _FAILURES as error:
                if self._said is None:
                    self._say(f"the pushed metrics cannot be removed: {error}")

    def _say(self, problem: str | None) -> None:
        """Tell a change of the state."""
        if problem != self._said:
            self._said = problem
            say(f"push: {problem or 'works again'}")


def main(arguments: Sequence[str], _environ: Mapping[str, str] = os.environ) -> int:
    """Push until a signal ends it; with `--once` 1 when the page could not be put there. Raises ConfigurationError."""
    parser = Parser(f"{PROGRAM} push", DESCRIPTION, " TARGET")
    for flag, metavar, default, text in (
        ("--from", "URL", _FROM, f"read the metrics here (default {_FROM})"),
        ("--interval", "DURATION", "15s", "time between pushes (default 15s)"),
    ):
        parser.add_argument(flag, metavar=metavar, default=default, help=text)
    text = "push these families only; repeatable, * matches any characters"
    parser.add_argument("--name", metavar="PATTERN", action="append", default=[], help=text)
    parser.add_argument("--once", action="store_true", help="push once, and do not remove it")
    text = "FILE.prom, the URL of a Pushgateway's group, or otlp ENDPOINT"
    parser.add_argument("target", nargs="+", metavar="TARGET", help=text)
    flags = vars(parser.parse_flags(arguments))
    seconds, source = parse_duration_flag("--interval", flags["interval"]), flags["from"]
    if seconds < SHORTEST_SECONDS:
        raise mistake("--interval", f"must be at least {SHORTEST_SECONDS} s")
    if not _is_web(source):
        raise mistake("--from", f"{source!r} is no http or https address")
    if flags["name"]:
        names = urlencode([("name[]", name) for name in flags["name"]])
        source += f"{'&' if urlsplit(source).query else '?'}{names}"
    push = Push(source, target_of(flags["target"], source))
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


def _without_process(page: bytes) -> bytes:
    """The page without `process_*`, which node_exporter and Pushgateway have of themselves, showing one of two series."""
    kept, keeps = [], True
    for line in page.split(b"\n"):
        if line.startswith(b"# "):
            keeps = not line.split(b" ", 3)[2].startswith(b"process_")
        if keeps or not line:
            kept.append(line)
    return b"\n".join(kept)


def target_of(words: Sequence[str], source: str = _FROM) -> Target:
    """The target that a command line names; raises ConfigurationError for what is none."""
    text = words[-1]
    if len(words) == 2 and words[0] == "otlp" and _is_web(text):
        try:
            return Otlp(text, source)
        except ImportError as error:
            remedy = f"pip install 'training-exporter[otlp]' ({error})"
            raise mistake("otlp", f"OpenTelemetry's exporter is not installed: {remedy}") from None
    if len(words) == 1 and _is_web(text) and urlsplit(text).path.startswith("/metrics/job"):
        return Gateway(text)
    if len(words) == 1 and "://" not in text and not Path(text).is_dir() and Path(text).parent.is_dir():
        return TextFile(Path(text))
    expected = "a file in an existing directory, http://HOST:9091/metrics/job/JOB or otlp http://HOST:4318"
    raise mistake("target", f"{' '.join(words)!r} is no target; expected {expected}")


def _is_web(text: str) -> bool:
    """Whether it is an address of the web, with a port that can be."""
    try:
        address = urlsplit(text)
        return address.scheme in {"http", "https"} and bool(address.hostname) and address.port != 0
    except ValueError:
        return False
