"""Granite 3: identical to Llama except scalar multipliers (embedding, residual, attention, logits), which commute."""

from quarot.architectures.record import Architecture

GRANITE = Architecture(family="granite", model_class="GraniteForCausalLM")
