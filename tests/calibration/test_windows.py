"""Where calibration windows come from, and what is said when they cannot."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import quarot
from quarot.calibration.windows import calibration_windows, held_out


class Letters:
    """One token a letter."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


class Dataset:
    def __init__(self, **columns: list[str]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __getitem__(self, name: str) -> list[str]:
        return self.columns[name]


def windows(calibration: Any, samples: int = 3, length: int = 8, seed: int = 0) -> torch.Tensor:
    return calibration_windows(calibration, Letters(), samples=samples, length=length, seed=seed)


TEXT = "the quick brown fox jumps over the lazy dog " * 3


def test_offsets_are_those_of_gptq() -> None:
    ids = [ord(letter) for letter in TEXT]
    random.seed(7)
    starts = [random.randint(0, len(ids) - 8 - 1) for _ in range(3)]
    assert windows(TEXT, seed=7).tolist() == [ids[s : s + 8] for s in starts]


def test_kinds_of_calibration_data(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    expected = windows(TEXT)
    assert torch.equal(windows(path), expected)
    assert torch.equal(windows(str(path)), expected)
    assert torch.equal(windows([TEXT]), expected)
    assert torch.equal(windows(Dataset(text=[TEXT])), expected)
    assert torch.equal(windows(torch.tensor([ord(letter) for letter in TEXT])), expected)
    assert torch.equal(windows(expected), expected)
    assert torch.equal(windows(iter([TEXT, "more"])), windows(TEXT + "\n\nmore"))


def test_the_last_window_may_end_at_the_end_of_the_text() -> None:
    assert windows(TEXT[:9]).tolist() == [[ord(c) for c in TEXT[:8]]] * 3


def test_too_short_and_empty() -> None:
    with pytest.raises(ValueError, match=r"8 tokens.*calibration_length=8 need at least 9.*to 7 or less"):
        windows(TEXT[:8])
    for empty in ("", "  \n", [], torch.empty(0, dtype=torch.long)):
        with pytest.raises(ValueError, match="empty"):
            windows(empty)


def test_wrong_kinds() -> None:
    with pytest.raises(TypeError, match="column `text`"):
        windows(Dataset(sentence=[TEXT]))
    with pytest.raises(TypeError, match="not int"):
        windows(3)
    with pytest.raises(TypeError, match="integers"):
        windows(torch.zeros(30))
    with pytest.raises(TypeError, match="needs a tokenizer"):
        calibration_windows(TEXT, None, samples=1, length=4, seed=0)


def test_the_end_is_held_out() -> None:
    ids = torch.arange(1000)
    rest, held = held_out(ids, None, samples=3, length=16)
    assert torch.equal(torch.cat([rest, held.flatten()]), ids)
    assert held.shape == (3, 16)


def test_at_most_an_eighth_is_held_out() -> None:
    rest, held = held_out(torch.arange(256), None, samples=8, length=16)
    assert held.shape == (2, 16)
    assert len(rest) == 224
    windows = torch.arange(20 * 4).view(20, 4)
    rest, held = held_out(windows, None, samples=8, length=16)
    assert torch.equal(torch.cat([rest, held]), windows)
    assert len(held) == 2
    assert len(held_out(windows[:5], None, samples=8, length=16)[1]) == 0


def test_a_name_that_is_no_file_is_told() -> None:
    with pytest.raises(ValueError, match=r"'wiki.txt' is taken as the text itself: there is no such file"):
        windows("wiki.txt", length=20)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_ids_are_integers(dtype: torch.dtype) -> None:
    for shape in ((30,), (2, 15)):
        with pytest.raises(TypeError, match="must be integers"):
            windows(torch.ones(shape).to(dtype))


@pytest.mark.parametrize("wrong", [-1, 128])
def test_ids_outside_the_vocabulary_are_refused(wrong: int, tiny_model: Any) -> None:
    model, ids = tiny_model("llama"), torch.randint(3, 128, (2, 16))
    ids[1, 3] = wrong
    with pytest.raises(ValueError, match=r"token ids from .* do not fit a vocabulary of 128"):
        quarot.quantize_model(model, calibration=ids, progress=False)
    with pytest.raises(ValueError, match=r"token ids from .* do not fit a vocabulary of 128"):
        quarot.perplexity(model, ids, window=16, progress=False)
