"""The paper's tables on a tiny model: valid settings, resumed rows, shared weights, and reasons for what is skipped."""

import json

import pytest
import torch

import quarot
from quarot.config import QuarotConfig
from quarot.evaluation import reproduce
from quarot.evaluation.paper import TABLES, TASKS, Experiment, Table, paper_model
from quarot.evaluation.reproduce import Reproduction
from quarot.evaluation.reproduced_table import markdown
from quarot.evaluation.sharing import options_digest, retarget, shareable, weights_key
from quarot.quantization.presets import PRESETS, with_preset


class Letters:
    """One token a character."""

    def __call__(self, text, verbose=True):
        return {"input_ids": [3 + ord(c) % 100 for c in text]}


TEXT = "The quick brown fox jumps over the lazy dog, and once more. " * 20
SIZES = {"window": 64, "windows": 2, "samples": 2, "length": 32, "progress": False}


def reproduction(tiny_model, out, tables, loads=None, **options):
    def load():
        if loads is not None:
            loads.append(1)
        return tiny_model("llama")

    tables = {"t": tables} if isinstance(tables, Table) else tables
    return Reproduction(tables, load, Letters(), TEXT, TEXT, out, **{**SIZES, **options})


@pytest.mark.parametrize("name", TABLES)
def test_every_setting_is_a_valid_configuration(name):
    settings = [experiment.setting for experiment in TABLES[name].experiments]
    assert len(set(settings)) == len(settings)
    for experiment in TABLES[name].experiments:
        if experiment.quantize is not None:
            fields = dict(experiment.quantize)
            with_preset(None, fields.pop("preset", None), fields)
        for figures in experiment.paper_tasks.values():
            assert len(figures) in (1, len(TASKS) + 1)
            if len(figures) > 1:
                assert sum(figures[:-1]) / len(TASKS) == pytest.approx(figures[-1], abs=0.02)


def test_the_tables_of_the_paper_are_there():
    """Every experiment that the paper reports accuracy for, by what its rows vary."""

    def fields(name):
        return [e.quantize or {} for e in TABLES[name].experiments]

    assert {(f.get("w_method", "gptq"), f.get("w_group_size")) for f in fields("main") if f} == {
        ("rtn", None), ("gptq", None), ("gptq", 256), ("gptq", 128), ("gptq", 64),
    }  # fmt: skip
    assert {(f["k_bits"], f["v_bits"]) for f in fields("kv") if f} == {(k, v) for k in (2, 3, 4) for v in (2, 3, 4)}
    weights = {
        (e.quantize["w_bits"], e.quantize["w_method"], e.rotate is None) for e in TABLES["weights"].experiments[1:]
    }
    assert weights == {(b, m, r) for b in (4, 3, 2) for m in ("rtn", "gptq") for r in (True, False)}
    assert {f["w_bits"] for f in fields("bits") if f} == {4, 6, 8}
    assert any(e.half_hadamard for e in TABLES["hadamard-precision"].experiments)
    assert any(e.rotate == {"r1": "orthogonal"} for e in TABLES["orthogonal"].experiments)


def test_the_papers_models_are_recognised():
    assert paper_model("meta-llama/Llama-2-7b-hf") == "llama-2-7b"
    assert paper_model("/data/Meta-Llama-3-8B/") == "llama-3-8b"
    assert paper_model("smollm2") is None


def test_a_killed_table_continues_and_seeds_are_averaged(tiny_model, tmp_path):
    table = Table("Title", (
        Experiment("full", None),
        Experiment("kv4", quantize={"w_bits": 16, "a_bits": 16}, paper={"llama-2-7b": 5.51}),
    ))  # fmt: skip
    out, loads = tmp_path / "results", []
    rows = reproduction(tiny_model, out, table, loads).run(seeds=2)["t"]
    assert [(row["setting"], row["seed"]) for row in rows] == [("full", 0), ("kv4", 0), ("kv4", 1)]
    assert all(row["ppl"] > 1 and row["windows"] == 2 for row in rows)
    (out / "t.json").write_text(json.dumps(rows[:2]))
    again = reproduction(tiny_model, out, table, loads)
    assert [row["seed"] for row in again.run(seeds=2)["t"]] == [0, 0, 1]
    assert len(loads) == 4
    shown = markdown("t", table, again.rows["t"], "llama-2-7b")
    assert "| 2 |" in shown
    assert "5.51" in shown
    assert "5.51" not in markdown("t", table, again.rows["t"], None)


def test_what_does_not_fit_is_skipped_with_its_reason(tiny_model, tmp_path):
    table = Table("Title", (Experiment("g100", quantize={"w_method": "rtn", "w_group_size": 100}),))
    rows = reproduction(tiny_model, tmp_path, table).run()["t"]
    assert rows[0]["ppl"] is None
    assert "100" in rows[0]["skipped"]
    assert "skipped:" in markdown("t", table, rows, None)


def test_a_text_that_is_too_short_is_a_reason(tiny_model, tmp_path):
    table = Table("Title", (Experiment("full", None), Experiment("gptq", quantize={})))
    rows = reproduction(tiny_model, tmp_path, table, window=5000, length=9000).run()["t"]
    assert "fewer than one window of 5000" in rows[0]["skipped"]
    assert "calibration_length=9000" in rows[1]["skipped"]
    assert {row["ppl"] for row in rows} == {None}


def test_what_memory_does_not_suffice_for_is_skipped_and_tried_again(tiny_model, tmp_path, monkeypatch):
    table = Table("Title", (Experiment("kv4", quantize={"w_bits": 16, "a_bits": 16}), Experiment("full", None)))
    measure, calls = reproduce.perplexity, []

    def first_too_large(*args, **options):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory left\nlower the batch")
        return measure(*args, **options)

    monkeypatch.setattr(reproduce, "perplexity", first_too_large)
    rows = reproduction(tiny_model, tmp_path, table).run()["t"]
    assert rows[0]["skipped"] == "no memory left lower the batch"
    assert rows[1]["ppl"] > 1
    rows = reproduction(tiny_model, tmp_path, table).run()["t"]
    assert sorted(row["setting"] for row in rows) == ["full", "kv4"]
    assert all(row["ppl"] > 1 for row in rows)
    assert len(calls) == 3


def test_the_preset_is_a_table_of_its_own():
    for name in ("best", "best-zero-shot"):
        trained = [e for e in TABLES[name].experiments if (e.quantize or {}).get("preset") == "best"]
        assert [(e.quantize["a_bits"], e.quantize["k_bits"]) for e in trained] == [(4, 4), (8, 4), (16, 16)]
    assert TABLES["best-zero-shot"].zero_shot


def test_rows_of_another_model_or_text_are_not_taken_for_its_own(tiny_model, tmp_path):
    table = Table("Title", (Experiment("full", None),))
    ours = reproduction(tiny_model, tmp_path, table, model="a").run()["t"]
    other = reproduction(tiny_model, tmp_path, table, model="b").run()["t"]
    shorter = reproduction(tiny_model, tmp_path, table, model="a", windows=1).run()["t"]
    assert [len(rows) for rows in (ours, other, shorter)] == [1, 1, 1]
    assert len(json.loads((tmp_path / "t.json").read_text())) == 3
    assert reproduction(tiny_model, tmp_path, table, model="a").run()["t"] == ours


RTN = Experiment("rtn", quantize={"w_method": "rtn", "a_bits": 16, "k_bits": 16, "v_bits": 16})


def test_a_row_measured_under_another_default_is_measured_again(tiny_model, tmp_path, monkeypatch):
    """The row says nothing of w_clip_norm itself: its default decides, and another one makes another row."""
    table = Table("Title", (Experiment("full", None), RTN))
    before = reproduction(tiny_model, tmp_path, table).run()["t"]
    loads = []
    assert reproduction(tiny_model, tmp_path, table, loads).run()["t"] == before
    assert not loads

    defaults = QuarotConfig._default_clips
    monkeypatch.setattr(QuarotConfig, "_default_clips", lambda self: {**defaults(self), "w_clip_norm": 8.0})
    after = reproduction(tiny_model, tmp_path, table, loads).run()["t"]
    assert len(loads) == 1
    assert after[0] == before[0]
    assert after[1]["ppl"] != before[1]["ppl"]
    assert json.loads((tmp_path / "t.json").read_text()) == after


def test_options_that_are_off_change_no_digest(monkeypatch):
    """So a new one, which is off in all settings there are, sends no row back to be measured."""
    off, on = {"w_method": "rtn"}, {"w_method": "rtn", "layer_steps": 5}
    known = options_digest({}, off)
    assert options_digest({}, on) != known and options_digest({"r3": False}, off) != known
    assert options_digest({"r3": True}, off | {"layer_steps": 0}) == known
    fields = QuarotConfig.to_dict
    newer = {"an_option": False, "its_steps": 0, "its_layers": [], "format_version": 2}
    monkeypatch.setattr(QuarotConfig, "to_dict", lambda self: fields(self) | newer)
    assert options_digest({}, off) == known


def test_a_row_measured_under_another_preset_is_measured_again(tiny_model, tmp_path, monkeypatch):
    preset = Experiment(
        "preset", quantize={"preset": "layerwise", "w_method": "rtn", "a_clip_search": False, "layer_steps": 0}
    )
    table = Table("Title", (preset,))
    (before,) = reproduction(tiny_model, tmp_path, table).run()["t"]
    monkeypatch.setitem(PRESETS, "layerwise", {**PRESETS["layerwise"], "a_clip": 0.5})
    (after,) = reproduction(tiny_model, tmp_path, table).run()["t"]
    assert after["ppl"] != before["ppl"]


def test_a_row_that_does_not_say_what_it_was_measured_under_is_not_trusted(tiny_model, tmp_path):
    (row,) = reproduction(tiny_model, tmp_path, Table("Title", (RTN,))).run()["t"]
    old = {name: value for name, value in row.items() if name != "options"}
    (tmp_path / "t.json").write_text(json.dumps([old | {"ppl": 1.0}]))
    (again,) = reproduction(tiny_model, tmp_path, Table("Title", (RTN,))).run()["t"]
    assert again["ppl"] == row["ppl"]


FP = {"w_bits": 16, "a_bits": 16, "k_bits": 16, "v_bits": 16}
SHARED = (
    Experiment("w4a4", quantize={"w_method": "rtn"}),
    Experiment("kv4", quantize=FP | {"k_bits": 4, "v_bits": 4}),
    Experiment("w4a16", quantize=FP | {"w_bits": 4, "w_method": "rtn"}),
    Experiment("a4", quantize=FP | {"a_bits": 4, "a_clip": 0.8}),
    Experiment("w4a8", quantize={"w_method": "rtn", "a_bits": 8, "a_group_size": 64, "kv_clip": 0.9}),
    Experiment("k3v2", quantize=FP | {"k_bits": 3, "v_bits": 2}),
)


def test_settings_with_the_same_weights_share_them_and_measure_the_same(tiny_model, tmp_path):
    """Two sets of weights in six settings; each figure is that of a model made for its setting alone."""
    table, loads = Table("Title", SHARED), []
    rows = reproduction(tiny_model, tmp_path, table, loads).run()["t"]
    assert len(loads) == 2
    ids = torch.tensor(Letters()(TEXT)["input_ids"])
    for row in rows:
        experiment = next(e for e in SHARED if e.setting == row["setting"])
        model = tiny_model("llama")
        quarot.rotate_model(model, progress=False)
        quarot.quantize_model(model, progress=False, **experiment.quantize)
        alone = quarot.perplexity(model, ids, window=64, max_windows=2, progress=False)
        assert row["ppl"] == pytest.approx(alone.ppl, rel=1e-6), row["setting"]


def test_weights_that_saw_activations_are_not_shared():
    plain, aware = {"a_bits": 4}, {"a_bits": 4, "gptq_quantized_inputs": True}
    assert weights_key({}, plain, 0) == weights_key({}, plain | {"a_bits": 8}, 0)
    assert weights_key({}, aware, 0) != weights_key({}, aware | {"a_bits": 8}, 0)
    assert weights_key({}, plain, 0) != weights_key({}, plain, 1)
    assert weights_key({}, plain, 0) != weights_key(None, plain, 0)


@pytest.mark.parametrize(
    "setting",
    [
        {"ignore": ["lm_head", "re:.*down_proj"]},
        {"overrides": {".*down_proj": {"w_bits": 4}}},
        {"overrides": {".*down_proj": {"a_bits": 8}}},
        {"lm_head_bits": 8},
    ],
)
def test_a_setting_that_rounds_few_layers_is_shared_as_it_is(setting, tiny_model):
    fields = {"w_bits": 16, "a_bits": 4, "w_method": "rtn", **setting}
    ids, found = torch.tensor([[5, 9, 11, 3, 8]]), []
    for given in (fields, shareable(fields)):
        model = tiny_model("llama")
        quarot.rotate_model(model, progress=False)
        quarot.quantize_model(model, progress=False, **given)
        retarget(model, fields)
        found.append(model(ids).logits)
    assert torch.equal(*found)


def test_groups_that_do_not_fit_leave_the_model_as_it_was(tiny_model):
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    quarot.quantize_model(model, w_method="rtn", progress=False)
    ids = torch.tensor([[5, 9, 11]])
    before = model(ids).logits
    with pytest.raises(ValueError, match="activation groups of 50"):
        retarget(model, {"a_group_size": 50})
    assert torch.equal(model(ids).logits, before)


def test_activations_are_rounded_behind_a_setting_that_rounds_no_layer(tiny_model):
    cache_only, activations = {"w_bits": 16, "a_bits": 16, "k_bits": 4}, {"w_bits": 16, "a_bits": 4, "k_bits": 16}
    ids = torch.tensor([[5, 9, 11, 3, 8]])
    found = []
    for first in (cache_only, activations):
        model = tiny_model("llama")
        quarot.rotate_model(model, progress=False)
        quarot.quantize_model(model, progress=False, **shareable(first))
        retarget(model, first)
        if first is cache_only:
            exact = model(ids).logits
        retarget(model, activations)
        found.append(model(ids).logits)
    assert torch.equal(*found)
    assert not torch.allclose(found[0], exact, rtol=0.01)

    model = tiny_model("llama")
    quarot.quantize_model(model, progress=False, **cache_only)
    with pytest.raises(ValueError, match="no layer of this model can round to a_bits=4"):
        retarget(model, activations)


def test_a_setting_of_several_tables_is_measured_once(tiny_model, tmp_path, monkeypatch):
    tables = {
        "a": Table("A", SHARED[:2]),
        "b": Table("B", (SHARED[1], Experiment("again", quantize={"w_bits": 4, "w_method": "rtn", "a_clip": 0.9}))),
    }
    calls = []
    measure = reproduce.perplexity
    monkeypatch.setattr(reproduce, "perplexity", lambda *args, **kw: calls.append(1) or measure(*args, **kw))
    rows = reproduction(tiny_model, tmp_path, tables).run()
    assert len(calls) == 2
    assert {row["setting"]: row["ppl"] for row in rows["b"]} == {
        "kv4": rows["a"][1]["ppl"], "again": rows["a"][0]["ppl"],
    }  # fmt: skip
    (tmp_path / "b.json").unlink()
    assert reproduction(tiny_model, tmp_path, tables).run()["b"][0]["ppl"] == rows["a"][1]["ppl"]
    assert len(calls) == 2


def test_zero_shot_rows_show_the_papers_below():
    table = TABLES["zero-shot"]
    scores = {"piqa": {"acc": 0.5, "acc_norm": 0.25}, "lambada": {"acc": 0.75}}
    rows = [{"table": "zero-shot", "setting": "w4a4kv4-gptq", "seed": 0, "ppl": None, "tasks": scores}]
    shown = markdown("zero-shot", table, rows, "llama-2-7b").splitlines()
    assert "| setting | piqa | lambada | average |" in shown
    assert "| w4a4kv4-gptq | 25.00 | 75.00 | 50.00 |" in shown
    assert "| the paper's | 76.77 | 70.39 | 65.64 |" in shown
    assert "the paper's" not in markdown("zero-shot", table, rows, None)


@pytest.mark.parametrize(
    "change",
    [{"windows": 0}, {"window": 1}, {"samples": -3}, {"length": 0}, {"batch_size": 0}, {"limit": -1}],
    ids=str,
)
def test_sizes_below_one_are_no_reason_to_skip_every_row(change, tiny_model, tmp_path):
    (name,) = change
    name = "max_windows" if name == "windows" else name
    with pytest.raises(ValueError, match=f"{name}={next(iter(change.values()))} must be an integer, at least"):
        reproduction(tiny_model, tmp_path, Table("Title", (Experiment("full", None),)), **change)


def test_no_seeds(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="seeds=0 must be"):
        reproduction(tiny_model, tmp_path, Table("Title", (Experiment("full", None),))).run(seeds=0)


@pytest.mark.parametrize(("content", "message"), [("{", "damaged"), ("{}", "list of rows"), ("[3]", "list of rows")])
def test_damaged_results_are_named(content, message, tiny_model, tmp_path):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=rf"t\.json is .*{message}.*move it away"):
        reproduction(tiny_model, tmp_path, Table("Title", (Experiment("full", None),)))
