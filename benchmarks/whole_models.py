"""Models with random weights, and caches filled to a length without a prefill: ours and transformers' in fp16."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import LlamaConfig, StaticCache

from benchmarks.shapes import Shape
from quarot.config import QuarotConfig
from quarot.nn.kv_format import arguments
from quarot.nn.page_table import StaticTable, Step
from quarot.nn.quant_kv_cache import QuantKVCache
from quarot.ops.kv_append import kv_append
from quarot.runtime.decode_graph import DecodeGraph
from quarot.runtime.synthetic import random_model, random_quantized_model


def config_of(shape: Shape, layers: int | None = None) -> LlamaConfig:
    """The Llama configuration of these sizes, perhaps with fewer layers."""
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def ours(shape: Shape, layers: int | None = None) -> Any:
    """W4A4KV4 with random codes."""
    return random_quantized_model(config_of(shape, layers), QuarotConfig(w_method="rtn"))


def theirs(shape: Shape, layers: int | None = None) -> Any:
    """transformers' own model in fp16, scaled dot product attention."""
    model = random_model(config_of(shape, layers), dtype=torch.float16, device="cuda")
    model.set_attn_implementation("sdpa")
    return model


def filled_packed_cache(model: Any, shape: Shape, batch: int, context: int, room: int = 64) -> QuantKVCache:
    """A static packed cache whose rows hold ``context`` random tokens each."""
    cache = QuantKVCache(model.config, max_batch=batch, max_length=context + room)
    like = torch.empty(1, shape.kv_heads, 1, shape.head_dim, dtype=torch.float16, device="cuda")
    table = cache.table
    assert isinstance(table, StaticTable)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
    places = torch.arange(context, device="cuda")
    row = torch.randn(2, context, shape.kv_heads, shape.head_dim, dtype=torch.float16, device="cuda")
    for layer in cache.layers:
        kv_format, codes = layer.format, arguments(layer.layout)
        for index in range(batch):
            slots = places + index * table.pages_per_row * table.page_size
            kv_append(layer.pool, row[0], row[1], slots, *codes, kv_format.clip, kv_format.clip, *kv_format.rotate)
    table.batch = batch
    table.lengths.fill_(context)
    table.columns.fill_(context)
    table.valid[:, :context] = True
    return cache


def packed_decode(model: Any, cache: QuantKVCache, batch: int) -> DecodeGraph:
    """The recorded greedy decode step of a quantised model; every ``run`` is one token for every row."""
    fused, head, table = vars(model.model)["quarot_fused"], model.get_output_embeddings(), cache.table
    assert isinstance(table, StaticTable)
    graph = DecodeGraph(fused, cache, batch, table.pages_per_row, lambda out: head(out[:, -1]).argmax(-1))
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device="cuda")
    nothing = torch.empty(0, dtype=torch.int64, device="cuda")
    lengths = table.lengths[:batch]
    step = Step(nothing, lengths, lengths, table.pages[:batch], None, 0, table.num_pages, None)
    graph.load(ids, lengths[:, None], step)
    return graph


class StaticDecode:
    """transformers' decode step over its StaticCache filled with random tokens; eager, or recorded by hand."""

    def __init__(self, model: Any, shape: Shape, batch: int, context: int) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=context + 1)
        size = (batch, shape.kv_heads, context, shape.head_dim)
        random = torch.randn(size, dtype=torch.float16, device="cuda")
        for index in range(model.config.num_hidden_layers):
            self.cache.update(random, random, index)
        del random
        self.ids = torch.randint(0, model.config.vocab_size, (batch, 1), device="cuda")
        self.positions = torch.full((batch, 1), context, dtype=torch.int64, device="cuda")
        # A ready-made mask: building one from the cache's length would wait for the GPU.
        self.mask = torch.ones(batch, 1, 1, context + 1, dtype=torch.bool, device="cuda")
        self.marks = [layer.cumulative_length for layer in self.cache.layers]

    def step(self) -> None:
        """One token for every row, written to the same place each time."""
        for mark in self.marks:
            if isinstance(mark, torch.Tensor):
                mark.fill_(self.mask.shape[-1] - 1)
        out = self.model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.ids.copy_(out.logits[:, -1:].argmax(-1))

    def record(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


def release() -> None:
    """Give memory of deleted models back, so that the next peak is its own."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
