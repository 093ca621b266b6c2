"""Rotate and quantise a model, and save it.

quarot quantize smollm2 --out smollm2-w4a4kv4
quarot quantize meta-llama/Llama-2-7b-hf --out llama-w4a8kv4 --a-bits 8 --calibration wikitext2
quarot quantize ./model --out ./rotated --w-bits 16 --a-bits 16 --kv-bits 16        (rotation only)
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from quarot.cli import models, recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to save; must not exist")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at DIR")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="keep finished layers here; run again to continue")
    parser.add_argument("--offload", action="store_true", help="keep the model in CPU memory, one layer on the device")
    recipe.add_recipe_arguments(parser)


def run(options: argparse.Namespace) -> int:
    check_target(options.out, options.overwrite)
    config = recipe.config_of(options)
    device = models.device_of(options)

    import quarot
    from quarot.evaluation import load_text

    # The text first: a missing file must not cost a loaded and rotated model.
    text = load_text(options.calibration, "train") if recipe.needs_calibration(config) else None
    path = models.resolve(options.model)
    model = models.load(path, options, device="cpu" if options.offload else device)
    tokenizer = models.load_tokenizer(path)
    before, start = models.weight_bytes(model), time.monotonic()
    work = device if options.offload else None
    plan = recipe.rotate(model, options, work)
    if plan is not None:
        print(plan.describe())
    if config.w_bits < 16 or config.a_bits < 16 or config.k_bits < 16 or config.v_bits < 16 or config.overrides:
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
    seconds = time.monotonic() - start
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    after = models.folder_bytes(options.out)
    print(f"saved {options.out}: {models.megabytes(after)} (was {models.megabytes(before)}), {seconds:.0f} s")
    return 0


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse early to write over something: before minutes of work, not after.

    Raises:
        ValueError: the target exists and may not be replaced, or its parent cannot be made.
    """
    if out.is_file():
        raise ValueError(f"--out {out} is a file")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise ValueError(f"--out {out} exists; choose another folder, or pass --overwrite")
    out.parent.mkdir(parents=True, exist_ok=True)
