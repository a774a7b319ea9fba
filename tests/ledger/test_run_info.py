"""Who trains what, on which device, and how fast that could be."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_support import Page, Sidecar, a_process, a_snapshot

from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.families.run_info import Gpus, PeakSetting, data_type, peak_flops
from exporter.recording.values import TrainingReading


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA GB200", "fp8", 5000),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("AMD Instinct MI250X", "bf16", 191.5),
    ],
)
def test_a_device_of_the_table_has_its_dense_peak(name: str, dtype: str, tera: float) -> None:
    assert peak_flops(name, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H200 NVL", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("NVIDIA A100-SXM4-40GB", "fp8"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("GRID A100-10C", "bf16"),
        ("NVIDIA H100 80GB HBM3", ""),
        ("", "bf16"),
    ],
)
def test_there_is_no_fallback(name: str, dtype: str) -> None:
    assert peak_flops(name, dtype) is None


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("fp8", "fp8"),
        ("transformer-engine-float16", "fp8"),
        ("32-true", ""),
        ("", ""),
    ],
)
def test_a_precision_is_a_data_type_where_it_is_clear(precision: str, dtype: str) -> None:
    assert data_type(precision) == dtype


def training(process: ProcessIdentity, *, peak: float | None = None, **facts: str) -> Snapshot:
    snapshot = a_snapshot(process)
    reading = TrainingReading(facts=tuple(sorted(facts.items())), phase="iteration", peak_flops=peak)
    return snapshot.replace(recording=snapshot.recording.replace(training=reading))


def a_gpu(uuid: str, name: str) -> EnergyReading:
    return EnergyReading("gpu", uuid, "nvml_counter", measured=True, joules=0.0, watts=0.0, at=0.0, name=name)


def page_with(
    tmp_path: Path,
    *snapshots: Snapshot,
    uses: tuple[GpuProcessUse, ...] = (),
    gpus: tuple[EnergyReading, ...] = (),
    peaks: tuple[PeakSetting, ...] = (),
) -> Page:
    """Processes whose pid, as seen from here, is 100 and their rank."""
    sidecar = Sidecar(tmp_path)
    sidecar.collector.gpus = Gpus(use=lambda: uses, readings=lambda: gpus)
    sidecar.collector.peaks = peaks
    for snapshot in snapshots:
        sidecar.feed.put(snapshot, pid=100 + (snapshot.process.rank or 0))
    return sidecar.collect()


def peaks_of(page: Page) -> dict[tuple[str, ...], object]:
    family = page.families.get("training_peak_flops")
    order = ("run", "rank", "worker", "role", "dtype", "source", "name")
    found = [] if family is None else family.samples
    return {tuple(labels.get(name, "") for name in order): value for labels, value in found}


H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def test_a_run_is_described_by_its_lowest_rank_here(tmp_path: Path) -> None:
    page = page_with(
        tmp_path,
        training(a_process(rank=1), session_tag="other"),
        training(a_process(rank=0), session_tag="s", perf_tag="p", world_size="8", of_a_later_version="x"),
        a_snapshot(a_process(run="bare")),
    )

    assert page.get("training_run_info", run="r", session_tag="s", perf_tag="p", world_size="8") == 1
    assert page.get("training_run_info", run="bare") == 1
    assert len(page.families["training_run_info"].samples) == 2


def test_a_rank_has_the_gpu_that_its_process_holds(tmp_path: Path) -> None:
    uses = (
        GpuProcessUse(100, "3", "GPU-a"),
        GpuProcessUse(101, "0", "GPU-b"),
        GpuProcessUse(101, "1", "GPU-c"),
    )
    page = page_with(tmp_path, a_snapshot(a_process(rank=0)), a_snapshot(a_process(rank=1)), uses=uses)
    common = {"run": "r", "role": "trainer", "node": "node-a", "version": "0.1.0"}

    assert page.get("training_rank_info", rank="0", local_rank="0", gpu="3", uuid="GPU-a", **common) == 1
    assert page.get("training_rank_info", rank="1", local_rank="1", **common) == 1


def test_the_peak_is_that_of_the_ranks_own_device_and_data_type(tmp_path: Path) -> None:
    page = page_with(
        tmp_path,
        training(a_process(rank=0), precision="bf16-mixed"),
        training(a_process(rank=1), precision="bf16-mixed"),
        training(a_process(rank=2), precision="32-true"),
        training(a_process(rank=3)),
        uses=tuple(GpuProcessUse(100 + rank, str(rank), "GPU-a" if rank else "GPU-b") for rank in range(4)),
        gpus=(a_gpu("GPU-a", H100), a_gpu("GPU-b", L4)),
    )

    assert peaks_of(page) == {
        ("r", "0", "", "", "bf16", "table", L4): 121e12,
        ("r", "1", "", "", "bf16", "table", H100): 989e12,
    }


def test_where_nobody_can_tell_who_holds_what_equal_devices_will_do(tmp_path: Path) -> None:
    alike, mixed = (a_gpu("a", H100), a_gpu("b", H100)), (a_gpu("a", H100), a_gpu("b", L4))
    (tmp_path / "alike").mkdir()
    (tmp_path / "mixed").mkdir()

    assert (
        len(peaks_of(page_with(tmp_path / "alike", training(a_process(), precision="bf16"), gpus=alike))) == 1
    )
    assert not peaks_of(page_with(tmp_path / "mixed", training(a_process(), precision="bf16"), gpus=mixed))


def test_what_is_told_goes_before_what_is_configured_and_that_before_the_table(tmp_path: Path) -> None:
    settings = (PeakSetting("*H100*", "fp8", 3e15), PeakSetting("*H100*", "", 2e15))
    page = page_with(
        tmp_path,
        training(a_process(rank=0), precision="bf16", peak=1e15),
        training(a_process(rank=1), precision="bf16"),
        training(a_process(rank=2), precision="fp8"),
        gpus=(a_gpu("a", H100),),
        peaks=settings,
    )

    assert peaks_of(page) == {
        ("r", "0", "", "", "bf16", "config", H100): 1e15,
        ("r", "1", "", "", "bf16", "config", H100): 2e15,
        ("r", "2", "", "", "fp8", "config", H100): 3e15,
    }
