"""The plan is plain data, and the table of sites is checked for cancellation, not trusted."""

from __future__ import annotations

import json

import pytest

from quarot.architectures import ARCHITECTURES, Geometry
from quarot.rotation.plan import RotationPlan
from quarot.rotation.planning import make_plan
from quarot.rotation.sites import SITES, Site, check_sites, rotations_at
from quarot.rotation.spec import HadamardSpec

LLAMA_7B = Geometry(hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, num_layers=32)
SMOLLM2 = Geometry(hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, num_layers=30)
RECORD = ARCHITECTURES["LlamaForCausalLM"]


def test_llama_7b_is_the_paper() -> None:
    plan = make_plan(RECORD, LLAMA_7B)
    assert plan.r1_hadamard == HadamardSpec(4096, 1, 4096)
    assert plan.r2 == plan.r3 == HadamardSpec(128, 1, 128)
    assert plan.attn_out_input == HadamardSpec(4096, 1, 32, inner=128)
    assert plan.mlp_out_input == HadamardSpec(11008, 172, 64)
    assert not plan.r2_signs
    assert plan.notes == ()


def test_every_fallback_is_described() -> None:
    plan = make_plan(RECORD, SMOLLM2._replace(intermediate=13696, head_dim=90))
    text = plan.describe()
    assert len(plan.notes) == 5
    assert all(note in text for note in plan.notes)
    assert "107 blocks of H128" in text
    assert "9 heads have no Hadamard matrix" in text


def test_switched_off_is_described_as_none() -> None:
    plan = make_plan(RECORD, LLAMA_7B, r1=None, r2=False, r3=False, r4=False, o_proj_online="none")
    assert not plan.online
    assert plan.describe().count("none") == 5


@pytest.mark.parametrize("switches", [{}, {"r1": "orthogonal"}, {"r1": None, "r4": False}, {"o_proj_online": "full"}])
@pytest.mark.parametrize("sizes", [LLAMA_7B, SMOLLM2], ids=["llama-7b", "smollm2"])
def test_json_round_trip(sizes: Geometry, switches: dict) -> None:
    plan = make_plan(RECORD, sizes, seed=3, **switches)
    assert RotationPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_damaged_json_is_refused() -> None:
    data = make_plan(RECORD, LLAMA_7B).to_dict()
    with pytest.raises(ValueError, match=r"unknown fields \['r5'\]"):
        RotationPlan.from_dict({**data, "r5": 1})
    with pytest.raises(ValueError, match="not a multiple of order"):
        RotationPlan.from_dict({**data, "r3": {"size": 100, "order": 1, "pow2": 8, "inner": 1}})


def test_sites_cancel_on_every_path() -> None:
    check_sites()
    assert rotations_at("input", "attn_out") == ("r2", "head")


@pytest.mark.parametrize("dropped", list(SITES), ids=lambda site: f"{site.rotation}-{site.place}-{site.slot}")
def test_a_missing_site_is_found(dropped: Site) -> None:
    with pytest.raises(ValueError, match="rotations do not cancel from"):
        check_sites(tuple(site for site in SITES if site != dropped))


def test_wrong_order_is_found() -> None:
    swapped = list(SITES)
    first, second = (swapped.index(Site(name, "input", "attn_out")) for name in ("r2", "head"))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ValueError, match="from v to attn_out"):
        check_sites(tuple(swapped))
