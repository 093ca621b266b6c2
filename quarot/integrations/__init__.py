"""The only code that knows other libraries' hooks, one package a library."""

from __future__ import annotations


def register() -> None:
    """Make transformers know quarot: now where it is imported already, else when it is."""
    from quarot.integrations.deferred import when_imported

    when_imported("transformers.quantizers.auto", _register_quantizer)
    when_imported("transformers.modeling_utils", _register_attention)


def _register_quantizer() -> None:
    from quarot.integrations.transformers.registration import register_quantizer

    register_quantizer()


def _register_attention() -> None:
    from quarot.integrations.transformers.registration import register_attention

    register_attention()
