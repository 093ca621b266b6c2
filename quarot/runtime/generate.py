"""``generate``: a decoding loop that stays on the GPU.

Prefill goes through the model's forward, in chunks; every decode step, the choice of the token included, is one replay
of a recorded graph. The host looks at the tokens only now and then (every step when streaming).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quarot.memory import out_of_memory
from quarot.nn.hooks import HookWatch, hooking
from quarot.nn.page_table import StaticTable, Step
from quarot.nn.partial_attention import TILE
from quarot.nn.quant_kv_cache import QuantKVCache
from quarot.runtime.decode_graph import DecodeGraph, addresses, enabled
from quarot.runtime.fused_decoder import FusedDecoder
from quarot.runtime.generate_arguments import Numbers, check_streamer, check_tokens, end_tokens
from quarot.runtime.sampling import Sampling

_LOOK_EVERY = 16  # steps between two looks at whether every row has stopped
_MOST_GRAPHS = 4  # kept a session, one for each way of sampling
_ROUND_LENGTH = 256  # capacities are rounded up to this, so that a session serves prompts of similar length


class Streamer(Protocol):
    """Receives tokens as they come (transformers' ``TextStreamer`` is one)."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    streamer: Streamer | None = None,
    prefill_chunk: int = 16384,
    keep_memory: bool = True,
) -> Tensor:
    """Continue ``input_ids`` with a quantised model; the fast way on one GPU.

    Args:
        model: quantised by quarot, with the fused decoder path (``model.generate`` serves everything else).
        input_ids: int64 [B, T] on the model's device, left-padded where rows differ.
        attention_mask: [B, T], 0 = padding; None when there is none.
        max_new_tokens: tokens to add at most.
        temperature, top_k, top_p: see :class:`Sampling`; temperature 0 is greedy.
        eos_token_id: token(s) that end a row; default: those of the model's generation_config; ``()`` for none.
        pad_token_id: fills rows behind their end; default: the model's, else the first end token, else 0.
        seed: makes sampling repeatable.
        streamer: gets the prompt, then every new token (one row only).
        prefill_chunk: tokens (rows x columns) that one prefill forward takes at most: bounds its memory.
        keep_memory: keep the cache and its graphs for the next call of similar size; False frees them on return.

    Returns:
        int64 [B, T + n]: the prompt and n <= max_new_tokens new tokens.

    Raises:
        ValueError: arguments that do not fit.
        NotImplementedError: the model has no fused decoder path, or cannot take it now (the message says why).

    Calls from several threads are served one after the other.
    """
    fused = _fused(model)
    check_tokens(model, input_ids, attention_mask)
    Numbers(max_new_tokens, prefill_chunk, seed, pad_token_id)
    check_streamer(streamer, input_ids.shape[0])
    sampling = Sampling(temperature, top_k, top_p)
    ends = end_tokens(model, eos_token_id)
    with torch.no_grad(), _turn(fused):
        session = _session(model, fused, input_ids.shape[0], input_ids.shape[1] + max_new_tokens)
        # One generator for all seeded calls: a graph is tied to the one it was recorded with.
        generator = None if seed is None else session.generator.manual_seed(seed)
        what = f"quarot.generate of {' x '.join(map(str, input_ids.shape))} tokens and {max_new_tokens} new ones"
        try:
            session.busy = True
            with out_of_memory(what, f"the batch, max_new_tokens or prefill_chunk (now {prefill_chunk})"):
                logits = session.prefill(input_ids, attention_mask, prefill_chunk)
                first = sampling.choose(logits, generator)
                new = session.decode(first, sampling, generator, max_new_tokens, ends, streamer, input_ids)
        except torch.OutOfMemoryError:
            fused.session = None
            raise
        finally:
            if input_ids.is_cuda:  # the next call may come on another stream, and memory given back go to one
                torch.cuda.current_stream(input_ids.device).synchronize()
            session.busy = False
            if not keep_memory:
                fused.session = None
    return torch.cat([input_ids, _pad_behind_end(new, ends, _pad_token(model, pad_token_id, ends))], dim=1)


_turns: WeakKeyDictionary[FusedDecoder, Any] = WeakKeyDictionary()


@contextmanager
def _turn(fused: FusedDecoder) -> Iterator[None]:
    """One call at a time on a model, whose calls share a cache and recorded graphs: other threads wait.

    Raises:
        RuntimeError: the call comes out of the one that is running (from its streamer).
    """
    with _turns.setdefault(fused, threading.RLock()):
        if fused.session is not None and fused.session.busy:
            raise RuntimeError("quarot.generate was called by its own streamer, while its cache is in use")
        yield


class Session:
    """A cache of fixed size and the graphs over it, kept for the next call of similar size."""

    def __init__(self, model: Any, fused: FusedDecoder, batch: int, length: int) -> None:
        self.model, self.fused, self.batch, self.length = model, fused, batch, length
        fused.join()
        self.weights = _weights(model, fused)
        self.cache = QuantKVCache(model.config, max_batch=batch, max_length=length)
        self.generator = torch.Generator(model.get_input_embeddings().weight.device)
        self.graphs: dict[tuple[Sampling, bool], DecodeGraph] = {}
        self.busy = False

    def prefill(self, ids: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """Fill the cache with a prompt [B, T]; returns the logits [B, vocabulary] of its last column."""
        self.cache.reset()
        if mask is not None and bool(mask.all()):
            mask = None
        columns = max(1, chunk // ids.shape[0])
        if columns > TILE:
            columns -= columns % TILE
        if mask is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        else:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        for start in range(0, ids.shape[1], columns):
            end = min(start + columns, ids.shape[1])
            out = self.model(
                input_ids=ids[:, start:end],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1]

    def decode(
        self,
        first: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        count: int,
        ends: Tensor,
        streamer: Streamer | None,
        prompt: Tensor,
    ) -> Tensor:
        """New tokens int64 [B, n <= count], the ``first`` [B] of them included."""
        graph = self._graph(sampling, generator)
        table = self.cache.table
        assert isinstance(table, StaticTable)
        lengths, pages = table.lengths[: self.batch], table.pages[: self.batch]
        nothing = torch.empty(0, dtype=torch.int64, device=first.device)
        step = Step(nothing, lengths, lengths, pages, None, 0, table.num_pages, None)
        graph.load(first[:, None], lengths[:, None], step)
        tokens = first.new_empty(self.batch, count)
        tokens[:, 0] = first
        done = torch.zeros(self.batch, dtype=torch.bool, device=first.device)
        if streamer is not None:
            streamer.put(prompt[0].cpu())
        used = count
        for index in range(count):
            if index:
                graph.run() if enabled(first.device) else graph.step()
                tokens[:, index] = graph.ids[:, 0]
            if streamer is not None:
                streamer.put(tokens[0, index : index + 1].cpu())
            done |= torch.isin(tokens[:, index], ends)
            look = streamer is not None or index % _LOOK_EVERY == _LOOK_EVERY - 1
            if len(ends) and look and bool(done.all()):
                used = index + 1
                break
        if streamer is not None:
            streamer.end()
        return _trim(tokens[:, :used], ends)

    def _graph(self, sampling: Sampling, generator: torch.Generator | None) -> DecodeGraph:
        key = (sampling, generator is not None)
        graph = self.graphs.get(key)
        if graph is None or graph.addresses != addresses(self.fused, self.cache):
            head = self.model.get_output_embeddings()
            table = self.cache.table
            assert isinstance(table, StaticTable)
            graph = DecodeGraph(
                self.fused,
                self.cache,
                self.batch,
                table.pages_per_row,
                lambda out: sampling.choose(head(out[:, -1]), generator),
                generator,
            )
            self.graphs.pop(key, None)
            self.graphs[key] = graph
            while len(self.graphs) > _MOST_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
        return graph


def _weights(model: Any, fused: FusedDecoder) -> tuple[Any, ...]:
    """Where the weights are that a step reads, those of the head included."""
    return *fused.addresses(), *(parameter.data_ptr() for parameter in model.get_output_embeddings().parameters())


def _session(model: Any, fused: FusedDecoder, batch: int, length: int) -> Session:
    """The session of the last call where it fits, else a new one (only one is kept, so memory is bounded)."""
    rounded = -(-length // _ROUND_LENGTH) * _ROUND_LENGTH
    session: Session | None = fused.session
    fits = session is not None and session.model is model and session.batch == batch
    stays = session is not None and session.weights == _weights(model, fused)  # else moved, or of another dtype
    if session is None or not (fits and stays) or not length <= session.length <= 2 * rounded:
        fused.session = None
        session = fused.session = Session(model, fused, batch, rounded)
    return session


def _fused(model: Any) -> FusedDecoder:
    decoder = getattr(model, getattr(model, "base_model_prefix", ""), None)
    fused: FusedDecoder | None = getattr(decoder, "__dict__", {}).get("quarot_fused")
    if fused is None:
        raise NotImplementedError(
            "quarot.generate needs a model quantised by quarot with the fused decoder path "
            "(logger 'quarot' at level INFO says why it is off); use model.generate"
        )
    parts = [*fused.boundary.watch.modules, model.get_output_embeddings()]
    hooked = HookWatch(parts).find() or HookWatch([model, decoder]).find(attributes=False)
    reason = fused.obstacle((), {}) if hooked is None else hooking(hooked)
    if reason is not None:
        raise NotImplementedError(
            f"quarot.generate records its steps, which cannot be done now: {reason}; use model.generate"
        )
    return fused


def _pad_token(model: Any, pad: int | None, ends: Tensor) -> int:
    if pad is None:
        pad = getattr(getattr(model, "generation_config", None), "pad_token_id", None)
    if pad is None:
        pad = int(ends[0]) if len(ends) else 0
    return pad


def _ended(tokens: Tensor, ends: Tensor) -> Tensor:
    """bool [B, n]: an end token came at this place or before."""
    return torch.isin(tokens, ends).cumsum(1) > 0


def _trim(tokens: Tensor, ends: Tensor) -> Tensor:
    """Without the columns in which every row had ended before."""
    if not len(ends):
        return tokens
    running = ~_ended(tokens, ends)
    return tokens[:, : min(tokens.shape[1], int(running.sum(1).max()) + 1)]


def _pad_behind_end(tokens: Tensor, ends: Tensor, pad: int) -> Tensor:
    behind = torch.zeros_like(tokens, dtype=torch.bool)
    behind[:, 1:] = _ended(tokens, ends)[:, :-1]
    return tokens.masked_fill(behind, pad)
