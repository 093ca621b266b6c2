"""SmolLM3: identical to Llama except that some layers have no RoPE."""

from quarot.architectures.record import Architecture

SMOLLM3 = Architecture(family="smollm3", model_class="SmolLM3ForCausalLM")
