"""`Stat.add_tensor` with the real torch on the CPU, and with a stand-in for CUDA."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import PROJECT, TESTS
from program_support import run_with_imports, single_reading, snapshots, stat_state

from exporter import Stat, flush
from exporter.recording.tensors import MAX_COPIES, TensorReader


def new_reader() -> tuple[TensorReader, list[float], list[str]]:
    """Return a reader, the values that it reads, and the reasons of its rejections."""
    values: list[float] = []
    reasons: list[str] = []
    return TensorReader(values.append, reasons.append), values, reasons


def test_a_cpu_tensor_is_read_immediately() -> None:
    torch = pytest.importorskip("torch", reason="install torch: pip install torch")
    stat = Stat("tensors.loss", ["value"])
    loss = torch.tensor([2.5], requires_grad=True)

    stat.add_tensor(loss)
    with torch.no_grad():
        loss.mul_(100)
    stat.add_tensor(torch.tensor(1, dtype=torch.bfloat16))
    flush()

    assert (stat.count, stat.sum) == (2, 3.5)


def test_a_value_that_is_not_a_tensor_of_one_element_is_refused_with_a_reason() -> None:
    torch = pytest.importorskip("torch", reason="install torch: pip install torch")
    tensors, values, reasons = new_reader()
    invalid_samples = [
        torch.ones(2),
        torch.empty(0),
        torch.ones(1, device="meta"),
        3.0,
        None,
        torch.tensor(1 + 2j),
    ]
    for sample in invalid_samples:
        tensors.add(sample)

    assert values == []
    assert reasons == ["shape", "shape", "device", "not_a_number", "not_a_number", "error"]


class Event:
    """CUDA event that the test completes."""

    def __init__(self) -> None:
        self.is_done = False

    def record(self, stream: object) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


class CudaTensor:
    """Interface of a CUDA tensor used by `add_tensor`; a direct read would synchronize."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, value: float) -> None:
        self.value = value

    def numel(self) -> int:
        return 1

    def detach(self) -> CudaTensor:
        return self

    def reshape(self, *shape: int) -> CudaTensor:
        return self

    def to(self, dtype: object) -> CudaTensor:
        return self

    def item(self) -> float:
        raise AssertionError("the training loop would wait for the GPU")


class Slot(list[float]):
    """Element of the pinned host memory, to which a tensor is copied."""

    def copy_(self, tensor: CudaTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self[:] = [tensor.value]


def cuda_torch() -> Any:
    """Return a stand-in for torch, with the functions that `add_tensor` uses for tensors on a GPU."""
    device: Any = SimpleNamespace(
        Event=Event,
        current_stream=lambda device: None,
        capturing=False,
        is_current_stream_capturing=lambda: device.capturing,
    )
    return SimpleNamespace(
        Tensor=CudaTensor,
        cuda=device,
        float64="float64",
        empty=lambda shape, **_: [Slot() for _ in range(shape[0])],
    )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace torch by the stand-in, and return its `torch.cuda`."""
    monkeypatch.setitem(sys.modules, "torch", cuda_torch())
    return sys.modules["torch"].cuda


def test_a_cuda_tensor_is_collected_by_a_later_call_without_waiting(cuda: Any) -> None:
    tensors, values, reasons = new_reader()

    tensors.add(CudaTensor(1.0))
    assert values == []
    tensors._local.copies.pending[0].event.is_done = True
    tensors.add(CudaTensor(2.0))

    assert values == [1.0]
    tensors._local.copies.pending[0].event.is_done = True
    tensors.collect()
    assert values == [1.0, 2.0]
    assert reasons == []


def test_tensors_that_two_threads_add_first_at_the_same_time_are_counted(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Stat("tensors.first", ["value"])
    create_reader = TensorReader.__init__

    def create_slowly(self: TensorReader, *arguments: Any) -> None:
        create_reader(self, *arguments)
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=stat.add_tensor, args=(CudaTensor(1.0),))
            thread.start()
            thread.join()

    monkeypatch.setattr(TensorReader, "__init__", create_slowly)
    stat.add_tensor(CudaTensor(2.0))

    assert stat_state("tensors.first").reading().rejected == {"thread_ended": 1}


def test_threads_reuse_the_pinned_memory_of_ended_threads(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[list[Slot]] = []
    device = SimpleNamespace(is_done=True)

    def allocate(shape: tuple[int, int], **_: object) -> list[Slot]:
        buffers.append([Slot() for _ in range(shape[0])])
        return buffers[-1]

    monkeypatch.setattr(sys.modules["torch"], "empty", allocate)
    monkeypatch.setattr(Event, "query", lambda event: device.is_done)
    reader, values, refusals = new_reader()

    def add_in_a_thread(number: int) -> None:
        thread = threading.Thread(target=reader.add, args=(CudaTensor(number),))
        thread.start()
        thread.join()
        reader.refuse_unread()

    for number in range(20):
        add_in_a_thread(number)
    device.is_done = False  # the device has not completed the copy of the last thread
    add_in_a_thread(20)

    assert (len(buffers), values, refusals) == (2, [], ["thread_ended"] * 21)


def test_a_tensor_that_cannot_be_copied_is_refused_with_a_reason(cuda: Any) -> None:
    tensors, values, reasons = new_reader()
    sharded_tensor = CudaTensor(1.0)
    sharded_tensor.placements = [SimpleNamespace(is_replicate=lambda: False)]  # type: ignore[attr-defined]  # as a DTensor's

    for value in range(MAX_COPIES + 3):
        tensors.add(CudaTensor(float(value)))
    tensors.add(sharded_tensor)
    cuda.capturing = True
    tensors.add(CudaTensor(1.0))

    assert reasons == [*["backlog"] * 3, "placement", "capture"]
    assert values == []


def test_tensors_that_raise_do_not_use_up_the_copies_in_flight(cuda: Any) -> None:
    class RaisingTensor(CudaTensor):
        def reshape(self, *shape: int) -> CudaTensor:
            raise RuntimeError("no dense layout")

    tensors, _, refusals = new_reader()
    for _ in range(MAX_COPIES):
        tensors.add(RaisingTensor(1.0))

    tensors.add(CudaTensor(2.0))

    assert refusals == ["error"] * MAX_COPIES


def test_a_tensor_whose_copy_fails_is_refused_and_collecting_does_not_raise(cuda: Any) -> None:
    tensors, values, reasons = new_reader()
    tensors.add(CudaTensor(1.0))

    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    tensors._local.copies.pending[0].event.query = fail
    tensors.collect()

    assert (values, reasons) == ([], ["error"])


class JaxArray:
    """JAX array whose computation the test completes."""

    size = 1

    def __init__(self, value: complex) -> None:
        self.value, self.ready = value, False

    def is_ready(self) -> bool:
        return self.ready

    def item(self) -> complex:
        assert self.ready, "the training loop would wait for the device"
        return self.value


def test_a_jax_array_is_collected_once_it_is_computed() -> None:
    tensors, values, reasons = new_reader()
    first, second = JaxArray(1.0), JaxArray(2.0)

    tensors.add(first)
    first.ready = second.ready = True
    tensors.add(second)

    assert (values, reasons) == ([1.0, 2.0], [])


def test_a_complex_jax_array_is_not_a_number_before_and_after_it_is_computed() -> None:
    tensors, values, reasons = new_reader()
    pending, computed = JaxArray(1j), JaxArray(2j)
    computed.ready = True
    tensors.add(pending)
    pending.ready = True
    tensors.add(computed)

    assert (values, reasons) == ([], ["not_a_number", "not_a_number"])


def test_a_forked_child_does_not_count_the_tensors_in_flight_of_its_parent(tmp_path: Path) -> None:
    program = """
        from test_recording_tensors import CudaTensor, cuda_torch
        sys.modules["torch"] = cuda_torch()
        stat = Stat("train.loss")
        for value in range(5):
            stat.add_tensor(CudaTensor(1.0))
        if os.fork() == 0:
            Stat("child").add(1)
            exporter.shutdown()
            os._exit(0)
        os.wait()
        exporter.shutdown()
    """
    run_with_imports(tmp_path / "feed", program, PYTHONPATH=f"{PROJECT}:{TESTS}:{TESTS}/recording")

    parent, child = snapshots(tmp_path / "feed")
    (rejected_by_parent,) = [
        stat.rejected for stat in parent.recording.stats if stat.definition.name == "train.loss"
    ]
    assert rejected_by_parent == {"thread_ended": 5}
    assert not any(reading.rejected for reading in child.recording.stats)


def test_values_in_flight_at_the_end_of_a_thread_or_process_are_refused(tmp_path: Path) -> None:
    program = """
        from test_recording_tensors import CudaTensor, cuda_torch
        sys.modules["torch"] = cuda_torch()
        stat = Stat("train.loss")
        thread = threading.Thread(target=stat.add_tensor, args=[CudaTensor(1.0)])
        thread.start()
        thread.join()
        flush()
        stat.add_tensor(CudaTensor(1.0))
        exporter.shutdown()
    """
    run_with_imports(tmp_path / "feed", program, PYTHONPATH=f"{PROJECT}:{TESTS}:{TESTS}/recording")

    assert single_reading(tmp_path / "feed").rejected == {"thread_ended": 2}


def test_a_loss_in_flight_at_the_end_of_a_thread_or_process_is_counted_and_not_logged(tmp_path: Path) -> None:
    program = """
        from exporter import training
        from test_recording_tensors import JaxArray
        def record_loss():
            training.record(loss=JaxArray(1.0))
        thread = threading.Thread(target=record_loss)
        thread.start()
        thread.join()
        flush()
        record_loss()
        exporter.shutdown()
    """
    ended_process = run_with_imports(
        tmp_path / "feed", program, PYTHONPATH=f"{PROJECT}:{TESTS}:{TESTS}/recording"
    )

    misuse = single_reading(tmp_path / "feed", "training.misuse")
    assert dict(misuse.definition.labels) == {"call": "record", "rule": "tensor_thread_ended"}
    assert misuse.sum == 2
    assert "misuse" not in ended_process.stderr
