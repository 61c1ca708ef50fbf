"""What an error looks like at a terminal: one block of words and an exit code, a traceback only when asked for.

Exit codes: 0 fine, 1 something failed while running, 2 wrong usage or input, 3 the model does not fit into memory, 130
interrupted.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from ktransformers.cli.console import errors, say

__all__ = ["DOES_NOT_FIT", "FAILED", "WRONG_INPUT", "Guarded", "WrongInputError", "exit_code", "show_tracebacks"]

FAILED = 1
WRONG_INPUT = 2
DOES_NOT_FIT = 3
INTERRUPTED = 130

_NO_MEMORY = "can't allocate memory"  # torch's allocator has no type of its own for that

_tracebacks = False


class WrongInputError(Exception):
    """Something given on the command line that this model cannot take."""


def show_tracebacks(wanted: bool) -> None:
    """Whether errors of this process come with their traceback."""
    global _tracebacks
    _tracebacks = wanted


def exit_code(error: Exception) -> int | None:
    """The exit code of an error that was raised on purpose; None for any other."""
    from ktransformers.errors import CheckpointError, DoesNotFitError, KTransformersError

    try:
        from kt_kernel import KernelError
    except ImportError:  # an installation without its kernel; `kt doctor` tells more
        ours: tuple[type[Exception], ...] = (KTransformersError,)
    else:
        ours = (KTransformersError, KernelError)
    if isinstance(error, WrongInputError):
        return WRONG_INPUT
    if isinstance(error, DoesNotFitError):
        return DOES_NOT_FIT
    if not isinstance(error, ours):
        return None
    # By their second base: what is also a ValueError or a LookupError was given to us wrong.
    return WRONG_INPUT if isinstance(error, (ValueError, LookupError, CheckpointError)) else FAILED


class Guarded(TyperGroup):
    """Turns every exception of a command into words and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Usage errors and exits pass through to Typer, which knows how to show them."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("\nInterrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has seen enough
            sys.stdout = None  # or Python complains again while it shuts down
            raise typer.Exit(FAILED) from None
        except MemoryError as error:
            _show(error, f"Out of memory. {error}".rstrip())
            raise typer.Exit(FAILED) from None
        except Exception as error:
            if _belongs_to_typer(error):
                raise
            if isinstance(error, RuntimeError) and _NO_MEMORY in str(error):
                _show(error, f"Out of memory. {error}")
                raise typer.Exit(FAILED) from None
            code = exit_code(error)
            text = str(error) if code else f"unexpected {type(error).__name__}: {error}"
            _show(error, text if _tracebacks or code else f"{text}\n`kt --debug …` shows where it happened.")
            raise typer.Exit(code or FAILED) from None


def _belongs_to_typer(error: Exception) -> bool:
    # Exit, Abort and usage errors: Typer's own classes, wherever it keeps them.
    return isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code")


def _show(error: BaseException, text: str) -> None:
    if _tracebacks:
        say("".join(traceback.format_exception(error)).rstrip())
    console = errors()
    console.print("error: ", style="bold red", end="")
    console.print(text, markup=False)
