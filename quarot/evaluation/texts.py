"""Where evaluation and calibration texts come from: WikiText-2 from the hub, a file, or CPython's own documentation."""

from __future__ import annotations

import importlib.util
import os
import urllib.request
from pathlib import Path

JOINT = "\n\n"
"""Rows of WikiText-2 are joined by a blank line, as GPTQ and QuaRot do."""

DATASETS = ("wikitext2", "pydoc")
SPLITS = {"train": "train", "validation": "validation", "test": "test"}


class TextUnavailable(RuntimeError):
    """A text cannot be had here; the message says why and what to pass instead."""


def load_text(source: str, split: str = "test") -> str:
    """A text as one string.

    Args:
        source: ``"wikitext2"`` (WikiText-2 raw, through ``datasets``), ``"pydoc"`` (the help topics that come with
            every CPython, 465k characters of technical English, for machines without a network), or a text file.
        split: of wikitext2: train, validation or test. ``pydoc``: the first 70 % are train, then validation and test.

    Raises:
        TextUnavailable: no such file, ``datasets`` is missing, or the hub cannot be reached.
        ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if source == "wikitext2":
        return _wikitext2(split)
    if source == "pydoc":
        return _pydoc(split)
    return _file(source)


def hub_reachable(seconds: float = 4.0) -> bool:
    """Whether the Hugging Face hub answers, and ``datasets`` is there to ask it: no long retries without a network."""
    if importlib.util.find_spec("datasets") is None or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(f"{endpoint}/api/datasets/Salesforce/wikitext", timeout=seconds) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _wikitext2(split: str) -> str:
    try:
        from datasets import load_dataset
    except ImportError:
        raise TextUnavailable(
            "wikitext2 needs the package datasets: pip install datasets, or name a text file, or pydoc, instead"
        ) from None
    try:
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=SPLITS[split])
    except Exception as error:  # datasets raises whatever its transport does
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise TextUnavailable(f"wikitext2 cannot be loaded ({reason}); name a text file, or pydoc, instead") from error
    return JOINT.join(rows["text"])


def _pydoc(split: str) -> str:
    from pydoc_data.topics import topics

    text = JOINT.join(topics[name] for name in sorted(topics))
    first, second = int(0.7 * len(text)), int(0.8 * len(text))
    return {"train": text[:first], "validation": text[first:second], "test": text[second:]}[split]


def _file(source: str) -> str:
    path = Path(source)
    if not path.is_file():
        raise TextUnavailable(f"{source!r} is neither a text file nor one of {', '.join(DATASETS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextUnavailable(f"{source} is not UTF-8 text: {error}") from None
    if not text.strip():
        raise TextUnavailable(f"{source} is empty")
    return text
