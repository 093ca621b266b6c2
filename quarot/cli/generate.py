"""Generate text with a model: packed weights, packed KV cache.

quarot generate smollm2-w4a8kv4 --prompt "The capital of France is"
quarot generate smollm2 --chat --prompt "Why is the sky blue?" --max-new-tokens 100
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from quarot.cli import models
from quarot.field_types import check_seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_model_arguments(parser)
    parser.add_argument("--prompt", required=True, help="text to continue; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message: use the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")


def run(options: argparse.Namespace) -> int:
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens} must be at least 1")
    check_seed("--seed", options.seed)
    from quarot.runtime.sampling import Sampling

    Sampling(options.temperature, None, options.top_p)  # checks both
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise ValueError("the prompt is empty")
    path = models.resolve(options.model)
    model, tokenizer = models.load(path, options), models.load_tokenizer(path)
    sampling: dict[str, Any] = (
        {"temperature": options.temperature, "top_p": options.top_p} if options.temperature else {}
    )
    text = continue_text(
        model,
        tokenizer,
        prompt,
        chat=options.chat,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        **sampling,
    )
    print(text if options.chat else prompt + text)
    return 0


def continue_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 64,
    seed: int = 0,
    **sampling: Any,
) -> str:
    """The model's continuation of a prompt, greedy unless sampling options are given."""
    import torch

    import quarot

    if chat:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(model.get_input_embeddings().weight.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    common = {"max_new_tokens": max_new_tokens, "pad_token_id": pad}
    if inputs["input_ids"].is_cuda and has_fused_path(model):
        mask = inputs["attention_mask"]
        ids = quarot.generate(model, inputs["input_ids"], attention_mask=mask, seed=seed, **common, **sampling)
    else:
        torch.manual_seed(seed)
        # The checkpoint's own sampling settings must not leak into a greedy run.
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.inference_mode():
            ids = model.generate(**inputs, **common, **({"do_sample": True, **sampling} if sampling else greedy))
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def has_fused_path(model: Any) -> bool:
    """Whether ``quarot.generate`` serves this model (a loop of recorded CUDA graphs); else ``model.generate`` does."""
    return vars(getattr(model, model.base_model_prefix)).get("quarot_fused") is not None
