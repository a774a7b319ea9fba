"""What the GPU collector tells other parts: who holds a GPU, and how much energy it has used.

Used in the sidecar. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds a GPU, for whoever knows the job's processes; the pid is the host's.

    Attributes:
        pid: In the namespace of the host.
        gpu: The job's number of the GPU.
        uuid: The GPU's.
        memory_bytes: None where the driver does not tell it.
        sm_ratio: Share of time in which a kernel of it ran; None without samples. So the others.
        memory_bandwidth_ratio: The same for reading and writing memory.
        encoder_ratio: The same for the encoder.
        decoder_ratio: The same for the decoder.
        sm_seconds: Time in which a kernel of it ran, since it was first seen; None without samples.
    """

    pid: int
    gpu: str
    uuid: str
    memory_bytes: int | None
    sm_ratio: float | None
    memory_bandwidth_ratio: float | None
    encoder_ratio: float | None
    decoder_ratio: float | None
    sm_seconds: float | None


@dataclass(frozen=True, slots=True)
class GpuEnergy:
    """The energy of a GPU so far, for whoever attributes it to runs.

    Attributes:
        gpu: The job's number of the GPU.
        uuid: The GPU's.
        up: Whether it answers now.
        source: What counts now: `nvml_counter` or `nvml_power`.
        joules: By source, since the exporter began; the sum is the energy.
        integral_joules: Power integrated over time, whatever counts: for comparison.
        resets: By reason, how often the hardware's counter did not go on where it was.
        watts: Power at the moment; None while it is not known.
        at: Monotonic time of the last pass over the GPUs.
        name: The model.
    """

    gpu: str
    uuid: str
    up: bool
    source: str
    joules: Mapping[str, float]
    integral_joules: float
    resets: Mapping[str, int]
    watts: float | None = None
    at: float = 0.0
    name: str = ""
