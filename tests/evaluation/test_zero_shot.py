"""Zero-shot questions: the pairs that are scored, the accuracies, and damaged files."""

import gzip
import json
import math

import pytest
import torch

from quarot.evaluation.likelihoods import likelihoods
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
    plain = write(tmp_path / "piqa_valid.jsonl", {"query": "q", "choices": ["a", "b"], "gold": 0})
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
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}\n', ":1: gold 2 must be the place of .*, 0 to 1"),
        ('{"query": "q", "choices": ["a", "b"], "gold": -1}\n', ":1: gold -1 must be"),
        ('{"query": "q", "choices": ["a", "b"], "gold": "1"}\n', ":1: gold '1' must be"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}\n', ":1: gold True must be"),
        ('{"query": "q", "choices": ["a"], "gold": 0}\n', r":1: choices \['a'\] must be a list of two"),
        ('{"query": "q", "choices": ["a", " "], "gold": 0}\n', ":1: choices .* none of them empty"),
        ('{"query": "q", "choices": "ab", "gold": 0}\n', ":1: choices 'ab' must be a list"),
        ('{"query": 3, "choices": ["a", "b"], "gold": 0}\n', ":1: query 3 is no text"),
        (
            '{"text": "a b"}\n{"query": "q", "choices": ["a", "b"], "gold": 0}\n',
            ":2: rows with a text and .* do not mix",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(path)
    with pytest.raises(ValueError, match="is given twice"):
        parse_tasks(f"{path},{path}")


def test_files_that_end_early_are_named(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a b"}\n' * 100)[:-12])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz cannot be read behind line \d+: Compressed file ended"):
        read_rows(path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"text": "a é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl cannot be read behind line 0: 'utf-8' codec"):
        read_rows(path)


@pytest.mark.parametrize("query", ["no blank", "two _ blanks _"])
def test_a_winogrande_question_has_one_blank(query):
    with pytest.raises(ValueError, match=r"winogrande_dev: query .* needs one blank"):
        requests("winogrande_dev", {"query": query, "choices": ["a", "b"], "gold": 0})


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

    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [("abc", "d"), ("a", "bcdefg"), ("zyx" * 9, "wv"), ("b", "b")]
    harness = HFLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, batch_size=3, max_length=20)
    theirs = harness.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    encoded = [(pair, *harness._encode_pair(*pair)) for pair in pairs]
    sizes = {"batch_size": 3, "max_length": 20, "device": harness.device}
    for own, other in zip(likelihoods(harness._model_call, encoded, **sizes), theirs, strict=True):
        assert own == pytest.approx(other, abs=1e-4)


def successor(ids):
    """Logits of a model that expects each token to be followed by the next number."""
    return 4.0 * torch.nn.functional.one_hot((ids + 1) % 30, 30).double()


def test_a_continuation_that_the_model_cannot_see_whole_is_refused():
    with pytest.raises(ValueError, match="a continuation has 4 tokens; the model sees 3"):
        likelihoods(successor, [(("", ""), [1], [2, 3, 4, 5])], batch_size=1, max_length=3, device=torch.device("cpu"))


def test_a_model_that_answers_nan_has_no_accuracy():
    pairs = [(("a", " b"), [1], [2]), (("c", " d"), [3], [4])]
    sizes = {"batch_size": 2, "max_length": 9, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match="log-likelihood of ' d' is nan"):
        likelihoods(lambda ids: successor(ids).where(ids[..., None] != 3, torch.nan), pairs, **sizes)


def test_likelihoods_of_continuations():
    pairs = [([3], [4, 5]), ([7, 1], [2]), ([9, 9, 9, 9, 4], [5, 9]), ([1], [2, 3, 4, 5])]
    requests = [(("", ""), *pair) for pair in pairs]
    right, wrong = math.log(math.exp(4) / (math.exp(4) + 29)), math.log(1 / (math.exp(4) + 29))
    expected = [(2 * right, True), (right, True), (right + wrong, False), (4 * right, True)]
    for batch_size in (1, 3, 9):
        seen = []
        found = likelihoods(
            lambda ids: seen.append(ids.shape) or successor(ids),  # noqa: B023
            requests,
            batch_size=batch_size,
            max_length=5,
            device=torch.device("cpu"),
        )
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-6)
        assert max(shape[1] for shape in seen) == 5  # of 7 tokens, the last is not read and the first is cut off
        assert max(shape[0] for shape in seen) == min(batch_size, 4)
