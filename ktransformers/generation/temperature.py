"""What a temperature asks of `generate`."""

from __future__ import annotations

from typing import Any

__all__ = ["draws", "sampling"]

# Logits divided by less overflow fp32, and no token but the likeliest would be drawn long before.
_SMALLEST = 1e-30


def draws(temperature: float) -> bool:
    """Whether tokens are drawn at this temperature; else each is the likeliest."""
    return temperature >= _SMALLEST


def sampling(temperature: float | None) -> dict[str, Any]:
    """Arguments of transformers' `generate`; none for no temperature, which leaves it to the model."""
    if temperature is None:
        return {}
    return {"do_sample": True, "temperature": temperature} if draws(temperature) else {"do_sample": False}
