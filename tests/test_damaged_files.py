"""Readers of files that other programs write: any content is parsed or raises the documented error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from collectors_support import damaged_bytes
from hypothesis import given

from exporter.config.loader import load_file
from exporter.errors import CollectError, ConfigurationError, FeedFormatError
from exporter.feed.overrides import read_overrides
from exporter.ledger.energy.carbon_file import CarbonFile
from exporter.replay.description import MachineDescription
from exporter.replay.machines import PACKAGE_DIRECTORY
from exporter.web.webconfig import load_web_config

T4_MACHINE = (PACKAGE_DIRECTORY / "t4.yaml").read_bytes()
CARBON_INTENSITY = b"327.5\n"
OVERRIDES = b'{"version": 1, "rules": [{"match": "train.*", "enabled": false}]}'
WEB_CONFIG = b"""tls_server_config: {cert_file: cert.pem, key_file: key.pem, min_version: TLS12}
http_server_config: {headers: {Strict-Transport-Security: max-age=1}}
basic_auth_users: {u: $2y$05$abcdefghijklmnopqrstuuABCDEFGHIJKLMNOPQRSTUVWXYZ01234}
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("file_name", "valid_content", "read", "documented_error"),
    [
        ("overrides.json", OVERRIDES, lambda path: read_overrides(path.parent), FeedFormatError),
        ("carbon", CARBON_INTENSITY, lambda path: CarbonFile(path).read(), CollectError),
        (
            "machine.yaml",
            T4_MACHINE,
            lambda path: load_file(path, MachineDescription).plain(),
            ConfigurationError,
        ),
        ("web.config.yml", WEB_CONFIG, load_web_config, ConfigurationError),
    ],
)
def test_any_bytes_are_parsed_or_give_the_documented_error(
    tmp_path: Path,
    file_name: str,
    valid_content: bytes,
    read: Callable[[Path], object],
    documented_error: type[Exception],
) -> None:
    path = tmp_path / file_name
    path.write_bytes(valid_content)
    read(path)

    @given(damaged_bytes(valid_content))
    def check_damaged(damaged_content: bytes) -> None:
        path.write_bytes(damaged_content)
        with contextlib.suppress(documented_error):
            read(path)

    check_damaged()
