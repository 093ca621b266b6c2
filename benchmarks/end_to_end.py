"""Whole models, random weights, against transformers in fp16: decode, prefill, memory, one block.

m = batch, n = context.

Sizes follow the paper's tables 16 and 17, and serving: batch 1 to 64 over 1k to 8k tokens.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import whole_models
from benchmarks.report import Row
from benchmarks.shapes import SHAPES, Options, Shape
from benchmarks.timing import copy_bandwidth
from quarot.nn.quant_kv_cache import QuantKVCache

DECODE = (("llama-2-7b", 1024, (1, 16, 64)), ("llama-3-8b", 8192, (64,)))
PREFILL = (("llama-2-7b", 8, 2048),)
BLOCKS = (("llama-2-70b", 8, 2048), ("llama-2-7b", 8, 2048))
MEMORY = (("llama-2-7b", 16, 2048),)
WHOLE = (("llama-2-70b", 1024, 1),)
_EAGER_UP_TO = 64 * 1024  # cached tokens: beyond, an eager fp16 step only repeats the graph's time


def rows(options: Options) -> Iterator[Row]:
    with torch.inference_mode():
        for model, context, batches in DECODE:
            if model in options.models:
                yield from _decode(SHAPES[model], context, batches[:1] if options.quick else batches)
        for model, batch, length in PREFILL:
            if model in options.models:
                yield from _forward("e2e_prefill", SHAPES[model], None, batch, length)
        for model, batch, length in BLOCKS:
            if model in options.models:
                yield from _forward("block_prefill", SHAPES[model], 1, batch, length)
        for model, batch, context in MEMORY:
            if model in options.models:
                yield _memory(SHAPES[model], batch, context)
        for model, context, batch in WHOLE:
            if model in options.models and not options.quick:
                yield from _decode(SHAPES[model], context, (batch,), peers=False)


def _milliseconds(call: Callable[[], Any], repeats: int, inner: int = 1) -> float:
    """Median time of ``inner`` calls, divided by it; host time included, because an eager step is bound by it."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / inner)
    return statistics.median(times)


def _decode(shape: Shape, context: int, batches: tuple[int, ...], peers: bool = True) -> Iterator[Row]:
    mine: dict[int, float] = {}
    model = whole_models.ours(shape)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - _embedding_bytes(model)
    cached: dict[int, int] = {}
    for batch in batches:
        cache = whole_models.filled_packed_cache(model, shape, batch, context)
        graph = whole_models.packed_decode(model, cache, batch)
        mine[batch] = _milliseconds(graph.run, 5, 8)
        cached[batch] = cache.memory_footprint()
        del graph, cache
        whole_models.release()
    del model
    whole_models.release()
    theirs = whole_models.theirs(shape) if peers else None
    for batch in batches:
        # Every weight and every cached code once.
        roof = (weights + cached[batch]) / copy_bandwidth()
        common = {"m": batch, "n": context, "dtype": "float16", "us": mine[batch] * 1e3, "roof_us": roof * 1e6}
        common["tokens_per_s"] = round(batch / mine[batch] * 1e3, 1)
        if theirs is None:
            yield Row("e2e_decode", shape.model, **common)
            continue
        peer = whole_models.StaticDecode(theirs, shape, batch, context)
        if batch * context <= _EAGER_UP_TO:
            eager = _milliseconds(peer.step, 3, 2)
            yield Row("e2e_decode", shape.model, **common, peer="transformers_fp16_eager", peer_us=eager * 1e3)
        graph = peer.record()
        recorded = _milliseconds(graph.replay, 5, 4)
        yield Row("e2e_decode", shape.model, **common, peer="transformers_fp16_graph", peer_us=recorded * 1e3)
        del peer, graph
        whole_models.release()
    del theirs
    whole_models.release()


def _embedding_bytes(model: Any) -> int:
    weight = model.get_input_embeddings().weight
    return int(weight.numel() * weight.element_size())


def _forward(op: str, shape: Shape, layers: int | None, batch: int, length: int) -> Iterator[Row]:
    """A forward over a prompt: the whole model with the logits of the last token, or the decoder layers alone."""
    inputs: dict[str, Any] = {"use_cache": True}
    if layers is None:
        inputs.update(input_ids=torch.randint(0, shape.vocab, (batch, length), device="cuda"), logits_to_keep=1)
    else:
        inputs.update(inputs_embeds=torch.randn(batch, length, shape.hidden, dtype=torch.float16, device="cuda"))
    times = []
    for build in (whole_models.ours, whole_models.theirs):
        model = build(shape, layers)
        part = model if layers is None else model.model
        # As generation does it: exact attention, and codes stored in a cache that was allocated before.
        cache = QuantKVCache(model.config, max_batch=batch, max_length=length) if build is whole_models.ours else None
        times.append(_milliseconds(functools.partial(_prefill, part, cache, inputs), 5))
        del model, part, cache
        whole_models.release()
    mine, peer = (1e3 * ms for ms in times)
    extra = {"tokens_per_s": round(batch * length / mine * 1e6)} if layers is None else {}
    sizes = {"m": batch, "n": length, "dtype": "float16"}
    yield Row(op, shape.model, **sizes, us=mine, peer="transformers_fp16_eager", peer_us=peer, **extra)


def _prefill(part: Any, cache: QuantKVCache | None, inputs: dict[str, Any]) -> Any:
    if cache is not None:
        cache.reset()
    return part(past_key_values=cache, **inputs)


def _memory(shape: Shape, batch: int, context: int) -> Row:
    """Peak memory of decoding over a full cache, weights included."""
    peaks = []
    whole_models.release()
    model = whole_models.ours(shape)
    cache = whole_models.filled_packed_cache(model, shape, batch, context)
    torch.cuda.reset_peak_memory_stats()
    graph = whole_models.packed_decode(model, cache, batch)
    graph.run()
    torch.cuda.synchronize()
    peaks.append(torch.cuda.max_memory_allocated())
    del model, cache, graph
    whole_models.release()
    peer = whole_models.StaticDecode(whole_models.theirs(shape), shape, batch, context)
    torch.cuda.reset_peak_memory_stats()
    peer.step()
    torch.cuda.synchronize()
    peaks.append(torch.cuda.max_memory_allocated())
    del peer
    whole_models.release()
    row = Row("e2e_memory", shape.model, m=batch, n=context, dtype="float16", peer="transformers_fp16_eager")
    row.update(bytes=peaks[0], peer_bytes=peaks[1], ratio=round(peaks[1] / peaks[0], 4))
    return row
