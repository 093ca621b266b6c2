"""The paper's tables on a tiny model: valid settings, resumed rows, and reasons for what is skipped."""

import json

import pytest

from quarot.config import QuarotConfig
from quarot.evaluation.paper import TABLES, Experiment, Table, paper_model
from quarot.evaluation.reproduce import Reproduction, markdown


class Letters:
    """One token a character."""

    def __call__(self, text, verbose=True):
        return {"input_ids": [3 + ord(c) % 100 for c in text]}


TEXT = "The quick brown fox jumps over the lazy dog, and once more. " * 20


def reproduction(tiny_model, out, table, **options):
    return Reproduction(
        "t", table, lambda: tiny_model("llama"), Letters(), TEXT, TEXT, out,
        **{"window": 64, "windows": 2, "samples": 2, "length": 32, "progress": False, **options},
    )  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_every_setting_is_a_valid_configuration(name):
    settings = [experiment.setting for experiment in TABLES[name].experiments]
    assert len(set(settings)) == len(settings)
    for experiment in TABLES[name].experiments:
        if experiment.quantize is not None:
            QuarotConfig(**experiment.quantize)


def test_the_papers_models_are_recognised():
    assert paper_model("meta-llama/Llama-2-7b-hf") == "llama-2-7b"
    assert paper_model("/data/Meta-Llama-3-8B/") == "llama-3-8b"
    assert paper_model("smollm2") is None


def test_a_killed_table_continues_and_seeds_are_averaged(tiny_model, tmp_path):
    table = Table("Title", (
        Experiment("full", None),
        Experiment("kv4", quantize={"w_bits": 16, "a_bits": 16}, paper={"llama-2-7b": 5.51}),
    ))  # fmt: skip
    out = tmp_path / "results" / "t.json"
    loads = []
    first = reproduction(tiny_model, out, table)
    first.load = lambda: loads.append(1) or tiny_model("llama")
    rows = first.run(seeds=2)
    assert [(row["setting"], row["seed"]) for row in rows] == [("full", 0), ("kv4", 0), ("kv4", 1)]
    assert all(row["ppl"] > 1 and row["windows"] == 2 for row in rows)
    out.write_text(json.dumps(rows[:2]))
    again = reproduction(tiny_model, out, table)
    again.load = lambda: loads.append(1) or tiny_model("llama")
    assert [row["seed"] for row in again.run(seeds=2)] == [0, 0, 1]
    assert len(loads) == 4
    shown = markdown("t", table, again.rows, "llama-2-7b")
    assert "| 2 |" in shown
    assert "5.51" in shown
    assert "5.51" not in markdown("t", table, again.rows, None)


def test_what_does_not_fit_is_skipped_with_its_reason(tiny_model, tmp_path):
    table = Table("Title", (Experiment("g100", quantize={"w_method": "rtn", "w_group_size": 100}),))
    rows = reproduction(tiny_model, tmp_path / "t.json", table).run()
    assert rows[0]["ppl"] is None
    assert "100" in rows[0]["skipped"]
    assert "skipped:" in markdown("t", table, rows, None)


def test_rows_of_another_model_or_text_are_not_taken_for_its_own(tiny_model, tmp_path):
    table, out = Table("Title", (Experiment("full", None),)), tmp_path / "t.json"
    ours = reproduction(tiny_model, out, table, model="a").run()
    other = reproduction(tiny_model, out, table, model="b").run()
    shorter = reproduction(tiny_model, out, table, model="a", windows=1).run()
    assert [len(rows) for rows in (ours, other, shorter)] == [1, 1, 1]
    assert len(json.loads(out.read_text())) == 3
    assert reproduction(tiny_model, out, table, model="a").run() == ours
