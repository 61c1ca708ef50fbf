"""An OpenAI-compatible HTTP server for one loaded model: transformers' own app, handed a model that is already there.

Needs the packages of `pip install 'ktransformers[serve]'`; `require_packages` says so where they are missing.
"""

from ktransformers.server.packages import require_packages

__all__ = ["require_packages"]
