"""Checks of the web configuration, of the listen addresses, and of the metrics of a running exporter about itself."""

from __future__ import annotations

import errno
import http.client
import re
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from exporter import diagnoses
from exporter.cli.configuration import Configuration
from exporter.cli.findings import CheckFinding, failure, ok, warning
from exporter.errors import ConfigurationError, ListenError
from exporter.feed import runs
from exporter.web.listen import bind, parse_address
from exporter.web.protection import Protection, load_protection

REQUEST_TIMEOUT_SECONDS = 3.0
"""Timeout of the connection to the exporter, and of each wait for a part of its response."""
MAX_REASON_BYTES = 200
"""Maximum number of bytes that are read of a health or readiness response."""
MAX_PAGE_BYTES = 1 << 20
"""Maximum number of bytes that are read of a page of metrics."""
_SAMPLE = re.compile(
    r"^(exporter_collector_success|exporter_feed_owner|gpu_nvml_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE
)
"""Sample of a family that the checks read: name, labels and value."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
"""Name and value of a label."""
_OWN_METRICS_QUERY = (
    "name[]=exporter_collector_success&name[]=exporter_feed_owner&name[]=gpu_nvml_up&name[]=gpu_nvml_error"
)
"""Query for the families that the checks read."""


@dataclass(frozen=True, slots=True)
class HttpResult:
    """Status and text of a response."""

    status: int
    text: str


def address_findings(configuration: Configuration, feed_directory: Path) -> Iterator[CheckFinding]:
    """Check the web configuration, and that each address is free or used by an exporter."""
    file, protection = configuration.web.config_file, Protection()
    if file is not None:
        try:
            protection = load_protection(file)
        except ConfigurationError as error:
            yield from configuration_problems("web configuration", error)
            return
        tls = "disabled" if protection.tls is None else "enabled"
        yield ok("web configuration", f"{file} is valid, TLS is {tls}")
    for address in map(parse_address, configuration.web.listen_address):
        try:
            bind(address, backlog=1).close()
        except ListenError as error:  # noqa: PERF203  # any address may be in use
            # An address of a different machine is not requested, because that machine may respond.
            if _error_number(error) not in {errno.EADDRINUSE, errno.EACCES}:
                yield _refused_finding(f"address {address.text}", error)
                continue
            host = address.host if address.host not in ("", "::", "0.0.0.0") else "127.0.0.1"
            scheme = "http" if protection.tls is None else "https"
            base = f"{scheme}://{f'[{host}]' if ':' in host else host}:{address.port}"
            yield from _occupied_findings(f"address {address.text}", base, error, protection, feed_directory)
        else:
            yield ok(f"address {address.text}", "free")


def _error_number(error: ListenError) -> int | None:
    """Return the `errno` of the failed bind, or None for a host name that is not valid."""
    return error.__cause__.errno if isinstance(error.__cause__, OSError) else None


def _refused_finding(subject: str, error: ListenError) -> CheckFinding:
    """Return the failure for an address that this user or this machine cannot bind."""
    problem, _, remedy = str(error).partition("; ")
    return CheckFinding("FAIL", subject, problem, remedy)


def configuration_problems(subject: str, error: ConfigurationError) -> Iterator[CheckFinding]:
    """Yield a finding for each problem of a configuration that the exporter refuses."""
    for problem in error.problems:
        yield CheckFinding(
            "FAIL", subject, str(problem), "correct the configuration; the exporter does not start"
        )


def _occupied_findings(
    subject: str, base: str, refusal: ListenError, protection: Protection, feed_directory: Path
) -> Iterator[CheckFinding]:
    """Check which server responds at an address that cannot be bound."""
    try:
        health = _get(base, "/-/healthy")
        if health.status == 200 and health.text == "healthy":
            yield from _exporter_findings(subject, base, feed_directory)
            return
    except (OSError, http.client.HTTPException, ValueError) as error:
        yield _unanswered_finding(subject, base, refusal, error, protection)
        return
    if health.status == 401:
        yield ok(subject, f"a server that requires a password responds at {base}, probably the exporter")
        return
    problem = f"used by a different server, which responds to /-/healthy with status {health.status}"
    yield CheckFinding(
        "FAIL", subject, problem, "choose a different address with --web.listen-address=HOST:PORT"
    )


def _unanswered_finding(
    subject: str, base: str, refusal: ListenError, error: Exception, protection: Protection
) -> CheckFinding:
    """Return the finding for an address that cannot be bound and whose server did not respond because of *error*."""
    tls = protection.config.tls_server_config
    is_tls_error = isinstance(error, ssl.SSLError) or isinstance(getattr(error, "reason", None), ssl.SSLError)
    if tls is not None and tls.verify_mode == ssl.CERT_REQUIRED and is_tls_error:
        return ok(subject, diagnoses.CERTIFICATE_REQUIRED.describe(base=base).sentence)
    if _error_number(refusal) != errno.EADDRINUSE:
        return _refused_finding(subject, refusal)
    problem, _, remedy = str(refusal).partition("; ")
    port = urlsplit(base).port
    return failure(subject, diagnoses.PORT_TAKEN.describe(refusal=problem, port=port, choose=remedy))


def _exporter_findings(subject: str, base: str, feed_directory: Path) -> Iterator[CheckFinding]:
    """Check the readiness and the metrics of a running exporter. Metrics that require a password are not checked."""
    ready = _get(base, "/-/ready")
    if ready.status == 200:
        yield ok(subject, f"an exporter responds at {base}")
    else:
        yield warning(subject, diagnoses.NOT_READY.describe(reason=ready.text))
    page = _get(base, f"/metrics?{_OWN_METRICS_QUERY}", size=MAX_PAGE_BYTES)
    if page.status == 200:
        yield from check_own_metrics(page.text, base, feed_directory)


def check_own_metrics(page: str, base: str, feed_directory: Path) -> Iterator[CheckFinding]:
    """Check the metrics of a running exporter about itself."""
    is_nvml_down, nvml_reason = False, ""
    for name, label_text, value in _SAMPLE.findall(page):
        labels = dict(_LABEL.findall(label_text))
        if name == "exporter_collector_success" and float(value) == 0:
            collector = labels.get("collector", "?")
            statement = diagnoses.COLLECTOR_FAILS.describe(collector=collector, reason=f"see {base}/")
            yield warning(f"collector {collector}", statement)
        elif name == "exporter_feed_owner" and float(value) == 0:
            owner = runs.owner(feed_directory)
            yield warning(
                "sidecar", diagnoses.SECOND_SIDECAR.describe(base=base, owner=owner or "of another container")
            )
        elif name == "gpu_nvml_up":
            is_nvml_down = float(value) == 0
        elif name == "gpu_nvml_error_info":
            nvml_reason = labels.get("reason", "")
    # A machine without the library has no GPUs, and NVML that is starting has not failed.
    if is_nvml_down and nvml_reason not in {"library_not_found", "starting", ""}:
        diagnosis = diagnoses.NVML_FAILURES.get(nvml_reason, diagnoses.NVML_DOWN)
        yield failure("nvidia", diagnosis.describe(reason=nvml_reason))


def _get(base: str, path: str, size: int = MAX_REASON_BYTES) -> HttpResult:
    """Request a path of a server, and read up to *size* bytes. Redirects are not followed and no proxy is used."""
    context = ssl._create_unverified_context()  # noqa: S323, SLF001  (the check sends no secret)
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=context)):
        opener.add_handler(handler)
    with opener.open(base + path, timeout=REQUEST_TIMEOUT_SECONDS) as response:
        return HttpResult(response.status, response.read(size).decode(errors="replace").strip())
