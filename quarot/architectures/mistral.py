"""Mistral: identical to Llama except a sliding window, and head_dim apart from hidden / heads (Nemo)."""

from quarot.architectures.record import Architecture

MISTRAL = Architecture(family="mistral", model_class="MistralForCausalLM")
