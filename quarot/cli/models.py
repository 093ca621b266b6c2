"""MODEL on the command line: a hub id, a folder, or ``smollm2``; and where to run it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quarot.integrations.checkpoint_folder import check_source, no_missing_shard, read_config

DTYPES = ("auto", "float32", "float16", "bfloat16")


def add_model_arguments(parser: argparse.ArgumentParser, *, name: str = "model") -> None:
    """MODEL, --device and --dtype."""
    parser.add_argument(name, metavar="MODEL", help="hub id, folder, or smollm2")
    add_place_arguments(parser)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """--device and --dtype."""
    group = parser.add_argument_group("where to run")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto is cuda where there is one")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="of unquantised tensors; auto: the checkpoint's")


def resolve(model: str) -> str:
    """The folder or hub id behind a MODEL argument."""
    if model.lower() == "smollm2":
        from quarot.models.smollm2 import smollm2_path

        return str(smollm2_path())
    return model


def device_of(options: argparse.Namespace) -> Any:
    """The torch device of ``--device``.

    Raises:
        ValueError: a device that does not exist here.
    """
    import torch

    name = options.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: not a torch device") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(
            f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here"
        )
    return device


def quantization_of(path: str) -> dict[str, Any] | None:
    """``quantization_config`` of a local folder's config.json; None for plain models and hub ids."""
    return read_config(path).get("quantization_config")


def checked(path: str) -> str:
    """The path itself; raises where it is meant to be a folder and holds no model."""
    check_source(path)
    read_config(path)
    return path


def load(path: str, options: argparse.Namespace, *, device: Any = None) -> Any:
    """The model at ``path`` (resolved), in evaluation mode, on the device; incomplete checkpoints are refused."""
    import torch
    import transformers

    import quarot

    checked(path)
    dtype: Any = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    where = {"dtype": dtype, "device_map": device or device_of(options)}
    if (quantization_of(path) or {}).get("quant_method") == "quarot":
        model = quarot.load(path, **where)
    else:
        with no_missing_shard(path):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **where)
        missing = sorted(found["missing_keys"])
        if missing:  # transformers has filled them with random numbers
            raise ValueError(
                f"{path} lacks {len(missing)} tensors of a {type(model).__name__}: {', '.join(missing[:3])}"
                f"{', ..' if missing[3:] else ''}; it is incomplete: download it again"
            )
    return model.eval()


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def weight_bytes(model: Any, *, layers_only: bool = False) -> int:
    """Bytes of all parameters and persistent buffers, each storage once: what a checkpoint holds.

    ``layers_only`` counts the decoder layers: what quantisation is about; embeddings and head stay as they are.
    """
    seen: dict[int, int] = {}
    for name, tensor in model.state_dict().items():
        if layers_only and ".layers." not in name:
            continue
        seen[tensor.data_ptr() or id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a saved model."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def megabytes(count: float) -> str:
    """``538.1 MB``."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
