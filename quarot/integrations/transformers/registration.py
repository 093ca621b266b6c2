"""Makes transformers know quarot: quantizer, configuration, attention and mask functions. Idempotent."""

from __future__ import annotations

from quarot.config import QuarotConfig

METHOD = "quarot"


def register_quantizer() -> None:
    """Register ``quant_method: "quarot"``; a registration by another copy of this package is replaced, not an error."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    from quarot.integrations.transformers.quantizer import QuarotHfQuantizer

    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = QuarotConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = QuarotHfQuantizer


def register_attention() -> None:
    """Register the attention functions ``"quarot"`` and ``"paged|quarot"`` and the mask function of the first."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from quarot.integrations.transformers.attention import quarot_attention
    from quarot.integrations.transformers.mask import quarot_mask
    from quarot.integrations.transformers.paged import quarot_paged_attention

    AttentionInterface.register(METHOD, quarot_attention)
    AttentionMaskInterface.register(METHOD, quarot_mask)
    AttentionInterface.register(f"paged|{METHOD}", quarot_paged_attention)
