"""``QuantKVLayer``: the packed pages of one layer, and attention to what they hold.

Notation: B rows, T new tokens, P tokens a page, D head_dim.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from quarot.nn.growing_buffer import GrowingBuffer, step_bytes
from quarot.nn.kv_format import KVFormat, arguments, token_major
from quarot.nn.page_table import GrowingTable, StaticTable, Step, new_positions, slots_of
from quarot.nn.partial_attention import Partial, attend, merge
from quarot.ops.decode_attention import decode_attention


class QuantKVLayer(CacheLayerMixin):
    """The pages of one layer. Which page holds what is the cache's business: rows are shared by all layers."""

    is_croppable = True
    is_sliding = False  # a window is applied when reading; nothing is thrown away, so every crop is possible

    PACKED_ROWS = 512
    """Up to this many queries (tokens x heads of a kv head) attend to a past through the decode kernel: on an H200 two
    times slower than the blocks from 128 on, but one launch where the blocks are dozens."""
    BLOCK_ELEMENTS = 1 << 26
    """Keys (and as many values) of a past that are dequantised at once for more of them ..."""
    LEAST_BLOCK = 1024
    """... but at least this many tokens a row, or merging the parts takes longer than computing them."""

    def __init__(
        self, table: GrowingTable | StaticTable, kv_format: KVFormat, first: bool, offloads: bool = False
    ) -> None:
        super().__init__()
        self.table, self.format, self.first, self.offloads = table, kv_format, first, offloads
        self.is_compileable = isinstance(table, StaticTable)
        self.pool: Tensor | None = None
        self.buffer: GrowingBuffer | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shapes, dtype and device from the first keys [B, kv_heads, T, D]; allocate when the size is fixed."""
        if key_states.shape[-1] != value_states.shape[-1]:
            raise NotImplementedError(
                f"QuantKVCache needs keys and values of one width, got {key_states.shape[-1]} and "
                f"{value_states.shape[-1]}"
            )
        self.kv_heads, self.head_dim = key_states.shape[1], key_states.shape[3]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.layout = self.format.layout(self.head_dim)
        self.step: Step | None = None
        if isinstance(self.table, StaticTable):
            self.pool = self._allocate(self.table.num_pages)
            torch._dynamo.mark_static_address(self.pool)
            if self.first:
                self.table.start(self.device)
        self.is_initialized = True

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raise ValueError unless the new tokens look like those before."""
        expected = (self.kv_heads, self.head_dim)
        for name, x in (("key", key), ("value", value)):
            if (x.shape[1], x.shape[3]) != expected or x.dtype != self.dtype or x.device != self.device:
                raise ValueError(
                    f"QuantKVCache holds {expected[0]} kv heads of {expected[1]} in {self.dtype} on {self.device}, got "
                    f"a {name} with {x.shape[1]} heads of {x.shape[3]} in {x.dtype} on {x.device}"
                )

    def store(self, key: Tensor, value: Tensor, step: Step) -> None:
        """Write the new tokens [B, kv_heads, T, D] where ``step`` says."""
        self.make_room(step)
        assert self.pool is not None
        self.format.append(self.pool, token_major(key), token_major(value), step.slots, self.layout)

    def decode(self, query: Tensor, step: Step, scale: float, window: int) -> Tensor:
        """Attention over the codes, the new tokens included: query [B, Hq, T, D] -> [B, T, Hq, D]."""
        assert self.pool is not None
        args = (*arguments(self.layout), scale, window, *self.format.rotate)
        out, _ = decode_attention(query.transpose(1, 2).contiguous(), self.pool, step.table, step.lengths, *args)
        return out

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantised (rotated) keys and values at slots [B, S], as [B, kv_heads, S, D]."""
        assert self.pool is not None
        batch, length = slots.shape
        pair = self.format.gather(self.pool, slots.reshape(-1), self.layout, self.dtype)
        key, value = (x.view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2) for x in pair)
        return key, value

    def attend_past(self, query: Tensor, step: Step, scale: float, window: int, valid: Tensor | None) -> Partial | None:
        """Attention of new tokens to what was stored before ``step``; None where there is nothing to see.

        Few queries read the codes where they lie; many read them dequantised, a bounded number of tokens at a time.

        Args:
            query: [B, Hq, T, D], rotated by R3.
            valid: bool [B, T], which new tokens are real; None when all are.
        """
        batch, heads, count, dim = query.shape
        if not window and count * heads // self.kv_heads <= self.PACKED_ROWS:
            return self._attend_packed(query, step, scale)
        length = min(step.longest, window - 1) if window else step.longest
        block = max(self.LEAST_BLOCK, self.BLOCK_ELEMENTS // (batch * self.kv_heads * dim))
        part = None
        for start in range(0, length, block):
            size = min(block, length - start)
            found = None if step.lookups is None else step.lookups.get((start, size, window))
            slots, visible = found or self._find_block(step, start, size, length, window, count, valid)
            if step.lookups is not None:
                step.lookups[start, size, window] = slots, visible
            key, value = self.gather(slots)
            more = attend(query, key, value, scale, visible=visible)
            part = more if part is None else merge(part, more)
        return part

    def _find_block(
        self, step: Step, start: int, size: int, length: int, window: int, count: int, valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Slots int64 [B, size] of stored tokens (-1: none), and which of them the new tokens see (None: all).

        They are the tokens ``start`` .. of every row; with a window, of the last ``length`` of every row.
        """
        first = step.before[:, None].long() - length if window else 0
        place = torch.arange(start, start + size, device=step.before.device) + first
        place = place.expand(len(step.before), -1)
        if not window and start + size <= step.shortest:
            return slots_of(step.table, place, self.table.page_size), None
        filled = (place >= 0) & (place < step.before[:, None])
        inside = place.clamp(0, step.table.shape[1] * self.table.page_size - 1)
        slots = slots_of(step.table, inside, self.table.page_size).masked_fill(~filled, -1)
        visible = filled[:, None, None, :]
        if window:
            oldest = new_positions(step.before, count, valid)[:, None, :, None] - window
            visible = visible & (place[:, None, None, :] > oldest)
        return slots, visible

    def _attend_packed(self, query: Tensor, step: Step, scale: float) -> Partial:
        """All queries over the codes of the past in one launch of the decode kernel."""
        assert self.pool is not None
        args = (*arguments(self.layout), scale, 0, 0, 0, False)
        out, lse = decode_attention(query.transpose(1, 2).contiguous(), self.pool, step.table, step.before, *args)
        return Partial(out.transpose(1, 2), lse.transpose(1, 2))

    def _allocate(self, pages: int) -> Tensor:
        shape = self.layout.pool_shape(pages, self.kv_heads, self.table.page_size)
        try:
            return self._memory(math.prod(shape)).view(shape)
        except RuntimeError as error:
            # CPUs have no exception of their own for it; any other failure of a GPU must not pass for this one.
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            have = 0 if self.pool is None else self.pool.numel()
            raise torch.OutOfMemoryError(
                f"QuantKVCache: no memory on {self.device} for {pages} pages of {self.table.page_size} tokens a layer "
                f"({math.prod(shape) / 2**20:.1f} MiB, now {have / 2**20:.1f} MiB); the cache is as it was: use fewer "
                "rows, crop() or reset() it, or offloading=True"
            ) from error

    def _memory(self, nbytes: int) -> Tensor:
        """Bytes for the pool. On a GPU a pool that has to grow moves once, to memory that then grows in place.

        The first one comes from PyTorch, which has it at hand: most caches never grow. Nor is it worth it below a
        mapping step, or where pages travel to the CPU anyway.
        """
        step = 0 if self.pool is None or self.offloads else step_bytes(self.device)
        if step and nbytes >= step and self.buffer is None:
            # Dozens of caches at once can use up the addresses, of which each layer reserves a whole GPU's worth.
            with contextlib.suppress(RuntimeError):
                self.buffer = GrowingBuffer(self.device)
        if self.buffer is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.buffer.tensor(nbytes)

    def make_room(self, step: Step) -> bool:
        """A larger pool when pages were added (ids stay, see :meth:`_memory`), and copies of pages no longer shared.

        Returns:
            whether stored tokens were copied, so that kernels which read them early must not run ahead.
        """
        if isinstance(self.table, StaticTable):
            return False
        copied = False
        have = 0 if self.pool is None else self.pool.shape[0]
        if have < step.pages:
            pool = self._allocate(step.pages)
            if self.pool is not None and self.pool.data_ptr() != pool.data_ptr():
                pool[:have].copy_(self.pool)
                copied = True
            self.pool = pool
        if step.copies is not None:
            assert self.pool is not None
            source, target = step.copies
            self.pool.index_copy_(0, target, self.pool.index_select(0, source))
            copied = True
        return copied

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("QuantKVLayer is updated through QuantKVCache.update(key, value, layer_idx)")

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        return self.table.get_seq_length() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only: what the rows hold already is visible by construction."""
        return query_length, self.get_seq_length()  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return self.table.max_length if isinstance(self.table, StaticTable) else -1

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("batch_size is known after the first update")
        return self.table.batch

    def offload(self) -> None:
        """Move the pages to the CPU."""
        if self.pool is not None:
            self.pool = self.pool.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Bring the pages back to the layer's device."""
        if self.pool is not None and self.pool.device != self.device:
            self.pool = self.pool.to(self.device, non_blocking=True)

    def reset(self) -> None:
        raise NotImplementedError("rows are shared by all layers: call reset() on the QuantKVCache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("rows are shared by all layers: call reorder_cache() on the QuantKVCache")
