"""What serving needs beyond the package itself."""

from __future__ import annotations

from importlib.util import find_spec

from ktransformers.errors import ServingError

__all__ = ["require_packages"]

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")  # what transformers' server imports


def require_packages() -> None:
    """Raises `ServingError` where a package is missing, or where transformers is too old to have a server in parts."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ServingError(
            f"serving needs {', '.join(missing)}, which is not installed: pip install 'ktransformers[serve]'"
        )
    try:
        from transformers.cli.serving import chat_completion, completion, server  # noqa: F401
    except ImportError as error:
        import transformers

        raise ServingError(
            f"transformers {transformers.__version__} does not have the server this was written for ({error}): "
            "pip install --upgrade transformers"
        ) from error
