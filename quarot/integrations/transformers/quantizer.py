"""What transformers calls while loading, saving and dequantising a model with ``quant_method: "quarot"``."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer

from quarot.config import QuarotConfig

logger = logging.getLogger("quarot")


class QuarotHfQuantizer(HfQuantizer):
    """Loads quarot checkpoints, and rotates and rounds full-precision ones while loading (no calibration)."""

    requires_calibration = False
    quantization_config: QuarotConfig
    pre_quantized: bool

    def __init__(self, quantization_config: QuarotConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)

    def update_tp_plan(self, config: Any) -> Any:
        """Refuse tensor parallelism.

        Raises:
            NotImplementedError: always, when the model is to be sharded.
        """
        distributed = getattr(config, "distributed_config", None)
        sharded = getattr(distributed, "tp_plan", None) or (getattr(distributed, "tp_size", None) or 1) > 1
        if distributed is not None and sharded:
            raise NotImplementedError(
                "quarot does not support tensor parallel: the online rotation and the per-token scale of o_proj and "
                "down_proj need the whole width; use device_map='auto' to spread layers over devices"
            )
        return config

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        from quarot.integrations.seal import check_seal
        from quarot.integrations.transformers.skeleton import prepare
        from quarot.integrations.transformers.verify import verify_checkpoint, watch_keys

        if self.pre_quantized:
            check_seal(self.quantization_config, kwargs.get("checkpoint_files"))
            prepare(model, self.quantization_config, kwargs.get("dtype"))
            verify_checkpoint(model, kwargs.get("checkpoint_files"))
            watch_keys(model)
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        from quarot.integrations.transformers.attachment import attach
        from quarot.integrations.transformers.verify import verify_values

        if not self.pre_quantized:
            self.quantization_config = quantize_at_load(model, self.quantization_config)
            self.pre_quantized = True
        else:
            verify_values(model)
        attach(model, self.quantization_config, quantizer=self)
        return model

    def dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Back to a plain model: rounded weights in ``dtype``, online rotations folded in, no trace of quarot left."""
        from quarot.integrations.transformers.attachment import detach
        from quarot.integrations.transformers.dequantize import plain_linears

        plain_linears(model, dtype or model.dtype)  # type: ignore[arg-type]
        detach(model)
        return model

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> tuple[None, dict[str, str]]:
        """The state dict as it is, and what weight files say of themselves (:mod:`quarot.integrations.seal`)."""
        from quarot.integrations.seal import seal

        config = model.config.quantization_config
        return None, seal(QuarotConfig.from_dict(config) if isinstance(config, dict) else config)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Everything is in named tensors and JSON."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integer codes have no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Every op is a ``torch.library`` op with shapes known in advance."""
        return True


def quantize_at_load(model: nn.Module, config: QuarotConfig) -> QuarotConfig:
    """Rotate and round a freshly loaded full-precision model in place; returns the configuration that describes it.

    GPTQ needs text, which loading has not: such a configuration is carried out, and recorded, as round to nearest.

    Raises:
        ValueError: weights are offloaded to disk or CPU hooks, or ``config`` claims a rotation.
    """
    import quarot

    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "quantising while loading needs every weight in memory, and device_map offloads some; "
            "load with device_map={'': 'cpu'} and save_pretrained the result, then load that with the device_map wanted"
        )
    if config.rotation is not None:
        raise ValueError(
            "quantization_config.rotation records how a checkpoint was rotated; leave it None for a full-precision "
            "model, which is rotated while loading (or use quarot.rotate_model and quarot.quantize_model)"
        )
    if config.w_method == "gptq" and config.w_bits < 16:
        logger.warning("quantising at load rounds to nearest (w_method='rtn'); use quarot.quantize_model for GPTQ")
        config = config.replace(w_method="rtn")
    forget(model)
    quarot.rotate_model(model, seed=config.seed)
    quarot.quantize_model(model, config)
    return model.config.quantization_config  # type: ignore[union-attr, return-value]


def forget(model: nn.Module) -> None:
    """Remove the marks of a quantizer from a model whose weights are plain."""
    if getattr(model.config, "quantization_config", None) is not None:  # type: ignore[union-attr]
        del model.config.quantization_config  # type: ignore[union-attr]
    for name in ("hf_quantizer", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    model.is_quantized = False  # type: ignore[assignment]
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_is_quantized", False):
            config._is_quantized = False  # type: ignore[union-attr]
