"""A tiny model with a tokenizer on disk, and a text: enough to run every subcommand in seconds, offline."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = string.ascii_letters + string.digits + " .,:;!?'\"()[]{}-_=+*/<>|\\`\n@#%&^~$"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, 3 special ones: fits the tiny models' vocabulary of 128."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *dict.fromkeys(LETTERS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=256
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6000 characters of text."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 100, encoding="utf-8")
    return path
