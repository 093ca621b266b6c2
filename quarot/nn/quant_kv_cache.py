"""``QuantKVCache``: keys and values as packed codes in pages, behind the cache interface of transformers.

``update`` hands the attention function a :class:`KVHandle` instead of tensors: whether a token is padding is only known
there, from the mask, and the codes are read where they lie. The ``"quarot"`` attention function
(:mod:`quarot.integrations.transformers.attention`) is therefore part of this cache.

Notation: B rows, T new tokens, P tokens a page, D head_dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from quarot.config import default_kv_clip
from quarot.nn.growing_buffer import GrowingBuffer, step_bytes
from quarot.nn.kv_format import KVFormat, arguments, token_major
from quarot.nn.page_table import GrowingTable, StaticTable, Step, new_positions, slots_of
from quarot.nn.partial_attention import Partial, attend, merge
from quarot.ops.decode_attention import decode_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Prefill = Literal["exact", "quantized"]


class KVHandle:
    """What :meth:`QuantKVCache.update` returns in place of keys and values: the new tokens and where they will go."""

    def __init__(self, cache: QuantKVCache, layer: QuantKVLayer, key: Tensor, value: Tensor) -> None:
        self.cache, self.layer, self.key, self.value = cache, layer, key, value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"KVHandle has no {name!r}: a QuantKVCache is read by the attention function 'quarot' only; call "
            "model.set_attn_implementation('quarot') (importing quarot registers it)"
        )


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
        """The decode kernel sees every new token as further heads of one: then nothing of the past is hidden."""
        assert self.pool is not None
        batch, heads, count, dim = query.shape
        group = heads // self.kv_heads
        rows = query.view(batch, self.kv_heads, group, count, dim).transpose(2, 3)  # heads of a kv head stay together
        rows = rows.reshape(batch, 1, heads * count, dim)
        args = (*arguments(self.layout), scale, 0, 0, 0)
        out, lse = decode_attention(rows, self.pool, step.table, step.before, *args)
        out = out.view(batch, self.kv_heads, count, group, dim).transpose(2, 3).reshape(query.shape)
        return Partial(out, lse.view(batch, self.kv_heads, count, group).transpose(2, 3).reshape(query.shape[:3]))

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

    def make_room(self, step: Step) -> None:
        """A larger pool when pages were added (ids stay, see :meth:`_memory`), and copies of pages no longer shared."""
        if isinstance(self.table, StaticTable):
            return
        have = 0 if self.pool is None else self.pool.shape[0]
        if have < step.pages:
            pool = self._allocate(step.pages)
            if self.pool is not None and self.pool.data_ptr() != pool.data_ptr():
                pool[:have].copy_(self.pool)
            self.pool = pool
        if step.copies is not None:
            assert self.pool is not None
            source, target = step.copies
            self.pool.index_copy_(0, target, self.pool.index_select(0, source))

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


class QuantKVCache(Cache):
    """A packed, paged KV cache for ``model.generate`` and plain forwards (paper, section 4, "KV cache quantization").

    Works with the attention implementation ``"quarot"``; a model quantised or loaded by quarot creates one by itself.
    Prefill attends to the unquantised keys and values and stores their codes, decoding reads the codes; a chunk of
    more than ``DECODE_TOKENS`` tokens over a non-empty cache attends to the stored codes of the past and to its own
    unquantised tokens.

    Args:
        config: the model's configuration; its ``quantization_config`` gives bits, group, clip and R3 unless they are
            passed. Without one: the paper's 4 bits, groups of 128, clip 0.95, R3 where head_dim has a Hadamard matrix.
        model: instead of ``config``; also switches its attention implementation to "quarot".
        key_bits, value_bits, group, key_clip, value_clip: see :class:`quarot.nn.kv_format.KVFormat`.
        rotate: False stores keys without R3.
        page_size: tokens a page, a multiple of 16.
        reserve: tokens a row will probably reach: allocated at once, so that the pools need not grow.
        max_batch, max_length: fix the size (both or neither): nothing is allocated afterwards and nothing syncs, for
            CUDA graphs and ``torch.compile``.
        prefill: "quantized" makes prefill attend to the codes too, as the paper's accuracy simulation does.
        offloading: keep the pages of idle layers in CPU memory.

    Raises:
        ValueError: sizes that do not fit, or only one of max_batch and max_length.
    """

    DECODE_TOKENS = 16
    """Up to this many new tokens are attended to through their codes in one call, as if decoded one by one."""

    def __init__(
        self,
        config: PretrainedConfig | None = None,
        *,
        model: PreTrainedModel | None = None,
        key_bits: int | None = None,
        value_bits: int | None = None,
        group: int | None = None,
        key_clip: float | None = None,
        value_clip: float | None = None,
        rotate: bool | None = None,
        page_size: int = 64,
        reserve: int = 0,
        max_batch: int | None = None,
        max_length: int | None = None,
        prefill: Prefill = "exact",
        offloading: bool = False,
    ) -> None:
        if (max_batch is None) != (max_length is None):
            raise ValueError(f"give both max_batch and max_length or neither, got {max_batch} and {max_length}")
        if prefill not in ("exact", "quantized"):
            raise ValueError(f"prefill={prefill!r} is neither 'exact' nor 'quantized'")
        for name, value in (("page_size", page_size), ("max_batch", max_batch), ("max_length", max_length)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if page_size % 16:
            raise ValueError(f"page_size {page_size} is not a positive multiple of 16")
        if not isinstance(reserve, int) or reserve < 0:
            raise ValueError(f"reserve={reserve!r} must be an integer, 0 or more")
        if model is not None:
            config = model.config if config is None else config
            if model.config._attn_implementation != "quarot":
                model.set_attn_implementation("quarot")
        if config is None:
            raise ValueError("QuantKVCache needs the model's configuration: QuantKVCache(model.config)")
        text_config = config.get_text_config(decoder=True)
        count = text_config.num_hidden_layers
        passed: dict[str, Any] = {"key_bits": key_bits, "value_bits": value_bits, "group": group}
        passed |= {"key_clip": key_clip, "value_clip": value_clip}
        formats = [_format(config, text_config, index, rotate, passed) for index in range(count)]
        self.prefill_mode, self.page_size, self.offloads = prefill, page_size, offloading
        self.table: GrowingTable | StaticTable = (
            GrowingTable(page_size, reserve)
            if max_batch is None or max_length is None
            else StaticTable(page_size, max_batch, max_length)
        )
        layers = [QuantKVLayer(self.table, formats[index], index == 0, offloading) for index in range(count)]
        super().__init__(layers=layers)

    @property
    def format(self) -> KVFormat:
        """The storage format of the first layer; bits of the others may differ (``kv_bits_by_layer``)."""
        first: KVFormat = self.layers[0].format
        return first

    @property
    def is_static(self) -> bool:
        return isinstance(self.table, StaticTable)

    def __repr__(self) -> str:
        f = self.format
        bits = sorted({(layer.format.key_bits, layer.format.value_bits) for layer in self.layers})
        keys, values = bits[0] if len(bits) == 1 else ("by layer", "by layer")
        size = f"{self.table.max_batch} x {self.table.max_length}" if isinstance(self.table, StaticTable) else "growing"
        return (
            f"QuantKVCache(key_bits={keys}, value_bits={values}, group={f.group}, rotation={f.rotation}, "
            f"layers={len(self.layers)}, {size}, tokens={int(self.get_seq_length())}, bytes={self.memory_footprint()})"
        )

    def memory_footprint(self) -> int:
        """Bytes of all pages allocated so far."""
        return sum(layer.pool.numel() for layer in self.layers if layer.pool is not None)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Take the new tokens of a layer [B, kv_heads, T, D]; returns a :class:`KVHandle`, as keys and as values."""
        layer = self.layers[layer_idx]
        if layer.first:
            self.table.settle()
        try:
            if not layer.is_initialized:
                layer.lazy_initialization(key_states, value_states)
            layer.check(key_states, value_states)
        except Exception:
            self.failed()
            raise
        handle = KVHandle(self, layer, key_states, value_states)
        return handle, handle

    def _expect_repeats(self, repeats: int) -> None:
        """The coming prompt has every row ``repeats`` times, one after the other: store it once. For generate(), which
        repeats the rows itself; nothing checks that they are equal. A cache that cannot share stores every row."""
        if isinstance(self.table, GrowingTable) and self.prefill_mode == "exact":
            self.table.repeats = repeats

    def advance(self, layer: QuantKVLayer, batch: int, count: int, valid: Tensor | None) -> Step:
        """The step of this forward for ``layer``: the first layer lays it out, the others follow.

        Args:
            valid: bool [B, T], which new tokens are real; None when all are.
        """
        first = self.layers[0]
        if layer.first:
            step = self.table.append(batch, count, valid, layer.device)
            if not torch.compiler.is_compiling():
                first.step = step
        elif isinstance(self.table, StaticTable) and torch.compiler.is_compiling():
            step = self.table.current(batch, count)
        else:
            step = first.step
        return step.on(layer.device)

    def begin_step(self, batch: int, count: int, valid: Tensor | None) -> Step:
        """The step of a forward that writes the pages itself, without :meth:`update` (the fused decoder path)."""
        self.table.settle()
        first = self.layers[0]
        step = self.table.append(batch, count, valid, first.device)
        if not torch.compiler.is_compiling():
            first.step = step
        return step

    def check_mask(self, attention_mask: Tensor) -> None:
        """Raise unless a mask [B, columns so far or more] shows the stored tokens that it showed when they came.

        Rows are stored without padding, so a token cannot be hidden later. Not checked while decoding (it would wait
        for the GPU) nor for a cache of fixed size.

        Raises:
            NotImplementedError: it hides stored tokens, or shows ones that were hidden.
        """
        table = self.table
        past = int(table.columns) if isinstance(table, GrowingTable) else 0
        if not past or attention_mask.shape[-1] <= past + 1:
            return
        then = True if table.valid is None else table.valid.to(attention_mask.device)
        wrong = (attention_mask[:, :past].to(torch.bool) != then).sum()
        if wrong:
            raise NotImplementedError(
                f"attention_mask disagrees with the cache about {int(wrong)} of its {past} columns: a token is stored "
                "or left out for good when it comes; crop() the cache to before them, or use a new cache"
            )

    def failed(self) -> None:
        """Take back the tokens of a forward that raised, so that the cache can be used again."""
        self.table.undo()

    def reset(self) -> None:
        """Forget all tokens; memory stays allocated."""
        self.table.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row: ``crop(-n)`` drops n columns; a positive number is the length to keep."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - int(self.get_seq_length()), 0)
        self.table.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order (beam search). Growing: page ids move and beams share pages; fixed size: bytes move."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other; growing caches share the pages until a row writes."""
        self._select(torch.arange(self.table.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep the rows at ``indices`` (integers or a boolean mask)."""
        rows = torch.arange(self.table.batch)
        self._select(rows[indices.cpu() if isinstance(indices, Tensor) else indices])

    def _select(self, rows: Tensor) -> None:
        order = self.table.select(rows)
        for layer in self.layers:
            if order is not None and layer.pool is not None:
                layer.pool.copy_(layer.pool.index_select(0, order.to(layer.pool.device)))


def _format(
    config: PretrainedConfig,
    text_config: PretrainedConfig,
    layer: int,
    rotate: bool | None,
    passed: dict[str, Any],
) -> KVFormat:
    """A layer's format: the model's own (its quantization_config) or the paper's, with the passed fields on top.

    Clip ratios at their default follow passed bits.
    """
    from quarot.rotation.hadamard import hadamard_spec

    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    stored = KVFormat.of_model(config, layer)
    base = stored or KVFormat(rotation=hadamard_spec(head_dim))
    rotation = base.rotation if rotate is None else (base.rotation or hadamard_spec(head_dim)) if rotate else None
    changes = {name: value for name, value in passed.items() if value is not None}
    unset = {
        f"{side}_clip": None
        for side, clip in (("key", base.key_clip), ("value", base.value_clip))
        if clip == default_kv_clip(getattr(base, f"{side}_bits"))
    }
    return dataclasses.replace(base, rotation=rotation, **{**unset, **changes})
