"""GPUs of a process, as reported in the feed: from torch's allocator, the environment and the driver's files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from exporter.recording.gpus import ProcessGpus
from exporter.recording.values import GpuUse

FIRST_UUID, SECOND_UUID = (
    "GPU-11111111-2222-3333-4444-555555555555",
    "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa",
)


def fake_torch(peaks: Mapping[int, int], *, is_initialized: bool = True) -> SimpleNamespace:
    """Return a stand-in for torch whose GPUs have these peaks of reserved memory."""

    def stats(number: int) -> object:
        if number not in peaks:
            raise RuntimeError("Invalid device argument.")
        return {"reserved_bytes": {"all": {"peak": peaks[number]}}}

    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: is_initialized),
        _C=SimpleNamespace(_cuda_memoryStats=stats),
    )


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        (SECOND_UUID, None, GpuUse((SECOND_UUID,), named=True)),
        (SECOND_UUID, 3, GpuUse((SECOND_UUID,), named=True)),
        (f"{FIRST_UUID},{SECOND_UUID}", 1, GpuUse((SECOND_UUID,), named=True)),
        ("4, 5", 1, GpuUse(("5",), named=True)),
        ("4,5", 2, GpuUse((), named=True)),
        ("4,5", None, GpuUse(("4",))),
        (None, 1, GpuUse(("1",))),
        (None, None, GpuUse(("0",))),
        ("", None, GpuUse((), named=True)),
        ("-1", None, GpuUse((), named=True)),
        ("-1,0", 0, GpuUse((), named=True)),
        ("3,4,-1,5", 1, GpuUse(("4",), named=True)),
        ("3,4,-1,5", 2, GpuUse((), named=True)),
        (f"{FIRST_UUID},4,none,{SECOND_UUID}", 2, GpuUse((), named=True)),
    ],
)
def test_the_environment_assigns_a_gpu_to_a_process(
    visible: str | None, local_rank: int | None, expected: GpuUse, tmp_path: Path
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert ProcessGpus(str(tmp_path)).read(environment, local_rank) == expected


def test_torch_shows_the_gpus_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch({0: 0, 1: 1 << 20}))
    gpus_of_process = ProcessGpus(str(tmp_path)).read(
        {"CUDA_VISIBLE_DEVICES": f"{FIRST_UUID},{SECOND_UUID}"}, None
    )

    assert gpus_of_process == GpuUse((SECOND_UUID,), used=True, named=True)


def test_a_process_whose_torch_has_not_used_cuda_uses_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch({0: 0}, is_initialized=False))

    assert ProcessGpus(str(tmp_path)).read({}, None).used is False


def test_an_allocation_is_in_the_next_and_in_the_final_reading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus, peaks = ProcessGpus(str(tmp_path)), {0: 0, 1: 0}
    monkeypatch.setitem(sys.modules, "torch", fake_torch(peaks))
    unused_gpus = gpus.read({}, None)
    peaks[0] = 1
    used_gpus = gpus.read({}, None)
    peaks[1] = 1
    final_gpus = gpus.read({}, None, is_identity_ending=True)

    assert [unused_gpus.named, used_gpus.names, final_gpus.names] == [False, ("0",), ("0", "1")]


@pytest.mark.parametrize(("uuid", "expected"), [(SECOND_UUID, SECOND_UUID), ("GPU-????????-????-????", "1")])
def test_files_of_the_driver_give_the_uuids_of_numbers(uuid: str, expected: str, tmp_path: Path) -> None:
    for address, gpu_uuid in (("0000:5d:00.0", uuid), ("0000:18:00.0", FIRST_UUID)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {gpu_uuid}\n")

    assert ProcessGpus(str(tmp_path)).read({"CUDA_VISIBLE_DEVICES": "1"}, None).names == (expected,)


def test_cuda_hides_the_gpus_after_an_entry_for_a_missing_gpu(tmp_path: Path) -> None:
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "0000:18:00.0" / "information").write_text(f"GPU UUID: \t {FIRST_UUID}\n")
    environment = {"CUDA_VISIBLE_DEVICES": "1,0"}

    assert ProcessGpus(str(tmp_path)).read(environment, 1).names == ()
