"""Tuning a quantised model against its full-precision self: codes, scales and clip ratios learned by distillation."""
