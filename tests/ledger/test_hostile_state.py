"""Hostile state files: each file is renamed, counted and logged, and the totals restart at zero."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_support import SimulatedSidecar, make_process

RANK_0_LABELS = {"run": "r", "rank": "0"}


def nest_deeply(path: Path) -> None:
    """Write a valid header and checksum around deeply nested JSON."""
    key_line = path.read_bytes().split(b"\n")[1] + b"\n"
    nested_json = b'{"stats":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path.write_bytes(
        b"training-exporter-ledger 3 %08x\n" % zlib.crc32(key_line + nested_json) + key_line + nested_json
    )


def flip_bit(path: Path) -> None:
    state_file = bytearray(path.read_bytes())
    state_file[-10] ^= 1
    path.write_bytes(state_file)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def extend_sparsely(path: Path) -> None:
    os.truncate(path, 800 << 20)


def raise_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"ledger 3 ", b"ledger 4 ", 1))


def remove_content(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [nest_deeply, flip_bit, replace_by_link, extend_sparsely, raise_version, remove_content],
)
@pytest.mark.parametrize("is_alive", [True, False])
def test_an_unusable_state_file_is_moved_aside_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], is_alive: bool
) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    process = make_process()
    sidecar.record_loss(process, 3, alive=is_alive)
    sidecar.collect()
    sidecar.state.close()
    (path,) = (tmp_path / "ledger").glob("rank*.ledger")
    damage(path)
    sidecar.feed.files.clear()
    sidecar.start()
    if is_alive:
        sidecar.record_loss(make_process(), 1)
    with caplog.at_level("ERROR"):
        page = sidecar.collect_after(1.0)

    assert sidecar.state.damaged_files == 1
    assert page.get("exporter_ledger_state_errors_total", reason="damaged") == 1
    assert len(list((tmp_path / "ledger").glob("*.damaged-*"))) == 1
    assert "totals that only this file contains restart at 0" in caplog.text
    assert page.count("loss", **RANK_0_LABELS) == (1 if is_alive else None)
