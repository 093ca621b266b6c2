"""Rotate and quantise a model, and save it.

quarot quantize smollm2 --out smollm2-w4a4kv4
quarot quantize meta-llama/Llama-2-7b-hf --out llama-w4a8kv4 --a-bits 8 --calibration wikitext2
quarot quantize ./model --out ./rotated --w-bits 16 --a-bits 16 --kv-bits 16        (rotation only)
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quarot.cli import models, recipe
from quarot.writable import check_apart, check_folder

if TYPE_CHECKING:
    from quarot.config import QuarotConfig

logger = logging.getLogger("quarot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to save; must not exist")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at DIR")
    group = parser.add_argument_group("memory (default: one decoder layer at a time from disk; run again to continue)")
    group.add_argument("--in-memory", action="store_true", help="load the whole model; so does what cannot be streamed")
    group.add_argument("--offload", action="store_true", help="the same, in CPU memory, one layer on the device")
    group.add_argument("--resume", type=Path, metavar="DIR", help="the same; keep finished layers in DIR")
    recipe.add_recipe_arguments(parser)


def run(options: argparse.Namespace) -> int:
    check_target(options.out, options.overwrite)
    check_apart(options.model, options.out, "--out")
    config = recipe.config_of(options)
    models.device_of(options)

    from quarot.evaluation import load_text
    from quarot.streaming.checkpoint import CannotStream

    path = models.checked(models.resolve(options.model))
    # The text before the weights: a missing file must not cost a loaded and rotated model.
    text = load_text(options.calibration, "train") if recipe.needs_calibration(config) else None
    start = time.monotonic()
    before = None
    if not (options.in_memory or options.offload or options.resume):
        try:
            before = _stream(path, options, config, text)
        except CannotStream as reason:
            logger.info("the whole model is loaded: %s", reason)
    if before is None:
        before = _whole(path, options, config, text)
    seconds, after = time.monotonic() - start, models.folder_bytes(options.out)
    print(f"saved {options.out}: {models.megabytes(after)} (was {models.megabytes(before)}), {seconds:.0f} s")
    return 0


def _stream(path: str, options: argparse.Namespace, config: QuarotConfig, text: str | None) -> int:
    """One layer at a time; returns the bytes of the original."""
    import torch

    import quarot
    from quarot.rotation.plan import RotationPlan
    from quarot.streaming.checkpoint import Checkpoint

    before = Checkpoint(path).nbytes
    done = quarot.quantize_checkpoint(
        path,
        options.out,
        config,
        rotation=recipe.rotation_of(options),
        tokenizer=models.load_tokenizer(path),
        calibration=text,
        dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype),
        device=models.device_of(options),
        progress=not options.quiet,
    )
    if done.rotation is not None:
        print(RotationPlan.from_dict(done.rotation).describe())
    return before


def _whole(path: str, options: argparse.Namespace, config: QuarotConfig, text: str | None) -> int:
    """The model in memory; returns the bytes of the original."""
    import quarot

    device = models.device_of(options)
    model = models.load(path, options, device="cpu" if options.offload else device)
    tokenizer = models.load_tokenizer(path)
    before = models.weight_bytes(model)
    work = device if options.offload else None
    plan = recipe.rotate(model, options, work)
    if plan is not None:
        print(plan.describe())
    if config.rounds_linears or config.rounds_cache:
        progress = not options.quiet
        quarot.quantize_model(
            model,
            config,
            tokenizer=tokenizer,
            calibration=text,
            progress=progress,
            resume_dir=options.resume,
            device=work,
        )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return before


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse early to write over something: before minutes of work, not after.

    Raises:
        ValueError: the target exists and may not be replaced, or cannot be written.
    """
    check_folder(out, "--out")
    if out.exists() and any(file.name != f".{out.name}.unfinished" for file in out.iterdir()) and not overwrite:
        raise ValueError(f"--out {out} exists; choose another folder, or pass --overwrite")
