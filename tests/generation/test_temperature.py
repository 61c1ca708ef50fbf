"""Temperatures that no division by them survives take the likeliest token, as their limit does."""

from __future__ import annotations

import math

import pytest
import torch

from ktransformers.generation import sampling


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-40])
def test_next_to_nothing_is_greedy(temperature: float) -> None:
    assert sampling(temperature) == {"do_sample": False}


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 0.7, 2.0])
def test_all_else_draws_from_numbers(temperature: float) -> None:
    assert sampling(temperature) == {"do_sample": True, "temperature": temperature}
    assert math.isfinite((torch.tensor(1e4) / temperature).item())


def test_none_leaves_it_to_the_model() -> None:
    assert sampling(None) == {}
