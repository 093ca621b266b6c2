"""``quarot bench`` on a GPU: recorded steps, peak memory, and running out of it for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quarot.bench.measure import Case, cost
from quarot.bench.shapes import Shape, config_of
from quarot.bench.subjects import PackedDecode, Quantized, Subject
from quarot.cli import main
from quarot.config import QuarotConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = Shape("small", 256, 512, 4, 2, 64, 2, 512)
CUDA = torch.device("cuda")


def quantized(**fields: int) -> Quantized:
    return Quantized.random_codes(config_of(SMALL), QuarotConfig(w_method="rtn", **fields), torch.float16, CUDA)


@pytest.mark.parametrize("fields", [{}, {"a_bits": 8}, {"a_bits": 16}, {"k_bits": 16, "v_bits": 16}], ids=str)
def test_every_recipe_is_measured(fields: dict[str, int]) -> None:
    subject = quantized(**fields)
    for case in (Case("decode", 3, 100, 20), Case("prefill", 2, 64), Case("block prefill", 2, 64)):
        found = cost(subject, case, repeats=2)
        assert found.ms is not None and found.ms > 0
        assert found.nbytes is not None and found.nbytes > 0


def test_the_recorded_step_goes_on_and_back() -> None:
    decode = quantized().decode(2, 50, 20)
    assert isinstance(decode, PackedDecode)
    with torch.inference_mode():
        runs = []
        for _ in range(2):
            tokens = []
            for _ in range(10):
                decode.step()
                tokens.append(decode.graph.ids.clone())
            runs.append(torch.cat(tokens, 1))
            assert decode.graph.before.tolist() == [60, 60]
            decode.rewind()
    assert torch.equal(*runs)


def test_memory_that_does_not_suffice_is_an_answer() -> None:
    subject = Subject.random(config_of(SMALL), torch.float16, CUDA)
    found = cost(subject, Case("prefill", 1 << 24, 1 << 14), repeats=1)  # terabytes: refused, never taken from others
    assert found.failure == "out of memory: lower --batch (16777216) or --prompt (16384)"
    assert cost(subject, Case("prefill", 1, 16), repeats=1).ms


def test_the_command(tmp_path: Path) -> None:
    sizes = ["--batch", "2", "--prompt", "64", "--tokens", "8", "--contexts", "64", "--layers", "2", "--repeats", "1"]
    assert main(["bench", "smollm2-135m", "--out", str(tmp_path), "--quiet", *sizes]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["table"] for row in rows} == {"block prefill", "block decode", "prefill", "decode"}
    for row in rows:
        assert row["quarot_ms"] > 0 and row["eager_ms"] > 0, row
        assert (row["graph_ms"] is not None) == bool(row["tokens"]), row
        assert row["quarot_bytes"] > 0 and row["eager_bytes"] > 0, row
