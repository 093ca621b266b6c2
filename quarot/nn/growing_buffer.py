"""Memory on a GPU that grows without moving: addresses are reserved once, memory is put behind them when it is needed.

So a growing cache copies nothing more, does not hold its pages twice, and keeps their addresses. Needs the compiled
extension (csrc/memory) and a driver with virtual memory management, which every supported GPU on Linux has.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from quarot.ops import registry


@functools.cache
def step_bytes(device: torch.device) -> int:
    """Bytes that a buffer on ``device`` grows in multiples of (2 MiB on most GPUs); 0 where there are none."""
    if device.type != "cuda":
        return 0
    ask = getattr(registry.extension(), "mapping_granularity", None)  # an extension built earlier lacks it
    return 0 if ask is None else int(ask(device.index))


_retired: list[tuple[torch.device, int, int, int]] = []
"""Ranges (device, address, mapped, reserved) that nobody holds any more."""


def _release_retired() -> None:
    """Give back what is retired, once no kernel in flight reads it; later if a CUDA graph is being recorded."""
    if torch.cuda.is_current_stream_capturing():
        return
    while _retired:
        device, *where = _retired.pop()
        torch.cuda.synchronize(device)
        registry.extension().release_addresses(*where)  # type: ignore[union-attr]


class GrowingBuffer:
    """Bytes on ``device``, none at first. Freed when neither it nor a tensor of it is left."""

    def __init__(self, device: torch.device) -> None:
        _release_retired()
        self.device, self.mapped = device, 0
        step = step_bytes(device)
        total = torch.cuda.get_device_properties(device).total_memory
        self.reserved = -(-total // step) * step
        self.address = registry.extension().reserve_addresses(self.reserved)  # type: ignore[union-attr]

    def tensor(self, nbytes: int) -> Tensor:
        """The first ``nbytes`` as uint8; what earlier, smaller tensors hold is the beginning of it.

        Raises:
            torch.OutOfMemoryError: the device has not as much; the buffer is as it was.
        """
        step = step_bytes(self.device)
        more = max(-(-nbytes // step) * step - self.mapped, 0)
        if more and not self._map(more):
            torch.cuda.empty_cache()  # PyTorch keeps what it freed; the driver could use it
            if not self._map(more):
                free, total = torch.cuda.mem_get_info(self.device)
                raise torch.OutOfMemoryError(
                    f"no {more / 2**20:.0f} MiB more on {self.device}: {free / 2**20:.0f} of {total / 2**20:.0f} free"
                )
        return torch.as_tensor(_Bytes(self, nbytes), device=self.device)

    def _map(self, more: int) -> bool:
        extension: Any = registry.extension()
        with torch.cuda.device(self.device):
            done = extension.map_memory(self.device.index, self.address, self.mapped, more)
        self.mapped += more if done else 0
        return bool(done)

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():  # the end of the process gives everything back
            _retired.append((self.device, self.address, self.mapped, self.reserved))
            _release_retired()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of an owner get tensors with memory of their own, and no buffer."""
        return type(None), ()


class _Bytes:
    """What ``torch.as_tensor`` turns into a tensor that keeps the buffer alive."""

    def __init__(self, buffer: GrowingBuffer, nbytes: int) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 3,
        }
