"""``quarot.generate`` against transformers' loop, and its own promises."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TextStreamer

import quarot
from quarot.runtime import fused_decoder
from quarot.runtime.sampling import Sampling


@pytest.fixture
def model(tiny_model):
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    return quarot.quantize_model(model, w_method="rtn", progress=False)


def test_greedy_equals_transformers(model, token_ids):
    mask = torch.ones_like(token_ids)
    mask[0, :6] = 0
    for attention_mask in (None, mask):
        ours = quarot.generate(model, token_ids, attention_mask=attention_mask, max_new_tokens=10, eos_token_id=())
        given = torch.ones_like(token_ids) if attention_mask is None else attention_mask
        theirs = model.generate(
            token_ids, attention_mask=given, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(ours, theirs)


def test_a_mixture_of_experts(tiny_model, moe_family, token_ids):
    """Tokens of the fused step and of the model's own layers."""
    model = tiny_model(moe_family)
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    ours = quarot.generate(model, token_ids, max_new_tokens=10, eos_token_id=())
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(token_ids)
    assert torch.equal(ours, model.generate(token_ids, attention_mask=mask, **options))
    fused_decoder.uninstall(model)
    assert torch.equal(ours, model.generate(token_ids, attention_mask=mask, **options))


def test_a_row_equals_the_row_alone(model, token_ids):
    together = quarot.generate(model, token_ids, max_new_tokens=6, eos_token_id=())
    alone = quarot.generate(model, token_ids[1:], max_new_tokens=6, eos_token_id=())
    assert torch.equal(together[1:], alone)


def test_end_tokens_stop_rows_and_pad(model, token_ids):
    free = quarot.generate(model, token_ids, max_new_tokens=10, eos_token_id=())[:, token_ids.shape[1] :]
    end = int(free[0, 3])
    stopped = quarot.generate(model, token_ids, max_new_tokens=10, eos_token_id=end, pad_token_id=7)
    new = stopped[:, token_ids.shape[1] :]
    for row, full in zip(new, free, strict=True):
        ended = (full == end).nonzero()
        stop = int(ended[0]) + 1 if len(ended) else len(full)
        stop = min(stop, len(row))
        assert torch.equal(row[:stop], full[:stop]) and (row[stop:] == 7).all()


def test_sampling_repeats_with_its_seed(model, token_ids):
    options = {"max_new_tokens": 12, "eos_token_id": (), "temperature": 1.3, "top_k": 20, "top_p": 0.95}
    first, second, other = (quarot.generate(model, token_ids, seed=s, **options) for s in (3, 3, 4))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_choices_follow_the_distribution():
    torch.manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20000, -1)
    counts = torch.bincount(Sampling(temperature=1.0).choose(logits), minlength=4) / 20000
    assert (counts - torch.tensor([0.5, 0.3, 0.15, 0.05])).abs().max() < 0.02
    assert set(Sampling(1.0, top_k=2).choose(logits).tolist()) == {0, 1}
    assert set(Sampling(1.0, top_p=0.6).choose(logits).tolist()) == {0, 1}
    assert set(Sampling(1.0, top_p=0.5).choose(logits).tolist()) == {0}


def test_streaming(model, token_ids):
    class Collector:
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, value):
            self.parts.append(value)

        def end(self):
            self.ended = True

    streamer = Collector()
    out = quarot.generate(model, token_ids[:1], max_new_tokens=5, eos_token_id=(), streamer=streamer)
    assert torch.equal(torch.cat(streamer.parts), out[0]) and streamer.ended


def test_a_session_is_reused_and_starts_afresh(model, token_ids):
    fused = vars(model.model)["quarot_fused"]
    first = quarot.generate(model, token_ids, max_new_tokens=6, eos_token_id=())
    session = fused.session
    quarot.generate(model, token_ids.flip(0), max_new_tokens=9, eos_token_id=())
    assert fused.session is session
    assert torch.equal(quarot.generate(model, token_ids, max_new_tokens=6, eos_token_id=()), first)


def test_prefill_in_chunks_stays_close(model, token_ids):
    with torch.no_grad():
        fused = vars(model.model)["quarot_fused"]
        quarot.generate(model, token_ids, max_new_tokens=1)
        whole = fused.session.prefill(token_ids, None, 1 << 20)
        parts = fused.session.prefill(token_ids, None, 2 * 9)
    # The second chunk reads the first one's codes, as decoding would.
    assert 0 < (whole - parts).norm() < 0.3 * whole.norm()


def test_a_long_prompt_never_meets_a_layer_or_the_head_at_once(model, token_ids, monkeypatch):
    """What bounds memory: a chunk of tokens in each layer, and one token a row in front of the vocabulary."""
    fused = vars(model.model)["quarot_fused"]
    seen: dict[str, list[int]] = {"layers": [], "head": []}
    layers, head = fused.run_layers, torch.nn.Linear.forward
    monkeypatch.setattr(fused, "run_layers", lambda x, attend: seen["layers"].append(len(x)) or layers(x, attend))
    assert [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)] == ["lm_head"]
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda self, x: seen["head"].append(x.shape[:-1].numel()) or head(self, x)
    )
    quarot.generate(model, token_ids, max_new_tokens=1, prefill_chunk=8)
    batch, length = token_ids.shape
    assert max(seen["layers"]) == 8
    assert sum(seen["layers"]) == batch * length
    assert set(seen["head"]) == {batch}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"attention_mask": torch.tensor([[1] * 16 + [0]] * 2)}, "pad on the left"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask must be \[2, 17\] on cpu, got torch.float32 \(2, 3\)"),
        ({"attention_mask": [[1] * 17] * 2}, "got a list"),
        ({"attention_mask": torch.full((2, 17), 2)}, "must hold 0 and 1"),
        ({"attention_mask": torch.full((2, 17), -1)}, "must hold 0 and 1"),
        ({"streamer": object()}, r"has put\(tokens\) and end\(\)"),
        ({"streamer": TextStreamer(None)}, "one row, got a batch of 2"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an int"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an int"),
        ({"max_new_tokens": None}, "max_new_tokens=None must be an int"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ({"prefill_chunk": -5}, "prefill_chunk=-5 must be at least 1"),
        ({"seed": 1.5}, "seed=1.5 must be an int"),
        ({"seed": 1 << 70}, "seed=1180591620717411303424 must be a number of 64 bits"),
        ({"pad_token_id": "x"}, "pad_token_id='x' must be an int"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' must be a token id or several"),
        ({"eos_token_id": [1.5]}, r"eos_token_id=\[1.5\] must be a token id or several"),
        ({"temperature": "hot"}, "temperature='hot' must be a finite float"),
        ({"temperature": 1e-45}, "temperature=1e-45 must be 0"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k=2.5 must be an int"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments(model, token_ids, change, message):
    with pytest.raises(ValueError, match=message):
        quarot.generate(model, token_ids, **change)


def test_bad_prompts(model, token_ids):
    with pytest.raises(ValueError, match="int64"):
        quarot.generate(model, token_ids.int())
    with pytest.raises(ValueError, match="tokens >= 1"):
        quarot.generate(model, token_ids[:, :0])
    with pytest.raises(ValueError, match="got a list"):
        quarot.generate(model, token_ids.tolist())
    for outside in (-1, 128):
        with pytest.raises(ValueError, match=f"token ids from {outside} to {outside} do not fit a vocabulary of 128"):
            quarot.generate(model, torch.full((1, 4), outside))


def test_a_model_without_the_fused_path_says_so(tiny_model, token_ids):
    with pytest.raises(NotImplementedError, match="fused decoder path"):
        quarot.generate(tiny_model("llama"), token_ids)
    with pytest.raises(NotImplementedError, match="fused decoder path"):
        quarot.generate(None, token_ids)


def test_an_interrupted_generation_leaves_the_model_usable(model, token_ids):
    class Impatient:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 4:
                raise KeyboardInterrupt

        def end(self):
            raise AssertionError("not reached")

    ids = token_ids[:1]
    expected = quarot.generate(model, ids, max_new_tokens=10, eos_token_id=())
    with pytest.raises(KeyboardInterrupt):
        quarot.generate(model, ids, max_new_tokens=10, eos_token_id=(), streamer=Impatient())
    assert torch.equal(quarot.generate(model, ids, max_new_tokens=10, eos_token_id=()), expected)


def test_a_model_that_was_moved_or_cast_gets_a_new_cache(model, token_ids):
    """Graphs know the addresses of its weights, and the pages the dtype of its keys."""
    tokens, session = quarot.generate(model, token_ids, max_new_tokens=4), model.model.quarot_fused.session
    graph = next(iter(session.graphs.values()))
    step = argparse.Namespace(table=graph.table)
    assert graph.fits(step, 2)
    copies = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, copy in zip(model.parameters(), copies, strict=True):
        parameter.data = copy
    assert not graph.fits(step, 2)
    assert torch.equal(quarot.generate(model, token_ids, max_new_tokens=4), tokens)
    assert model.model.quarot_fused.session is not session
    model.to(torch.bfloat16)
    assert quarot.generate(model, token_ids, max_new_tokens=4).shape == tokens.shape


def test_threads_take_turns(model, token_ids):
    """All calls of a model share a cache: at once they would write into each other's rows."""
    prompts = [token_ids[:1, start:] for start in range(4)]
    expected = [quarot.generate(model, ids, max_new_tokens=8) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: quarot.generate(model, ids, max_new_tokens=8), prompts))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_streamer_that_generates_is_refused(model, token_ids):
    class Nested:
        def put(self, value):
            quarot.generate(model, token_ids[:1], max_new_tokens=2)

        def end(self):
            pass

    with pytest.raises(RuntimeError, match="called by its own streamer"):
        quarot.generate(model, token_ids[:1], max_new_tokens=2, streamer=Nested())
    assert quarot.generate(model, token_ids[:1], max_new_tokens=2).shape == (1, token_ids.shape[1] + 2)
