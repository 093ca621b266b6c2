"""Draw the outliers of a layer's activations before and after rotation (the paper's figure 1).

quarot plot smollm2 --out outliers.png --layer 10
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quarot.cli import models
from quarot.writable import check_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture to write (.png, .pdf, .svg)")
    parser.add_argument("--layer", type=int, metavar="N", help="decoder layer (default: the middle one)")
    parser.add_argument("--text", default="pydoc", metavar="TEXT", help="wikitext2, pydoc (default) or a text file")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of it (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="of the rotation (default 0)")


def run(options: argparse.Namespace) -> int:
    import quarot
    from quarot.evaluation import load_text
    from quarot.evaluation.outliers import channel_peaks, draw
    from quarot.evaluation.perplexity import encode

    if options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens} must be at least 1")
    check_file(options.out, "--out")
    text = load_text(options.text)
    path = models.resolve(options.model)
    model, tokenizer = models.load(path, options), models.load_tokenizer(path)
    ids = encode(tokenizer, text)[: options.tokens]
    before = channel_peaks(model, ids, options.layer)
    quarot.rotate_model(model, seed=options.seed, progress=not options.quiet)
    after = channel_peaks(model, ids, options.layer)
    draw(before, after, options.out, title=options.model)
    for name, old in before.items():
        new = after[name]
        print(f"input of {name}: largest / root mean square {old.ratio:.1f} before, {new.ratio:.1f} after rotation")
    print(f"wrote {options.out}")
    return 0
