"""Perplexity against a computation by hand, and what it refuses."""

import math

import pytest
import torch

from quarot.evaluation import PerplexityResult, TextUnavailable, load_text, perplexity


def by_hand(model, ids, window):
    """The protocol, written out with a softmax in float64."""
    means = []
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window]
        with torch.no_grad():
            probabilities = model(part[None]).logits[0].double().softmax(-1)
        means.append(-sum(math.log(probabilities[i, part[i + 1]]) for i in range(window - 1)) / (window - 1))
    return math.exp(sum(means) / len(means)), means


@pytest.fixture
def ids():
    return torch.randint(3, 128, (103,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_matches_the_protocol_by_hand(tiny_model, ids, batch_size):
    model = tiny_model("llama")
    expected, means = by_hand(model, ids, 16)
    result = perplexity(model, ids, window=16, batch_size=batch_size, progress=False)
    assert (result.windows, result.tokens) == (6, 96)  # 103 = 6 * 16 + 7: the remainder is dropped
    assert result.ppl == pytest.approx(expected, rel=1e-5)
    assert result.window_nll == pytest.approx(means, rel=1e-5)


def test_max_windows_looks_at_the_first(tiny_model, ids):
    model = tiny_model("qwen2")
    every = perplexity(model, ids, window=16, progress=False)
    two = perplexity(model, ids, window=16, max_windows=2, progress=False)
    assert two.windows == 2
    assert two.nll == pytest.approx(sum(every.window_nll[:2]) / 2, rel=1e-6)


def test_half_precision_losses_are_taken_in_float32(tiny_model, ids):
    """A bfloat16 model's logits are widened before the softmax: the result is close to float32's, not to bf16 steps."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(ids[None, :16]).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, ids[1:16]).item()
    assert perplexity(model, ids[:16], window=16, progress=False).nll == pytest.approx(expected, rel=1e-6)


def test_a_text_is_tokenised_once_with_the_tokenizers_own_special_tokens(tiny_model):
    class Tokenizer:
        calls = 0

        def __call__(self, text, verbose):
            self.calls += 1
            return {"input_ids": [1] + [3 + ord(c) % 100 for c in text]}

    tokenizer = Tokenizer()
    result = perplexity(tiny_model("llama"), tokenizer, "hello world, hello", window=4, progress=False)
    assert tokenizer.calls == 1
    assert result.tokens == 16  # 18 characters and one BOS


def test_the_model_is_left_as_it_was(tiny_model, ids):
    model = tiny_model("llama").train()
    perplexity(model, ids, window=16, max_windows=1, progress=False)
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"window": 1}, "window=1"), ({"batch_size": 0}, "batch_size=0"), ({"window": 200}, "103 tokens, fewer than one")],
)
def test_refuses_sizes_that_do_not_fit(tiny_model, ids, arguments, message):
    with pytest.raises(ValueError, match=message):
        perplexity(tiny_model("llama"), ids, progress=False, **arguments)


def test_refuses_a_missing_text(tiny_model):
    with pytest.raises(ValueError, match="needs a tokenizer and a text"):
        perplexity(tiny_model("llama"), object(), progress=False)
    with pytest.raises(ValueError, match="of text needs a tokenizer"):
        perplexity(tiny_model("llama"), "a text", progress=False)
    with pytest.raises(ValueError, match="the text is empty"):
        perplexity(tiny_model("llama"), torch.empty(0, dtype=torch.int64), progress=False)


def test_names_the_window_that_overflows(tiny_model, ids):
    model = tiny_model("llama")
    model.lm_head.weight.data[5] = float("nan")
    with pytest.raises(FloatingPointError, match="window 0"):
        perplexity(model, ids, window=16, progress=False)


def test_prints_what_was_measured():
    assert (
        str(PerplexityResult(21.968, 3.09, 147, 301056, 60)) == "perplexity 21.9680 (147 windows, 301056 tokens, 60 s)"
    )


def test_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é one\n", encoding="utf-8")
    assert load_text(str(path)) == "é one\n"


def test_pydoc_splits_do_not_overlap():
    parts = [load_text("pydoc", split) for split in ("train", "validation", "test")]
    assert all(len(part) > 20_000 for part in parts)
    assert len({part[:200] for part in parts}) == 3


def test_missing_and_binary_files_are_named(tmp_path):
    with pytest.raises(TextUnavailable, match="neither a text file nor one of wikitext2"):
        load_text(str(tmp_path / "none.txt"))
    path = tmp_path / "b.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextUnavailable, match="not UTF-8"):
        load_text(str(path))
    with pytest.raises(ValueError, match="split"):
        load_text("pydoc", "dev")
