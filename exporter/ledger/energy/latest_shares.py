"""Runs' shares of the energy of each device in the last interval."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from exporter.ledger.energy.gpu_attribution import GpuSlice


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Share of a run in the energy of a device, from 0 to 1."""

    run: str
    component: str
    device: str
    ratio: float


class LatestShares:
    """Shares of the last division of each device.

    A GPU whose processes are known is divided at other times than the other devices.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[str, str, str], DeviceShare] = {}
        self._slice_ends: dict[str, float] = {}  # by GPU

    def __iter__(self) -> Iterator[DeviceShare]:
        return iter(self._shares.values())

    def add(self, share: DeviceShare) -> None:
        """Add a share, or replace the share of the run in the device."""
        self._shares[share.run, share.component, share.device] = share

    def add_slice(self, gpu: str, gpu_slice: GpuSlice) -> None:
        """Add the share of a slice of a GPU's energy, which replaces the shares of earlier slices. An earlier slice is ignored."""
        last_end = self._slice_ends.get(gpu)
        if last_end is None or gpu_slice.end > last_end:
            self.discard_gpu(gpu)
            self._slice_ends[gpu] = gpu_slice.end
        if gpu_slice.end == self._slice_ends[gpu]:
            self.add(DeviceShare(run=gpu_slice.run, component="gpu", device=gpu, ratio=gpu_slice.ratio))

    def discard_gpu(self, gpu: str) -> None:
        """Discard the shares of a GPU."""
        self._slice_ends.pop(gpu, None)
        self._shares = {
            key: share
            for key, share in self._shares.items()
            if share.component != "gpu" or share.device != gpu
        }

    def keep_gpus(self, gpus: Collection[str]) -> None:
        """Discard the shares of all devices except for these GPUs."""
        self._slice_ends = {gpu: end for gpu, end in self._slice_ends.items() if gpu in gpus}
        self._shares = {
            key: share
            for key, share in self._shares.items()
            if share.component == "gpu" and share.device in gpus
        }
