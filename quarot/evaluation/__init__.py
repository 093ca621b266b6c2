"""Measuring what quantisation costs: perplexity by the papers' protocol, texts, zero-shot tasks."""

from quarot.evaluation.perplexity import PerplexityResult, perplexity
from quarot.evaluation.texts import TextUnavailable, load_text

__all__ = ["PerplexityResult", "TextUnavailable", "load_text", "perplexity"]
