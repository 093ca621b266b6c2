"""A decode step recorded once as a CUDA graph and replayed: the host launches one thing a token instead of hundreds.

The graph reads its inputs (token ids, positions, tokens a row holds, page table) from buffers of its own, and computes
slots and lengths from them on the device, so a replay needs four small copies and no plan. It is tied to the memory of
one cache and lives in it, so its memory goes with the cache; a cache that moved its pages gets a new graph, and so does
a model that was moved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quarot.nn.page_table import Step
from quarot.nn.quant_kv_cache import QuantKVCache
from quarot.ops import registry
from quarot.recording import recording

if TYPE_CHECKING:
    from quarot.runtime.fused_decoder import FusedDecoder

logger = logging.getLogger("quarot")

Next = Callable[[Tensor], Tensor]
"""Chooses the next token ids [B] from the output of the last layer [B, 1, hidden]."""


def enabled(device: torch.device) -> bool:
    """Whether decode steps on this device are recorded (``QUAROT_CUDA_GRAPHS=0`` turns it off).

    Reference ops are not: some make tensors on the CPU, and a graph recorded before would replay kernels instead.
    """
    if device.type != "cuda" or os.environ.get("QUAROT_CUDA_GRAPHS", "1") == "0" or registry.forces_reference():
        return False
    return registry.device_reason(device.index) is None


class DecodeGraph:
    """One step of ``batch`` rows over ``cache``.

    Args:
        width: columns of the page table.
        choose: also pick the next token inside the graph; each replay then continues the text by itself.
        generator: what ``choose`` draws from, where it is not the device's default.
    """

    def __init__(
        self,
        fused: FusedDecoder,
        cache: QuantKVCache,
        batch: int,
        width: int,
        choose: Next | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        device = cache.layers[0].device
        self.fused, self.cache, self.batch = fused, cache, batch
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.before = torch.zeros(batch, dtype=torch.int32, device=device)
        self.table = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self.choose, self.generator = choose, generator
        self.addresses = addresses(fused, cache)
        self.graph: torch.cuda.CUDAGraph | None = None

    def fits(self, step: Step, batch: int) -> bool:
        """Whether the graph still describes cache and model: same rows, same memory, a table no wider."""
        same = self.batch == batch and step.table.shape[1] <= self.table.shape[1]
        return same and self.addresses == addresses(self.fused, self.cache)

    def load(self, ids: Tensor, positions: Tensor, step: Step) -> None:
        """Copy the inputs of one step into the buffers (asynchronous)."""
        self.ids.copy_(ids)
        self.positions.copy_(positions.expand(self.batch, 1))
        self.before.copy_(step.before)
        self.table[:, : step.table.shape[1]].copy_(step.table)

    def run(self) -> Tensor:
        """One step from what the buffers hold: [B, 1, hidden]; the result is overwritten by the next one."""
        if self.graph is None:
            self._record()
        assert self.graph is not None
        self.graph.replay()
        return self.out

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        buffers = (self.ids, self.positions, self.before)
        inputs = [t.clone() for t in buffers]
        state = None if self.generator is None else self.generator.get_state()
        # Once eagerly, so that nothing is loaded for the first time while recording. The token it stores is stored
        # again, in the same place, by the first replay.
        self.step()
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        if self.generator is not None and state is not None:
            self.generator.set_state(state)  # as if nothing had been drawn: every call draws alike
        stream = torch.cuda.Stream(self.ids.device)
        with recording(graph, stream):
            self.out = self.step()
        # PyTorch begins a recording by zeroing the generator's offset on the recording stream; on a busy GPU that can
        # come after the first replay has set it, which would then draw the numbers of the prompt's token again.
        torch.cuda.current_stream(self.ids.device).wait_stream(stream)
        self.graph = graph

    def step(self) -> Tensor:
        """The recorded work; also runs eagerly."""
        from quarot.runtime.decode_step import DecodeStep

        advance = self.choose is not None
        hidden, lengths, slots, cos, sin = self.fused.boundary.begin(
            self.ids, self.before, self.positions, self.table, self.cache.page_size, advance
        )
        pages = self.cache.table.num_pages
        step = Step(slots, lengths, self.before, self.table, None, 0, pages, None)
        out = DecodeStep(self.cache, step).run_layers(self.fused, hidden, cos, sin)
        if self.choose is not None:
            self.ids.copy_(self.choose(out)[:, None])
        return out


def addresses(fused: FusedDecoder, cache: QuantKVCache) -> tuple[Any, ...]:
    """Where the weights are, and where the pages of every layer begin and end: a pool may grow in place."""
    pools = [layer.pool for layer in cache.layers if layer.pool is not None]
    return *fused.addresses(), *map(Tensor.data_ptr, pools), *map(Tensor.numel, pools)


def graph_for(fused: FusedDecoder, cache: QuantKVCache, step: Step, batch: int) -> DecodeGraph | None:
    """The graph of this cache, made at the second step of a batch size (the first one, eager, warms the kernels up)."""
    graph: DecodeGraph | None = vars(cache).get("_decode_graph")
    if graph is not None and graph.fused is fused and graph.fits(step, batch):
        return graph
    if vars(cache).get("_decoded_rows") != batch:
        cache._decoded_rows = batch  # type: ignore[attr-defined]
        return None
    width = max(2 * step.table.shape[1], -(-getattr(cache.table, "reserve", 0) // cache.page_size) + 1)
    cache._decode_graph = DecodeGraph(fused, cache, batch, width)  # type: ignore[attr-defined]
    return cache._decode_graph  # type: ignore[attr-defined, no-any-return]
