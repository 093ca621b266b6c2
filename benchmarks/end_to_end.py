"""Whole models, random weights, against transformers in fp16: decode, prefill, memory, one block.

m = batch, n = context.

Sizes follow the paper's tables 16 and 17, and serving: batch 1 to 64 over 1k to 8k tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.report import Row
from benchmarks.shapes import SHAPES, Options, Shape
from benchmarks.timing import copy_bandwidth
from quarot.bench.measure import BLOCK_CALLS, milliseconds
from quarot.bench.shapes import config_of
from quarot.bench.subjects import Decode, PackedDecode, Quantized, Recorded, Subject, release
from quarot.config import QuarotConfig

DECODE = (("llama-2-7b", 1024, (1, 16, 64)), ("llama-3-8b", 8192, (64,)))
PREFILL = (("llama-2-7b", 8, 2048),)
BLOCKS = (("llama-2-70b", 8, 2048), ("llama-2-7b", 8, 2048))
MEMORY = (("llama-2-7b", 16, 2048),)
WHOLE = (("llama-2-70b", 1024, 1),)
INT8_HEAD = (("llama-2-7b", 1024, 1),)
_EAGER_UP_TO = 64 * 1024  # cached tokens: beyond, an eager fp16 step only repeats the graph's time


CUDA = torch.device("cuda")


def rows(options: Options) -> Iterator[Row]:
    with torch.inference_mode():
        for model, context, batches in DECODE:
            if model in options.models:
                yield from _decode(SHAPES[model], context, batches[:1] if options.quick else batches)
        for model, context, batch in INT8_HEAD:
            if model in options.models and not options.quick:
                yield from _decode(SHAPES[model], context, (batch,), layer="lm_head int8", lm_head_bits=8)
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


def _ours(shape: Shape, layers: int | None = None, **settings: Any) -> Quantized:
    recipe = QuarotConfig(w_method="rtn", **settings)
    return Quantized.random_codes(config_of(shape, layers), recipe, torch.float16, "cuda")


def _theirs(shape: Shape, layers: int | None = None) -> Subject:
    return Subject.random(config_of(shape, layers), torch.float16, "cuda")


def _decode(
    shape: Shape, context: int, batches: tuple[int, ...], peers: bool = True, layer: str | None = None, **settings: Any
) -> Iterator[Row]:
    mine: dict[int, float] = {}
    ours = _ours(shape, **settings)
    embedding = ours.model.get_input_embeddings().weight
    weights = sum(p.numel() * p.element_size() for p in ours.model.parameters() if p is not embedding)
    cached: dict[int, int] = {}
    for batch in batches:
        decode = ours.decode(batch, context, room=64)
        assert isinstance(decode, PackedDecode)
        mine[batch] = milliseconds(decode.step, 5, 8, before=decode.rewind)
        cached[batch] = decode.cache.memory_footprint()
        del decode
        release(ours.device)
    del ours, embedding
    release(CUDA)
    theirs = _theirs(shape) if peers else None
    for batch in batches:
        # Every weight and every cached code once.
        roof = (weights + cached[batch]) / copy_bandwidth()
        common = {"m": batch, "n": context, "dtype": "float16", "us": mine[batch] * 1e3, "roof_us": roof * 1e6}
        common["tokens_per_s"] = round(batch / mine[batch] * 1e3, 1)
        if theirs is None:
            yield Row("e2e_decode", shape.model, layer, **common)
            continue
        peer: Decode | None = theirs.decode(batch, context, room=1)
        if batch * context <= _EAGER_UP_TO:
            eager = milliseconds(peer.step, 3, 2)
            yield Row("e2e_decode", shape.model, layer, **common, peer="transformers_fp16_eager", peer_us=eager * 1e3)
        graph: Decode | None = Recorded(peer)
        recorded = milliseconds(graph.step, 5, 4)
        yield Row("e2e_decode", shape.model, layer, **common, peer="transformers_fp16_graph", peer_us=recorded * 1e3)
        peer = graph = None
        release(CUDA)
    del theirs
    release(CUDA)


def _forward(op: str, shape: Shape, layers: int | None, batch: int, length: int) -> Iterator[Row]:
    """A forward over a prompt: the whole model with the logits of the last token, or the decoder layers alone."""
    times = []
    for build in (_ours, _theirs):
        subject: Subject | None = build(shape, layers)
        assert subject is not None
        call: Any = (subject.prefill if layers is None else subject.prefill_block)(batch, length)
        times.append(milliseconds(call, 5, 1 if layers is None else BLOCK_CALLS))
        subject = call = None
        release(CUDA)
    mine, peer = (1e3 * ms for ms in times)
    extra = {"tokens_per_s": round(batch * length / mine * 1e6)} if layers is None else {}
    sizes = {"m": batch, "n": length, "dtype": "float16"}
    yield Row(op, shape.model, **sizes, us=mine, peer="transformers_fp16_eager", peer_us=peer, **extra)


def _memory(shape: Shape, batch: int, context: int) -> Row:
    """Peak memory of decoding over a full cache, weights included."""
    peaks = []
    for build in (_ours, _theirs):
        release(CUDA)
        subject: Subject | None = build(shape)
        assert subject is not None
        decode: Decode | None = subject.decode(batch, context, room=64)
        assert decode is not None
        torch.cuda.reset_peak_memory_stats()
        decode.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        subject = decode = None
        release(CUDA)
    row = Row("e2e_memory", shape.model, m=batch, n=context, dtype="float16", peer="transformers_fp16_eager")
    row.update(bytes=peaks[0], peer_bytes=peaks[1], ratio=round(peaks[1] / peaks[0], 4))
    return row
