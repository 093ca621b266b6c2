"""quarot: run a Hugging Face LLM end to end in 4 bits (weights, activations and KV cache), after QuaRot (arXiv 2404.00456)."""

__version__ = "0.1.0"
