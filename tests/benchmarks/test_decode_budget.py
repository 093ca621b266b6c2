"""The parts that ``benchmarks.decode_budget`` leaves out are still where it looks for them."""

from __future__ import annotations

import quarot
from benchmarks.decode_budget import parts, without


def test_every_part_can_be_left_out(tiny_model):
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    found = parts(model)
    assert {"norm, gate_up", "SiLU + R4, down", "attention"} <= found.keys()
    for owner, name, belongs in found.values():
        original = getattr(owner, name)
        with without((owner, name, belongs)):
            assert getattr(owner, name) is not original
        assert getattr(owner, name) is original
