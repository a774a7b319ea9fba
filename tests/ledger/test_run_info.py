"""Facts about a run, GPUs of its ranks, and peak performance."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_support import Page, SimulatedSidecar, make_process, make_snapshot

from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.families.run_info import ConfiguredPeak, Gpus, data_type, flops_in_table
from exporter.ledger.goodput.options import GoodputOptions
from exporter.recording.values import TrainingReading


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA GB200", "fp8", 5000),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("AMD Instinct MI250X", "bf16", 191.5),
        # No fallback to a similar name, a different data type, or the whole GPU.
        ("NVIDIA H200 NVL", "bf16", None),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A100-SXM4-40GB", "fp8", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("GRID A100-10C", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "", None),
        ("", "bf16", None),
    ],
)
def test_a_peak_needs_an_exact_device_and_data_type(name: str, dtype: str, teraflops: float | None) -> None:
    assert flops_in_table(name, dtype) == (None if teraflops is None else teraflops * 1e12)


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
def test_an_unambiguous_precision_is_a_data_type(precision: str, dtype: str) -> None:
    assert data_type(precision) == dtype


def training_snapshot(process: ProcessIdentity, *, peak: float | None = None, **facts: str) -> Snapshot:
    snapshot = make_snapshot(process)
    reading = TrainingReading(facts=tuple(sorted(facts.items())), phase="iteration", peak_flops=peak)
    return snapshot.replace(recording=snapshot.recording.replace(training=reading))


def gpu_reading(uuid: str, name: str) -> EnergyReading:
    return EnergyReading(
        "gpu", uuid, "nvml_counter", is_measured=True, joules=0.0, watts=0.0, time=0.0, name=name
    )


def page_of_processes(
    tmp_path: Path,
    *snapshots: Snapshot,
    uses: tuple[GpuProcessUse, ...] = (),
    gpus: tuple[EnergyReading, ...] = (),
    peaks: tuple[ConfiguredPeak, ...] = (),
) -> Page:
    """Return the page of these processes. The pid of each process is 100 plus the rank."""
    sidecar = SimulatedSidecar(tmp_path)
    sidecar.collector.gpus = Gpus(use=lambda: uses, readings=lambda: gpus)
    sidecar.collector.sessions.options = GoodputOptions(peak_flops=peaks)
    for snapshot in snapshots:
        sidecar.feed.publish(snapshot, pid=100 + (snapshot.process.rank or 0))
    return sidecar.collect()


def peaks_of(page: Page) -> dict[tuple[str, ...], float]:
    """Return the peaks by rank, data type, source and name."""
    peaks = {
        tuple(dict(labels).values()): flops
        for labels, flops in page.all("training_peak_flops_per_second").items()
    }
    # The labels are sorted by their names: dtype, name, rank, run, source.
    return {(rank, dtype, source, name): flops for (dtype, name, rank, _, source), flops in peaks.items()}


H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def test_a_run_is_described_by_the_lowest_rank_of_the_node(tmp_path: Path) -> None:
    page = page_of_processes(
        tmp_path,
        training_snapshot(make_process(rank=1), session_tag="other"),
        training_snapshot(
            make_process(rank=0), session_tag="s", perf_tag="p", world_size="8", of_a_later_version="x"
        ),
        make_snapshot(make_process(run="bare")),
    )

    assert page.get("training_run_info", run="r", session_tag="s", perf_tag="p", world_size="8") == 1
    assert page.get("training_run_info", run="bare") == 1
    assert len(page.families["training_run_info"].samples) == 2


def test_a_rank_with_facts_describes_the_run_before_a_lower_rank_without_facts(tmp_path: Path) -> None:
    page = page_of_processes(
        tmp_path, make_snapshot(make_process(rank=0)), training_snapshot(make_process(rank=1), model="llama")
    )

    assert page.get("training_run_info", run="r", model="llama") == 1


def test_a_rank_has_a_gpu_only_if_its_process_holds_exactly_one(tmp_path: Path) -> None:
    uses = (
        GpuProcessUse(100, "3", "GPU-a"),
        GpuProcessUse(101, "0", "GPU-b"),
        GpuProcessUse(101, "1", "GPU-c"),
    )
    page = page_of_processes(
        tmp_path, make_snapshot(make_process(rank=0)), make_snapshot(make_process(rank=1)), uses=uses
    )
    common_labels = {"run": "r", "role": "trainer", "node": "node-a", "version": "0.1.0"}

    assert (
        page.get("training_rank_info", rank="0", local_rank="0", gpu="3", uuid="GPU-a", **common_labels) == 1
    )
    assert page.get("training_rank_info", rank="1", local_rank="1", **common_labels) == 1


def test_the_peak_follows_device_and_data_type_of_the_rank(tmp_path: Path) -> None:
    page = page_of_processes(
        tmp_path,
        training_snapshot(make_process(rank=0), precision="bf16-mixed"),
        training_snapshot(make_process(rank=1), precision="bf16-mixed"),
        training_snapshot(make_process(rank=2), precision="32-true"),
        training_snapshot(make_process(rank=3)),
        uses=tuple(GpuProcessUse(100 + rank, str(rank), "GPU-a" if rank else "GPU-b") for rank in range(4)),
        gpus=(gpu_reading("GPU-a", H100), gpu_reading("GPU-b", L4)),
    )

    assert peaks_of(page) == {
        ("0", "bf16", "table", L4): 121e12,
        ("1", "bf16", "table", H100): 989e12,
    }


@pytest.mark.parametrize(("other_device", "known_peaks"), [(H100, 1), (L4, 0)])
def test_without_process_lists_equal_devices_give_the_peak(
    tmp_path: Path, other_device: str, known_peaks: int
) -> None:
    gpus = (gpu_reading("a", H100), gpu_reading("b", other_device))
    page = page_of_processes(tmp_path, training_snapshot(make_process(), precision="bf16"), gpus=gpus)

    assert len(peaks_of(page)) == known_peaks


def test_reported_peaks_override_configured_ones_and_the_table(tmp_path: Path) -> None:
    configured_peaks = (ConfiguredPeak("*H100*", 3e15, "fp8"), ConfiguredPeak("*H100*", 2e15))
    page = page_of_processes(
        tmp_path,
        training_snapshot(make_process(rank=0), precision="bf16", peak=1e15),
        training_snapshot(make_process(rank=1), precision="bf16"),
        training_snapshot(make_process(rank=2), precision="fp8"),
        gpus=(gpu_reading("a", H100),),
        peaks=configured_peaks,
    )

    # The source of a reported peak is "config", too: a person, not the table, provided it.
    assert peaks_of(page) == {
        ("0", "bf16", "config", H100): 1e15,
        ("1", "bf16", "config", H100): 2e15,
        ("2", "fp8", "config", H100): 3e15,
    }
