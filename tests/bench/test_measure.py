"""Cases, running out of memory, and the tables made of them; on a CPU, with tiny random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quarot.bench.compare import compare
from quarot.bench.measure import Case, cases, cost
from quarot.bench.report import markdown
from quarot.bench.shapes import SHAPES, Shape, config_of
from quarot.bench.subjects import PackedDecode, Quantized, StaticDecode, Subject, UnfusedDecode
from quarot.config import QuarotConfig

TINY = Shape("tiny", 64, 96, 2, 1, 32, 2, 64)
CPU = torch.device("cpu")


def quantized(**fields: Any) -> Quantized:
    recipe = QuarotConfig(w_method="rtn", **fields)
    return Quantized.random_codes(config_of(TINY), recipe, torch.float32, CPU)


def test_a_packed_decode_step_is_that_of_the_model() -> None:
    """The step that is timed reads the whole context: its token is the one that the model's own forward chooses."""
    subject = quantized()
    decode = subject.decode(2, 20, 8)
    assert isinstance(decode, PackedDecode)
    with torch.inference_mode():
        first = decode.ids.clone()
        decode.step()
        decode.step()
        lengths = decode.graph.before.tolist()
        chosen = decode.graph.ids.clone()
        decode.rewind()
        hidden = [subject.model(ids, past_key_values=decode.cache).logits for ids in (first,)]
        second = hidden[0][:, -1:].argmax(-1)
        third = subject.model(second, past_key_values=decode.cache).logits[:, -1:].argmax(-1)
    assert lengths == [22, 22]
    assert torch.equal(third, chosen)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"a_bits": 16}, UnfusedDecode),
        ({"k_bits": 16, "v_bits": 16}, StaticDecode),
        ({"k_bits": 16, "v_bits": 16, "kv_bits_by_layer": [[16, 16], [8, 4]]}, PackedDecode),
        ({}, PackedDecode),
    ],
)
def test_every_recipe_decodes(fields: dict[str, Any], kind: type) -> None:
    subject = quantized(**fields)
    assert isinstance(subject.decode(2, 10, 4), kind)
    for case in (Case("decode", 2, 10, 3), Case("prefill", 2, 5), Case("block prefill", 2, 5)):
        found = cost(subject, case, repeats=2)
        assert found.ms is not None and found.ms > 0, case


def test_out_of_memory_says_what_to_lower_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Subject.prefill

    def small(self: Subject, batch: int, length: int) -> Any:
        if batch * length > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, batch, length)

    def too_large(is_block: bool) -> Subject:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Subject, "prefill", small)
    plan = list(cases(("prefill",), (1, 16, 2), 32, (), ()))
    makes = {"quarot": lambda _: Subject.random(config_of(TINY), torch.float32, CPU), "eager": too_large}
    rows = compare(makes, plan, 1, CPU, progress=False)
    assert [row["quarot_failure"] for row in rows] == ["", "out of memory: lower --batch (16) or --prompt (32)", ""]
    assert [row["quarot_ms"] is None for row in rows] == [False, True, False]
    assert all("does not fit into memory" in row["eager_failure"] for row in rows)
    text = markdown(rows, "float32")
    assert "| 16 | 32 | no memory |  | no memory |  |" in text
    assert "- quarot, batch 16: out of memory: lower --batch (16) or --prompt (32)" in text


def test_a_peer_that_cannot_be_recorded_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand so on")

    monkeypatch.setattr("quarot.bench.subjects.Recorded", refusing)
    subject = Subject.random(config_of(TINY), torch.float32, CPU)
    found = cost(subject, Case("decode", 1, 8, 2), 1, recorded=True)
    assert found.failure.endswith("recorded as a CUDA graph: operation not permitted when stream is capturing")
    assert cost(subject, Case("decode", 1, 8, 2), 1).ms


def test_ratios_are_the_peers_figure_over_ours() -> None:
    row = {"table": "decode", "batch": 4, "prompt": 100, "tokens": 50, "quarot_ms": 2.0, "quarot_bytes": 10**9}
    row |= {"eager_ms": 9.0, "eager_bytes": 35 * 10**8, "graph_ms": 5.0, "graph_bytes": 4 * 10**9}
    row |= dict.fromkeys(("quarot_failure", "eager_failure", "graph_failure"), "")
    assert markdown([row], "float16").splitlines()[-1] == (
        "| 4 | 100 | 50 | 2 | 2000 | 9 | 4.50x | 5 | 2.50x | 1 | 3.5 | 3.50x |"
    )


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_model_is_of_a_supported_family(name: str) -> None:
    from transformers import AutoModelForCausalLM

    from quarot.architectures import architecture_of, geometry

    shape = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, layers=1))
    assert architecture_of(model).family.replace("_", "") == shape.family.lower()
    assert geometry(model)[:5] == (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate)


def test_the_peers_step_sees_the_whole_cache() -> None:
    from transformers import DynamicCache

    subject = Subject.random(config_of(TINY), torch.float32, CPU)
    decode = subject.decode(2, 10, 1)
    assert isinstance(decode, StaticDecode)
    cache, first = DynamicCache(), decode.ids.clone()
    for index, layer in enumerate(decode.cache.layers):
        cache.update(layer.keys[:, :, :10].clone(), layer.values[:, :, :10].clone(), index)
    with torch.inference_mode():
        decode.step()
        subject.model.set_attn_implementation("eager")
        wanted = subject.model(first, past_key_values=cache, position_ids=torch.full((2, 1), 10)).logits[:, -1]
    assert torch.equal(decode.ids[:, 0], wanted.argmax(-1))
