"""The experts of one layer on the few tokens of a decode step, in bf16: given a router's choices, and the whole block.

Ours as a recorded graph (one GEMM for all experts), against our loop over the experts, which waits for the host, and
transformers' own experts. m = tokens, n = width of an expert, k = hidden. The choices are random and differ from call
to call; the roof is one read of every chosen expert.

Then decode steps of the whole model (``e2e_decode``, m = batch, n = cached tokens), against transformers in bf16 as a
recorded graph; its roof takes the experts that so many tokens choose on average, were they to choose evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.report import Row
from benchmarks.shapes import SHAPES, Options, Shape
from benchmarks.timing import Call, copy_bandwidth, measure, roof_us
from quarot.bench.measure import milliseconds
from quarot.bench.shapes import config_of
from quarot.bench.subjects import PackedDecode, Quantized, Recorded, Subject, release
from quarot.config import QuarotConfig
from quarot.nn import expert_list
from quarot.nn.expert_list import ExpertList
from quarot.runtime.fused_experts import FusedExperts
from quarot.runtime.synthetic import random_model, random_quantized_model

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b")
TOKENS = (1, 4, 16)
WHOLE = (("qwen3-30b-a3b", 1024, (1, 16)),)
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")
_CALLS = 32  # sets of choices in turn


class Routing:
    """Random choices of experts; a token's own, from call to call, go through all experts before one comes again."""

    def __init__(self, tokens: int, experts: tuple[int, int]) -> None:
        count, top_k = experts
        around = -(-_CALLS * top_k // count)  # top_k divides count: no token has an expert twice
        own = [torch.cat([torch.randperm(count) for _ in range(around)])[: _CALLS * top_k] for _ in range(tokens)]
        self.index = list(torch.stack(own).view(tokens, _CALLS, top_k).transpose(0, 1).contiguous().cuda())
        self.share = torch.rand(tokens, top_k, device="cuda").softmax(-1)
        self.distinct = sum(len(index.unique()) for index in self.index) / _CALLS
        self._next = 0

    def calls(self, run: Callable[..., Any], width: int) -> Callable[[], Call]:
        """``make`` of :func:`measure`: each call has tokens and choices of its own."""

        def make() -> Call:
            index = self.index[self._next % _CALLS]
            self._next += 1
            hidden = torch.randn(len(index), width, device="cuda", dtype=DTYPE)
            kept: list[Any] = []

            def call() -> None:
                kept[:] = [run(hidden, index, self.share)]

            return call

        return make


def rows(options: Options) -> Iterator[Row]:
    with torch.inference_mode():
        for model in MODELS[:1] if options.quick else MODELS:
            yield from _layer(SHAPES[model], TOKENS[:1] if options.quick else TOKENS)
            release(CUDA)
        if not options.quick:
            for model, context, batches in WHOLE:
                yield from _whole(SHAPES[model], context, batches)


def _layer(shape: Shape, tokens: tuple[int, ...]) -> Iterator[Row]:
    config = config_of(shape, layers=1, vocab=1024)
    ours = random_quantized_model(config, QuarotConfig(w_method="rtn", a_bits=4), dtype=DTYPE, device="cuda")
    theirs = random_model(config, dtype=DTYPE, device="cuda")
    experts, peer = ours.model.layers[0].mlp.experts, theirs.model.layers[0].mlp.experts
    assert isinstance(experts, ExpertList) and shape.experts is not None
    one = sum(p.nbytes for p in (*experts.gate_up[0].parameters(), *experts.down[0].parameters()))
    block = ours.model.quarot_fused.layers[0].mlp
    assert isinstance(block, FusedExperts)
    their_layer = theirs.model.layers[0]
    for m in tokens:
        routing = Routing(m, shape.experts)
        nbytes = int(one * routing.distinct)
        common: dict[str, Any] = {"m": m, "n": shape.intermediate, "k": shape.hidden, "dtype": "bfloat16"}
        common |= {"roof_us": roof_us(nbytes), "experts": routing.distinct}

        def timed(run: Callable[..., Any], size: int = nbytes, routing: Routing = routing, **how: Any) -> float:
            return measure(routing.calls(run, shape.hidden), size, **how)

        us = timed(experts)
        for name, peer_us in _peers(experts, peer, timed, nbytes):
            yield Row("moe_experts", shape.model, None, **common, us=us, peer=name, peer_us=peer_us)
        whole = timed(lambda hidden, index, share: block.after_norm(hidden, hidden, 1e-6))
        peer.config._experts_implementation = "grouped_mm"

        def their_block(hidden: torch.Tensor, index: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
            summed = hidden + hidden
            return summed + their_layer.mlp(their_layer.post_attention_layernorm(summed)[None])[0]

        yield Row(
            "moe_block",
            shape.model,
            None,
            **common,
            us=whole,
            peer="transformers_grouped_mm_graph",
            peer_us=timed(their_block, 4 * nbytes),
        )


def _peers(experts: ExpertList, peer: Any, timed: Callable[..., float], nbytes: int) -> Iterator[tuple[str, float]]:
    stacked, expert_list.STACKED_ROWS = expert_list.STACKED_ROWS, 0
    try:
        yield "quarot_loop", timed(experts, graph=False, replays=5)
    finally:
        expert_list.STACKED_ROWS = stacked
    for name, graph in (("grouped_mm", True), ("batched_mm", True), ("grouped_mm", False), ("eager", False)):
        peer.config._experts_implementation = name
        kind = f"{name}_graph" if graph else name
        yield f"transformers_{kind}", timed(peer, 4 * nbytes, graph=graph, replays=20 if graph else 5)


def _whole(shape: Shape, context: int, batches: tuple[int, ...]) -> Iterator[Row]:
    assert shape.experts is not None
    count, top_k = shape.experts
    torch.manual_seed(0)  # the weights decide which experts, and how many, a batch reads
    ours = Quantized.random_codes(config_of(shape), QuarotConfig(w_method="rtn"), DTYPE, CUDA)
    embedding = ours.model.get_input_embeddings().weight
    sizes = {n: p.nbytes for n, p in ours.model.named_parameters() if p is not embedding}
    experts = sum(nbytes for name, nbytes in sizes.items() if ".experts." in name)
    lines = []
    for batch in batches:
        decode = ours.decode(batch, context, room=64)
        assert isinstance(decode, PackedDecode)
        ms = milliseconds(decode.step, 5, 8, before=decode.rewind)
        share = 1 - (1 - top_k / count) ** batch
        moved = sum(sizes.values()) - experts + share * experts + decode.cache.memory_footprint()
        fields = {
            "m": batch,
            "n": context,
            "dtype": "bfloat16",
            "us": ms * 1e3,
            "roof_us": moved / copy_bandwidth() * 1e6,
        }
        lines.append({**fields, "tokens_per_s": round(batch / ms * 1e3, 1)})
        del decode
        release(CUDA)
    del ours, embedding
    release(CUDA)
    torch.manual_seed(0)
    theirs = Subject.random(config_of(shape), DTYPE, CUDA)
    for fields in lines:
        peer = Recorded(theirs.decode(fields["m"], context, room=1))
        ms = milliseconds(peer.step, 5, 4)
        yield Row("e2e_decode", shape.model, None, **fields, peer="transformers_bf16_graph", peer_us=ms * 1e3)
        del peer
        release(CUDA)
