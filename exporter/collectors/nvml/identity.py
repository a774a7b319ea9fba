"""What a GPU is: names and numbers that do not change while it is attached.

Used in the NVML child, once per attached GPU. Text for labels goes out.
"""

from __future__ import annotations

from exporter.collectors.nvml.conversions import small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu

ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
BLACKWELL = 10
"""From here on NVLink is of the fifth generation, whose counters have fields of their own."""

MOST_GPUS = 64
"""Of one machine that are watched."""

_LONGEST_TEXT = 128


def read_identity(gpu: Gpu) -> dict[str, str]:
    """Ask for all of it; what the GPU does not tell is an empty text."""
    capability = gpu.ask("compute_capability", "nvmlDeviceGetCudaComputeCapability", convert=_version)
    architecture = gpu.ask("architecture", "nvmlDeviceGetArchitecture", convert=small)
    numbers = {
        "minor": gpu.ask("minor", "nvmlDeviceGetMinorNumber", convert=small),
        "numa_node": gpu.ask("numa_node", "nvmlDeviceGetNumaNodeId", convert=small),
    }
    texts = {
        "name": gpu.ask("name", "nvmlDeviceGetName", convert=_text),
        "pci_bus_id": gpu.ask("pci", "nvmlDeviceGetPciInfo", convert=_bus),
        "serial": gpu.ask("serial", "nvmlDeviceGetSerial", convert=_text),
        "vbios": gpu.ask("vbios", "nvmlDeviceGetVbiosVersion", convert=_text),
        "board": gpu.ask("board", "nvmlDeviceGetBoardPartNumber", convert=_text),
    }
    found = {name: text or "" for name, text in texts.items()}
    found.update((name, "" if number is None else str(number)) for name, number in numbers.items())
    found["compute_capability"] = capability or ""
    found["architecture"] = "" if architecture is None else ARCHITECTURES.get(architecture, "other")
    return found


def architecture_of(gpu: Gpu) -> int:
    """NVML's number of the architecture; 0 where it is not told, or not a generation that is known."""
    number = gpu.ask("architecture", "nvmlDeviceGetArchitecture", convert=small)
    return number if number in ARCHITECTURES else 0


def _text(text: Any) -> str:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return "".join(character for character in text if character.isprintable())[:_LONGEST_TEXT].strip()


def _bus(info: Any) -> str:
    return _text(info.busId)


def _version(pair: Any) -> str:
    major, minor = pair
    return f"{small(major)}.{small(minor)}"
