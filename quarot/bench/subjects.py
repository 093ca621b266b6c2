"""What is timed: a model on quarot's integer path, and transformers' own model, each with caches filled to a length.

Caches are filled with random tokens without a prefill: what a decode step costs does not depend on what they say.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PretrainedConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quarot.architectures import geometry
from quarot.config import QuarotConfig
from quarot.nn.kv_format import arguments
from quarot.nn.page_table import StaticTable, Step
from quarot.nn.quant_kv_cache import QuantKVCache
from quarot.ops.argmax_rows import argmax_rows
from quarot.recording import recording
from quarot.runtime.decode_graph import DecodeGraph, enabled
from quarot.runtime.synthetic import random_model, random_quantized_model

Call = Callable[[], Any]
UNMASKED = "unmasked_sdpa"


class Decode(Protocol):
    """A decode step that can be repeated."""

    def rewind(self) -> None:
        """Back to the context it began with."""
        ...

    def step(self) -> None:
        """One token for every row."""
        ...


class Subject:
    """A model and how it is used; the base class is transformers' own, in full precision or not.

    Attributes:
        model: in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.get_input_embeddings().weight.device

    @classmethod
    def random(cls, config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> Subject:
        """Random weights and PyTorch's scaled dot product attention."""
        model = random_model(plain(config), dtype=dtype, device=device)
        model.set_attn_implementation("sdpa")
        return cls(model)

    def prefill(self, batch: int, length: int) -> Call:
        """A forward over prompts [batch, length] that fills a cache and gives the logits of the last token."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.randint(0, self.model.config.vocab_size, (batch, length), device=self.device)
        return lambda: self.model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def prefill_block(self, batch: int, length: int) -> Call:
        """A forward of the decoder alone over hidden states [batch, length, hidden]."""
        self.model.set_attn_implementation("sdpa")
        decoder = self.model.get_decoder()
        hidden = torch.randn(batch, length, geometry(self.model).hidden, dtype=self.model.dtype, device=self.device)
        return lambda: decoder(inputs_embeds=hidden, use_cache=True)

    def decode(self, batch: int, context: int, room: int, recorded: bool = False) -> Decode:
        """Decoding with ``context`` cached tokens a row and room for more; ``recorded``: as a CUDA graph."""
        step = StaticDecode(self.model, batch, context)
        return Recorded(step) if recorded else step


class Quantized(Subject):
    """A model that quarot quantised, used as ``quarot.generate`` uses it."""

    @classmethod
    def random_codes(
        cls, config: PretrainedConfig, recipe: QuarotConfig, dtype: torch.dtype, device: torch.device | str
    ) -> Quantized:
        """Random codes in packed form; nothing is quantised and nothing ever exists in full precision."""
        return cls(random_quantized_model(plain(config), recipe, dtype=dtype, device=device))

    @property
    def _packs_cache(self) -> bool:
        return self.model.config.quantization_config.rounds_cache  # type: ignore[no-any-return]

    def prefill(self, batch: int, length: int) -> Call:
        """See :meth:`Subject.prefill`; exact attention, codes stored in a cache that was allocated before."""
        if not self._packs_cache:
            return super().prefill(batch, length)
        cache = QuantKVCache(self.model.config, max_batch=batch, max_length=length)
        ids = torch.randint(0, self.model.config.vocab_size, (batch, length), device=self.device)
        inputs = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        return lambda: _fill_again(self.model, cache, inputs)

    def prefill_block(self, batch: int, length: int) -> Call:
        """See :meth:`Subject.prefill_block`."""
        if not self._packs_cache:
            return super().prefill_block(batch, length)
        cache = QuantKVCache(self.model.config, max_batch=batch, max_length=length)
        hidden = torch.randn(batch, length, geometry(self.model).hidden, dtype=self.model.dtype, device=self.device)
        return lambda: _fill_again(self.model.get_decoder(), cache, {"inputs_embeds": hidden, "use_cache": True})

    def decode(self, batch: int, context: int, room: int, recorded: bool = False) -> Decode:
        """See :meth:`Subject.decode`; a recorded graph wherever there can be one, as at run time."""
        if not self._packs_cache:
            return StaticDecode(self.model, batch, context)
        cache = filled_packed_cache(self.model, batch, context, room)
        if "quarot_fused" in vars(self.model.get_decoder()):
            return PackedDecode(self.model, cache, batch, context)
        return UnfusedDecode(self.model, cache, batch, context)


def plain(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the full-precision model."""
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def release(device: torch.device) -> None:
    """Give memory of deleted models back, so that the next peak is its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def filled_packed_cache(model: Any, batch: int, context: int, room: int = 64) -> QuantKVCache:
    """A static packed cache whose rows hold ``context`` random tokens each."""
    from quarot.ops.kv_append import kv_append

    device, sizes = model.get_input_embeddings().weight.device, geometry(model)
    cache = QuantKVCache(model.config, max_batch=batch, max_length=context + room)
    like = torch.empty(1, sizes.kv_heads, 1, sizes.head_dim, dtype=model.dtype, device=device)
    table = _table(cache)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
    places = torch.arange(context, device=device)
    row = torch.randn(2, context, sizes.kv_heads, sizes.head_dim, dtype=model.dtype, device=device)
    for layer in cache.layers:
        kv_format, codes = layer.format, arguments(layer.layout)
        for index in range(batch):
            slots = places + index * table.pages_per_row * table.page_size
            kv_append(layer.pool, row[0], row[1], slots, *codes, *kv_format.clips, *kv_format.rotate)
    return cache


def _table(cache: QuantKVCache) -> StaticTable:
    assert isinstance(cache.table, StaticTable)
    return cache.table


def _rewind(cache: QuantKVCache, batch: int, context: int) -> None:
    table = _table(cache)
    table.batch, table.counted = batch, context
    table.lengths.fill_(context)
    table.columns.fill_(context)
    table.valid.fill_(False)
    table.valid[:, :context] = True


def _fill_again(part: Any, cache: QuantKVCache, inputs: dict[str, Any]) -> Any:
    cache.reset()
    return part(past_key_values=cache, **inputs)


class PackedDecode:
    """The recorded greedy decode step of a quantised model (run eagerly on a CPU)."""

    def __init__(self, model: Any, cache: QuantKVCache, batch: int, context: int) -> None:
        head = model.get_output_embeddings()
        self.cache, self.batch, self.context = cache, batch, context
        fused, width = vars(model.get_decoder())["quarot_fused"], _table(cache).pages_per_row
        self.graph = DecodeGraph(fused, cache, batch, width, lambda out: argmax_rows(head(out[:, -1])))
        self.ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=cache.layers[0].device)
        self.step: Callable[[], Any] = self.graph.run if enabled(self.ids.device) else self.graph.step
        self.rewind()

    def rewind(self) -> None:
        """See :class:`Decode`."""
        _rewind(self.cache, self.batch, self.context)
        table = _table(self.cache)
        lengths = table.lengths[: self.batch]
        nothing = torch.empty(0, dtype=torch.int64, device=lengths.device)
        step = Step(nothing, lengths, lengths, table.pages[: self.batch], None, 0, table.num_pages, None)
        self.graph.load(self.ids, lengths[:, None], step)


class UnfusedDecode:
    """The decode step of a quantised model without fused layers: its own forward over the packed cache."""

    def __init__(self, model: Any, cache: QuantKVCache, batch: int, context: int) -> None:
        self.model, self.cache, self.batch, self.context = model, cache, batch, context
        self.ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=cache.layers[0].device)
        self.rewind()

    def rewind(self) -> None:
        """See :class:`Decode`."""
        _rewind(self.cache, self.batch, self.context)

    def step(self) -> None:
        """See :class:`Decode`."""
        out = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True)
        self.ids.copy_(out.logits[:, -1:].argmax(-1))


class StaticDecode:
    """transformers' decode step over its StaticCache; every step writes to the same place.

    The cache is full, so every token sees all of it: no mask is made, and PyTorch may take its flash kernels, which
    accept none (and read grouped heads without repeating them).
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self.model, self.context = model, context
        AttentionInterface.register(UNMASKED, sdpa_attention_forward)  # no mask is registered under this name
        sizes, device = geometry(model), model.get_input_embeddings().weight.device
        self.cache = StaticCache(config=model.config, max_cache_len=context + 1)
        size = (batch, sizes.kv_heads, context, sizes.head_dim)
        random = torch.randn(size, dtype=model.dtype, device=device)
        for index in range(sizes.num_layers):
            self.cache.update(random, random, index)
        del random
        self.ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
        self.positions = torch.full((batch, 1), context, dtype=torch.int64, device=device)
        self.marks = [layer.cumulative_length for layer in self.cache.layers]

    def rewind(self) -> None:
        """Nothing to do: it never moves."""

    def step(self) -> None:
        """See :class:`Decode`."""
        for mark in self.marks:
            if isinstance(mark, torch.Tensor):
                mark.fill_(self.context)
        if self.model.config._attn_implementation != UNMASKED:
            self.model.set_attn_implementation(UNMASKED)
        out = self.model(
            input_ids=self.ids,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.ids.copy_(out.logits[:, -1:].argmax(-1))


class Recorded:
    """The step of another ``Decode`` as a CUDA graph."""

    def __init__(self, inner: Decode) -> None:
        self.inner = inner
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            inner.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            inner.step()
        self.step: Callable[[], Any] = graph.replay

    def rewind(self) -> None:
        """See :class:`Decode`."""
        self.inner.rewind()
