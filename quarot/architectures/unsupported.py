"""Families that cannot be rotated exactly, and why, by the name of their transformers class."""

from __future__ import annotations

_POST_NORM = (
    "it normalises the output of its attention and MLP blocks before adding it to the residual stream, and the gain of "
    "such a norm cannot be folded into a following linear layer"
)
_LAYER_NORM = "it uses LayerNorm, which removes the mean and so does not commute with a rotation"

REASONS: dict[str, str] = {
    "Gemma2ForCausalLM": _POST_NORM,
    "Gemma3ForCausalLM": _POST_NORM,
    "Gemma3ForConditionalGeneration": _POST_NORM,
    "Olmo2ForCausalLM": _POST_NORM,
    "Olmo3ForCausalLM": _POST_NORM,
    "Glm4ForCausalLM": _POST_NORM,
    "Exaone4ForCausalLM": _POST_NORM,
    "OlmoForCausalLM": _LAYER_NORM,
    "CohereForCausalLM": _LAYER_NORM,
    "Cohere2ForCausalLM": _LAYER_NORM,
    "OPTForCausalLM": _LAYER_NORM,
    "GPT2LMHeadModel": _LAYER_NORM,
    "GPTNeoXForCausalLM": _LAYER_NORM,
    "GPTJForCausalLM": _LAYER_NORM,
    "BloomForCausalLM": _LAYER_NORM,
    "FalconForCausalLM": _LAYER_NORM,
    "MptForCausalLM": _LAYER_NORM,
    "PhiForCausalLM": _LAYER_NORM,
    "StableLmForCausalLM": _LAYER_NORM,
    "Starcoder2ForCausalLM": _LAYER_NORM,
}
