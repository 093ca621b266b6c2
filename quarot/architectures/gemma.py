"""Gemma 1: identical to Llama except norms that multiply by 1 + weight, and an embedding scaled by sqrt(hidden)."""

from quarot.architectures.record import Architecture

GEMMA = Architecture(family="gemma", model_class="GemmaForCausalLM", norm_gain_offset=1.0)
