"""Torch's allocator of GPU memory, as the bridge sees it; its answers are those of a real one, written down."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_support import child, labelled, series
from places import TESTS

ANSWERS = """
import exporter
from exporter.bridges.torch_stats import CudaMemory

def stats(allocated, reserved, retries, ooms):
    def both(current): return {"all": {"current": current, "peak": 2 * current, "allocated": 0, "freed": 0}}
    return {"allocated_bytes": both(allocated), "reserved_bytes": both(reserved), "num_alloc_retries": retries,
            "num_ooms": ooms, "max_split_size": -1}

device, other = ("0", "GPU-a"), ("1", "GPU-b")
answers = [{device: stats(10, 20, 3, 0)}, {device: stats(30, 40, 5, 1), other: stats(1, 2, 0, 0)},
           {device: stats(5, 40, 1, 0)}]
memory = CudaMemory(lambda: answers.pop(0))
exporter.configure(run="mine")
for _ in range(3):
    memory.look()
exporter.flush()
"""


def test_what_the_allocator_says_becomes_the_families_of_the_reference(tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from elastic_support import page_of
print(page_of(Path(os.environ["EXPORTER_FEED_DIR"])))
"""
    page = child(tmp_path / "feed", ANSWERS + program).stdout  # of the living process: memory is a gauge

    assert labelled(page, "training_gpu_alloc_retries_total", gpu="0") == 5 + 1
    assert labelled(page, "training_gpu_oom_total", gpu="0") == 1
    assert labelled(page, "training_gpu_oom_total", gpu="1") == 0
    assert series(page, "training_gpu_alloc_retries_total").keys() == {
        '{gpu="0",role="helper",run="mine",uuid="GPU-a"}',
        '{gpu="1",role="helper",run="mine",uuid="GPU-b"}',
    }
    assert {
        state: labelled(page, "training_gpu_memory_bytes", gpu="0", state=state)
        for state in ("allocated", "reserved", "peak_allocated", "peak_reserved")
    } == {"allocated": 5, "reserved": 40, "peak_allocated": 10, "peak_reserved": 80}


def test_without_cuda_there_is_nothing_to_ask(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    program = """
    import threading
    from exporter.bridges import torch_stats
    torch_stats.install_cuda_memory()
    import torch
    assert torch.cuda.is_available() or "exporter-cuda-memory" not in {each.name for each in threading.enumerate()}
    """

    assert child(tmp_path / "feed", program).returncode == 0
