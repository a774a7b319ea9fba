"""Health check of the container image: exit status 0 if the exporter responds, otherwise 1 with the reason on standard error.

HEALTHCHECK of the image runs this script; Kubernetes requests `/-/healthy` directly. Every response below status 500 is
healthy, such as 401 for a missing password, because the check is about the process and not about access.
`$EXPORTER_HEALTH_ADDRESS` replaces the default address, 127.0.0.1:20909.
"""
# ruff: noqa: INP001 - a script of the image, not a package

from __future__ import annotations

import http.client
import os
import ssl
import sys

TIMEOUT_SECONDS = 2.5
"""Limit of both requests together. HEALTHCHECK has a longer timeout, so that the script can print the reason before it is killed."""


def failure_of(connection: http.client.HTTPConnection) -> str | None:
    """Send one request. Return None if the exporter is healthy, otherwise the reason why it is not."""
    try:
        connection.request("GET", "/-/healthy")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return None if status < http.client.INTERNAL_SERVER_ERROR else f"status {status}"


def failure_at(address: str) -> str | None:
    """Send a request over HTTP, then over TLS. Return None if either is healthy, otherwise both reasons."""
    unverified = ssl.create_default_context()
    unverified.check_hostname = False  # the certificate is not for 127.0.0.1, and no secret is sent
    unverified.verify_mode = ssl.CERT_NONE
    http_failure = failure_of(http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS / 2))
    if http_failure is None:
        return None
    tls_failure = failure_of(
        http.client.HTTPSConnection(address, timeout=TIMEOUT_SECONDS / 2, context=unverified)
    )
    return (
        None if tls_failure is None else f"{address} is not healthy: {http_failure}; over TLS {tls_failure}"
    )


def main() -> int:
    """Check the exporter, and print the reason of a failure."""
    failure = failure_at(os.environ.get("EXPORTER_HEALTH_ADDRESS", "127.0.0.1:20909"))
    if failure:
        print(failure, file=sys.stderr)  # noqa: T201 - shown by `docker inspect`
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
