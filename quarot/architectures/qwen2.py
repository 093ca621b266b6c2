"""Qwen2 and Qwen2.5: identical to Llama except biases on q, k and v."""

from quarot.architectures.record import Architecture

QWEN2 = Architecture(family="qwen2", model_class="Qwen2ForCausalLM")
