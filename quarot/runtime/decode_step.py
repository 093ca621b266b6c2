"""One new token a row over a :class:`~quarot.nn.quant_kv_cache.QuantKVCache`, without masks, handles or host syncs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quarot.nn.kv_format import arguments
from quarot.nn.page_table import Step
from quarot.nn.quant_kv_cache import QuantKVCache
from quarot.ops.decode_attention import decode_attention
from quarot.ops.kv_append import kv_append
from quarot.ops.rope_kv_append import rope_kv_append, serves

if TYPE_CHECKING:
    from quarot.runtime.fused_decoder import FusedDecoder
    from quarot.runtime.fused_layer import FusedLayer


class DecodeStep:
    """Where the new tokens go and what they attend to: the same for every layer."""

    def __init__(self, cache: QuantKVCache, step: Step, whole: bool = True) -> None:
        self.cache, self.step, self.whole = cache, step, whole

    @classmethod
    def begin(cls, cache: Any, shape: torch.Size, mask: Any, config: Any) -> DecodeStep | None:
        """The step of this forward, or None when it is not plain decoding over filled packed pages."""
        batch, count = shape
        if not isinstance(cache, QuantKVCache) or count != 1 or cache.offloads or not cache.layers[0].is_initialized:
            return None
        if config._attn_implementation != "quarot" or isinstance(mask, dict):
            return None
        valid = None
        if mask is not None:
            if mask.dim() != 2:
                return None
            valid = mask[:, -1:].to(torch.bool)
            if not cache.is_static and bool(valid.all()):
                valid = None
        return cls(cache, cache.begin_step(batch, count, valid), valid is None)

    def run_graph(self, fused: FusedDecoder, ids: Tensor, position_ids: Tensor) -> Tensor | None:
        """As :meth:`run` from token ids, through the recorded step of this cache; None when there is none to use."""
        from quarot.runtime.decode_graph import enabled, graph_for

        batch, cache, step = ids.shape[0], self.cache, self.step
        if not self.whole or not enabled(ids.device) or fused.boundary.watch.find() is not None:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        with self._undone_on_failure():
            for pages in cache.layers:
                pages.make_room(step)
            graph = graph_for(fused, cache, step._replace(copies=None), batch)
            if graph is None:
                return None
            graph.load(ids, position_ids, step)
            return graph.run().clone()

    def run(self, fused: FusedDecoder, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """[B, 1, hidden] embeddings to the normalised output of the last layer."""
        with self._undone_on_failure():
            cos, sin = fused.rotary(hidden, position_ids=position_ids)
        return self.run_layers(fused, hidden.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1))

    def run_layers(self, fused: FusedDecoder, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same from [B, hidden] and the rotary tables [B or 1, R]."""
        with self._undone_on_failure():
            return fused.run_layers(hidden, self.attend(cos, sin))[:, None]

    @contextlib.contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # an interrupt, too, leaves a token without its codes
            # A recording computes nothing, and permits no copies.
            if not (self.step.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.cache.failed()
            raise

    def attend(self, cos: Tensor, sin: Tensor) -> Any:
        """The attention of one layer: RoPE, append, and decode on the codes."""
        step, table = self.step, self.step.table

        def attend(layer: FusedLayer, qkv: Tensor) -> Tensor:
            pages = self.cache.layers[layer.index]
            kv_format, codes = pages.format, arguments(pages.layout)
            early = not pages.make_room(step)
            clips, rotate = kv_format.clips, kv_format.rotate
            gains, eps = layer.norm_arguments()
            where = layer.positions(cos, sin)
            if serves(qkv, where[0], layer.head_dim, *codes, *rotate):
                query = rope_kv_append(
                    qkv, *where, pages.pool, step.slots, layer.heads, *codes, *clips, *rotate, *gains, eps, early
                )
                rotate = (0, 0)  # the queries come back rotated by R3 already
            else:
                layer.rotate_positions(qkv, cos, sin)
                query, key, value = qkv.unflatten(1, (-1, layer.head_dim)).split(
                    [layer.heads, layer.kv_heads, layer.kv_heads], dim=1
                )
                kv_append(pages.pool, key, value, step.slots, *codes, *clips, *rotate)
            how = (*codes, layer.scaling, layer.window, *rotate)
            out, _ = decode_attention(query.unsqueeze(1).contiguous(), pages.pool, table, step.lengths, *how)
            return out.view(qkv.shape[0], -1)

        return attend
