"""Zeroed counters for kernels whose last-arriving CTA merges; every launch leaves them zero again.

Launches on one stream follow each other, so they share a buffer; streams do not. A launch recorded in a CUDA graph
gets a slice of its own, because replays of different graphs may overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIN_COUNTERS = 1 << 14
_GRAPH_COUNTERS = 1 << 18

_of_stream: dict[tuple[int, int], Tensor] = {}
_for_graphs: dict[int, Tensor] = {}
_recorded: list[Tensor] = []
"""Every buffer that slices were cut from: graphs know addresses only, so none is ever freed (1 MiB each)."""


def zeroed_counters(count: int, device: torch.device, stream: int) -> Tensor:
    """int32 zeros, at least ``count`` of them, for one launch on ``stream`` (a raw handle) of ``device``."""
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        rest = _for_graphs.get(index)
        if rest is None or rest.numel() < count:  # zeroed by the graph itself at every replay
            return torch.zeros(count, dtype=torch.int32, device=device)
        _for_graphs[index] = rest[count:]
        return rest[:count]
    counters = _of_stream.get((index, stream))
    if counters is None or counters.numel() < count:
        counters = torch.zeros(max(count, _MIN_COUNTERS), dtype=torch.int32, device=device)
        _of_stream[index, stream] = counters
    if index not in _for_graphs or _for_graphs[index].numel() < _MIN_COUNTERS:
        # Filled here, outside any capture, so that it is zero whatever graph is replayed first.
        _for_graphs[index] = torch.zeros(_GRAPH_COUNTERS, dtype=torch.int32, device=device)
        _recorded.append(_for_graphs[index])
        torch.cuda.current_stream(index).synchronize()
    return counters
