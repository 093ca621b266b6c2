"""Zero-shot questions: the pairs that are scored, the accuracies, and damaged files."""

import gzip
import json

import pytest

from quarot.evaluation.zero_shot import parse_tasks, read_rows, requests, score


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_multiple_choice_is_worded_as_in_lm_eval():
    row = {"query": "Ice is", "choices": ["cold", " hot"], "gold": 0}
    expected = [("Question: Ice is\nAnswer:", " cold"), ("Question: Ice is\nAnswer:", " hot")]
    assert requests("arc_easy", row) == (expected, 0)
    assert requests("hellaswag", row) == ([("Ice is", " cold"), ("Ice is", " hot")], 0)


def test_winogrande_scores_what_follows_the_blank():
    row = {"query": "Ann thanked Bea because _ helped.", "choices": ["Ann", "Bea"], "gold": 1}
    pairs, gold = requests("winogrande", row)
    assert pairs == [("Ann thanked Bea because Ann", " helped."), ("Ann thanked Bea because Bea", " helped.")]
    assert gold == 1


def test_lambadas_target_is_the_last_word():
    assert requests("lambada", {"text": "the quick brown fox"}) == ([("the quick brown", " fox")], 0)
    with pytest.raises(ValueError, match="lambada: text 'fox' needs a last word"):
        requests("lambada", {"text": "fox"})


def test_accuracies():
    questions = [([("q", " a"), ("q", " long answer")], 1), ([("q", " a"), ("q", " b")], 0)]
    answers = [(-1.0, False), (-2.0, False), (-3.0, False), (-1.0, False)]
    # raw: a (-1) beats the long one (-2): wrong; b beats a: wrong. By byte: -2/11 beats -1/1: right.
    assert score(questions, answers) == {"acc": 0.0, "acc_norm": 0.5}
    assert score([([("a", " b")], 0), ([("a", " c")], 0)], [(-1.0, True), (-1.0, False)]) == {"acc": 0.5}


def test_files(tmp_path):
    plain = write(tmp_path / "piqa_valid.jsonl", {"query": "q", "choices": ["a"], "gold": 0})
    packed = tmp_path / "lambada.jsonl.gz"
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write('{"text": "a b"}\n')
    assert parse_tasks(f"{plain},x={packed}") == {"piqa_valid": plain, "x": packed}
    assert len(read_rows(plain)) == len(read_rows(packed)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", ":1 is not JSON"),
        ('{"query": "q"}\n', ":1 has neither text nor"),
        ("5\n", ":1 has neither text nor"),
        ('{"text": "a b"}\n{"text": "word"}\n', ":2: text 'word' needs a last word"),
        ('{"text": "two words "}\n', ":1: text 'two words ' needs a last word"),
        ("", "holds no questions"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(path)
    with pytest.raises(ValueError, match="is given twice"):
        parse_tasks(f"{path},{path}")


def test_with_lm_eval(tiny_model, tmp_path):
    """Through lm-eval's HFLM, where it is installed."""
    pytest.importorskip("lm_eval")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from quarot.evaluation.zero_shot import zero_shot

    letters = Tokenizer(models.WordLevel({"<e>": 0, **{chr(97 + i): i + 1 for i in range(26)}}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<e>", eos_token="<e>")
    file = write(tmp_path / "t.jsonl", {"query": "abc", "choices": ["d", "e"], "gold": 1})
    result = zero_shot(tiny_model("llama"), tokenizer, {"t": file})
    assert set(result["t"]) == {"acc", "acc_norm"}
