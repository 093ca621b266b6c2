"""What a saved folder says about itself: a README with the import it needs and, if asked for, code that imports quarot.

Without quarot imported, transformers logs a warning, builds a plain model and fills it with random numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

_README = """\
---
library_name: transformers
tags: [quarot]
---
Rotated and quantised with quarot (QuaRot, arXiv 2404.00456). Import quarot before loading:

```python
import quarot
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this folder")  # or quarot.load("this folder")
```
"""
_MODULE = '''\
"""Imports quarot, so that from_pretrained(..., trust_remote_code=True) loads this checkpoint in any process."""

import quarot  # noqa: F401
from transformers import {base}


class Quarot{base}({base}):
    pass
'''


def write_readme(folder: Path, target: Path) -> None:
    """A model card, unless ``folder`` or the ``target`` it will be moved to has one."""
    if not (folder / "README.md").exists() and not (target / "README.md").exists():
        (folder / "README.md").write_text(_README, encoding="utf-8")


def write_remote_code(folder: Path, base: str) -> None:
    """Code for ``trust_remote_code=True`` and its entry in ``config.json``; ``base`` is the model's class name."""
    (folder / "modeling_quarot.py").write_text(_MODULE.format(base=base), encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": f"modeling_quarot.Quarot{base}"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
