"""``QuantKVCache``: keys and values as packed codes in pages, behind the cache interface of transformers.

``update`` hands the attention function a :class:`KVHandle` instead of tensors: whether a token is padding is only known
there, from the mask, and the codes are read where they lie. The ``"quarot"`` attention function
(:mod:`quarot.integrations.transformers.attention`) is therefore part of this cache.

Notation: B rows, T new tokens, P tokens a page, D head_dim.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from quarot.config import QuarotConfig, following_clip
from quarot.nn.kv_format import KVFormat
from quarot.nn.page_table import GrowingTable, StaticTable, Step
from quarot.nn.quant_kv_layer import QuantKVLayer

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
        if config is None or not hasattr(config, "get_text_config"):
            raise ValueError(
                f"QuantKVCache needs a model's configuration, QuantKVCache(model.config), not {config!r:.80}"
            )
        for name, value in (("rotate", rotate), ("offloading", offloading)):
            if value not in (None, True, False):
                raise ValueError(f"{name}={value!r} must be True or False")
        text_config = config.get_text_config(decoder=True)
        count = text_config.num_hidden_layers
        passed: dict[str, Any] = {"key_bits": key_bits, "value_bits": value_bits, "group": group}
        passed |= {"key_clip": key_clip, "value_clip": value_clip}
        recorded = _recorded(config)
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
        formats = [_format(recorded, head_dim, index, rotate, passed) for index in range(count)]
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
        if layer_idx >= len(self.layers):
            self.failed()
            raise ValueError(f"QuantKVCache for {len(self.layers)} layers was given to a model with more of them")
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
        try:
            tokens_to_remove = operator.index(tokens_to_remove)  # transformers passes tensors of one number
        except TypeError:
            raise ValueError(f"crop({tokens_to_remove!r}): the number of tokens must be an int") from None
        if tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - int(self.get_seq_length()), 0)
        self.table.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order (beam search). Growing: page ids move and beams share pages; fixed size: bytes move."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other; growing caches share the pages until a row writes."""
        if type(repeats) is not int or repeats < 1:
            raise ValueError(f"batch_repeat_interleave({repeats!r}): rows can be repeated once or more often")
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


def _recorded(config: PretrainedConfig) -> QuarotConfig | None:
    """What a model's ``quantization_config`` says; None when quarot did not quantise the model."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "quarot":
        return QuarotConfig.from_dict(quantization)
    return quantization if isinstance(quantization, QuarotConfig) else None


def _format(
    recorded: QuarotConfig | None, head_dim: int, layer: int, rotate: bool | None, passed: dict[str, Any]
) -> KVFormat:
    """A layer's format: the model's own or the paper's, with the passed fields on top.

    Clip ratios at their default follow passed bits.
    """
    from quarot.rotation.hadamard import hadamard_spec

    if recorded is not None:
        base = KVFormat.from_config(recorded, layer)
    else:
        base = KVFormat(rotation=hadamard_spec(head_dim))
    rotation = base.rotation if rotate is None else (base.rotation or hadamard_spec(head_dim)) if rotate else None
    changes = {name: value for name, value in passed.items() if value is not None}
    for side in ("key", "value"):
        bits, clip = getattr(base, f"{side}_bits"), getattr(base, f"{side}_clip")
        changes.setdefault(f"{side}_clip", following_clip(clip, bits, changes.get(f"{side}_bits", bits)))
    return dataclasses.replace(base, rotation=rotation, **changes)
