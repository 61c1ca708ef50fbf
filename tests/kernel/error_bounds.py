"""How far a layer's output may be from float64 at most, number by number, from its formats' roundings alone.

A sum of few numbers is no statistic: nothing averages out, and a relative error says little of what nearly cancels.
What then holds is the worst case, in which every rounding goes the wrong way at once:

    INT8   a number is off by half a step, and a step is the row's largest magnitude / 127, after the rotation
    BF16   a number is off by 2^-8 of itself at most: eight significant bits, to nearest
    FP8    a weight is off by 2^-4 of itself, or by half a subnormal step, 2^-10 of the scale; activations as BF16

and a product of x ± dx with w ± dw is off by |x| dw + dx |w| + dx dw. The intermediate row carries the error of the
products before it, which the slope of the activation passes on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.kernel.layers import Floats, Ids, Layer

Float64s = NDArray[np.float64]

K_MULTIPLE, LARGEST_ROTATION, STEPS = 64, 512, 127
BF16_UNIT = 2.0**-8
E4M3_UNIT, E4M3_LARGEST, E4M3_HALF_STEP = 2.0**-4, 448, 2.0**-10
STEEPEST_SILU = 1.0999  # the largest slope, at 2.4
# fp32 sums of up to some hundred numbers, and an approximated exponential: a thousand times less than the formats'.
FP32_SLACK = 2e-5


def worst_case(layer: Layer, x: Floats, ids: Ids, weights: Floats, format: str, *, rotate: bool) -> Float64s:
    """The largest |output - float64| of every number, (T, H), for plain SiLU; ids are all of experts."""
    bound = np.zeros((x.shape[0], layer.hidden))
    for expert in range(layer.experts):
        tokens, slots = np.nonzero(ids == expert)
        if not len(tokens):
            continue
        rows = x[tokens].astype(np.float64)
        nothing = np.zeros_like(rows)
        gate, gate_error = _product(rows, nothing, layer.gate[expert], format, rotate)
        up, up_error = _product(rows, nothing, layer.up[expert], format, rotate)
        silu = np.abs(layer.activate(gate, np.ones_like(gate)))
        slope = STEEPEST_SILU * gate_error
        error = (silu + slope) * up_error + slope * np.abs(up) + FP32_SLACK * silu * np.abs(up)
        activated = layer.activate(gate, up).astype(np.float64)
        out, out_error = _product(activated, error, layer.down[expert], format, rotate)
        scaled = np.abs(weights[tokens, slots].astype(np.float64))[:, None]
        np.add.at(bound, tokens, scaled * (out_error + FP32_SLACK * np.abs(out)))
    return bound


def _product(x: Float64s, error: Float64s, weights: Floats, format: str, rotate: bool) -> tuple[Float64s, Float64s]:
    """x · weightsᵀ, and how far the kernel's may be from it when its x is within `error` of this one."""
    exact = x @ weights.astype(np.float64).T
    size = _rotation(x.shape[1]) if format == "INT8" and rotate else 1
    x, w = _rotated(x, size), _rotated(weights.astype(np.float64), size)
    # Each rotated number is a sum of all of its block.
    error = np.repeat(_padded(error).reshape(len(error), -1, size).sum(2), size, axis=1)
    if format == "INT8":
        dx = error + (np.abs(x) + error).max(1, keepdims=True) / STEPS / 2
        dw = np.abs(w).max(1, keepdims=True) / STEPS / 2 + np.zeros_like(w)
    elif format == "FP8":
        dx = error + BF16_UNIT * (np.abs(x) + error)
        dw = E4M3_UNIT * np.abs(w) + np.abs(w).max() / E4M3_LARGEST * E4M3_HALF_STEP
    else:
        dx, dw = error + BF16_UNIT * (np.abs(x) + error), BF16_UNIT * np.abs(w)
    x, w = np.abs(x), np.abs(w)
    return exact, (x @ dw.T + dx @ w.T + dx @ dw.T + FP32_SLACK * (x @ w.T)) / size


def _padded(x: Float64s) -> Float64s:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % K_MULTIPLE)))


def _rotation(inputs: int) -> int:
    """The largest power of two that divides the padded inputs, 512 at most."""
    padded = inputs + -inputs % K_MULTIPLE
    return min(LARGEST_ROTATION, padded & -padded)


def _rotated(x: Float64s, size: int) -> Float64s:
    """Padded, and times a Hadamard matrix of that size, block by block, not normalised."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = _padded(x)
    return (x.reshape(len(x), -1, size) @ matrix).reshape(x.shape)
