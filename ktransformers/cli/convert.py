"""`kt convert`: the converter of `kt_kernel`, which has its own command line."""

from __future__ import annotations

from typing import Any

import typer

__all__ = ["PASSED_ON", "convert"]

PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
}
"""All options are the converter's to read, `--help` too."""


def convert(context: typer.Context) -> None:
    """Convert a checkpoint's experts ahead of time, so that loading them is only reading."""
    from kt_kernel.convert_command import main

    raise typer.Exit(main(context.args, prog="kt convert"))
