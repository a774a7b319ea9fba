"""Whether the exporter in this container answers: exit status 0, else 1 with the reason on standard error.

The image's HEALTHCHECK; Kubernetes asks `/-/healthy` itself. Any answer of the exporter counts, a refused password
too: what is asked is whether the process lives. `$EXPORTER_HEALTH_ADDRESS` is where, if not on the usual port.
"""
# ruff: noqa: INP001 - a script of the image, not a package

from __future__ import annotations

import http.client
import os
import ssl
import sys

ANSWER_SECONDS = 2.5  # below the timeout of HEALTHCHECK, which kills without a word


def problem_of(connection: http.client.HTTPConnection) -> str | None:
    """Ask once: None when it answers, else what went wrong."""
    try:
        connection.request("GET", "/-/healthy")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return None if status < http.client.INTERNAL_SERVER_ERROR else f"status {status}"


def answers(address: str) -> str | None:
    """Ask over HTTP, then over TLS; None when it answers, else what went wrong."""
    unverified = ssl.create_default_context()
    unverified.check_hostname = False  # the certificate is not for 127.0.0.1; nothing is sent
    unverified.verify_mode = ssl.CERT_NONE
    plain = problem_of(http.client.HTTPConnection(address, timeout=ANSWER_SECONDS / 2))
    if plain is None:
        return None
    tls = problem_of(http.client.HTTPSConnection(address, timeout=ANSWER_SECONDS / 2, context=unverified))
    return None if tls is None else f"{address} does not answer: {plain}; over TLS {tls}"


def main() -> int:
    """Ask, and say why not."""
    problem = answers(os.environ.get("EXPORTER_HEALTH_ADDRESS", "127.0.0.1:20909"))
    if problem:
        print(problem, file=sys.stderr)  # noqa: T201 - shown by `docker inspect`
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
