"""Writers of quantised weights, as the tools in the wild store them: from codes and scales to the tensors of a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Stored:
    """The tensors by their last name, and the weight (N, K) they mean."""

    tensors: dict[str, torch.Tensor]
    meaning: np.ndarray


def _words(codes: np.ndarray, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """(A, B) codes to int32 (A, B·bits/32), neighbours of the last axis in one word."""
    per_word = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    order = columns or tuple(range(per_word))
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), np.uint32)
    for place, column in enumerate(order):
        words |= codes[:, column::per_word].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32).copy())


@dataclass(frozen=True)
class Grid:
    """Codes (N, K), fp16-exact scales (N, G) and zero points (N, G) of groups of `group` inputs."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: int

    @classmethod
    def make(
        cls, channels: int, inputs: int, group: int, bits: int = 4, symmetric: bool = False, seed: int = 0
    ) -> Grid:
        draw = np.random.default_rng(seed)
        groups = -(-inputs // group)
        codes = draw.integers(0, 1 << bits, (channels, inputs))
        scales = draw.uniform(0.01, 0.1, (channels, groups)).astype(np.float16).astype(np.float32)
        half = 1 << (bits - 1)
        zeros = np.full((channels, groups), half) if symmetric else draw.integers(1, 1 << bits, (channels, groups))
        return cls(codes, scales, zeros, group)

    @classmethod
    def of(cls, weight: np.ndarray, group: int, symmetric: bool = False, bits: int = 4) -> Grid:
        """Codes of a float weight (N, K), K a multiple of `group`."""
        top, half = (1 << bits) - 1, 1 << (bits - 1)
        channels, inputs = weight.shape
        parts = weight.reshape(channels, inputs // group, group)
        low, high = parts.min(axis=2), parts.max(axis=2)
        spread = 2 * np.abs(parts).max(axis=2) if symmetric else high - low
        scales = np.maximum(spread / top, 1e-5).astype(np.float16).astype(np.float32)
        zeros = np.full(low.shape, half) if symmetric else np.clip(np.rint(-low / scales), 1, top).astype(np.int64)
        codes = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, top).astype(np.int64)
        return cls(codes.reshape(channels, inputs), scales, zeros, group)

    @property
    def meaning(self) -> np.ndarray:
        index = np.arange(self.codes.shape[1]) // self.group
        return self.meaning_with(index)

    def meaning_with(self, index: np.ndarray) -> np.ndarray:
        return (self.scales[:, index] * (self.codes - self.zeros[:, index])).astype(np.float32)


def gptq(grid: Grid, bits: int = 4, index: np.ndarray | None = None, offset: int = 1) -> Stored:
    order = np.arange(grid.codes.shape[1]) // grid.group if index is None else index
    tensors = {
        "qweight": _words(grid.codes, bits).T.contiguous(),
        "qzeros": _words(grid.zeros.T - offset, bits),
        "scales": torch.from_numpy(grid.scales.T.copy()).half(),
        "g_idx": torch.from_numpy(order.astype(np.int32)),
    }
    return Stored(tensors, grid.meaning_with(order))


def awq(grid: Grid) -> Stored:
    tensors = {
        "qweight": _words(grid.codes.T, 4, AWQ_COLUMNS),
        "qzeros": _words(grid.zeros.T, 4, AWQ_COLUMNS),
        "scales": torch.from_numpy(grid.scales.T.copy()).half(),
    }
    return Stored(tensors, grid.meaning)


def compressed(grid: Grid, bits: int = 4, symmetric: bool = True, index: np.ndarray | None = None) -> Stored:
    tensors = {
        "weight_packed": _words(grid.codes, bits),
        "weight_scale": torch.from_numpy(grid.scales).half(),
        "weight_shape": torch.tensor(grid.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(grid.zeros.T, bits).T.contiguous()
    if index is not None:
        tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    return Stored(tensors, grid.meaning if index is None else grid.meaning_with(index))


def fp8_of(weight: np.ndarray, block: tuple[int, int]) -> Stored:
    """DeepSeek-V3's form of a float weight (N, K)."""
    channels, inputs = weight.shape
    rows, columns = -(-channels // block[0]), -(-inputs // block[1])
    padded = np.zeros((rows * block[0], columns * block[1]), np.float32)
    padded[:channels, :inputs] = weight
    scales = np.abs(padded.reshape(rows, block[0], columns, block[1])).max(axis=(1, 3)) / 448
    spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:channels, :inputs]
    codes = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}
    return Stored(tensors, (codes.float().numpy() * spread).astype(np.float32))


def fp8(channels: int, inputs: int, block: tuple[int, int] | None, name: str, seed: int = 0) -> Stored:
    """`block` None: one scale a channel."""
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.randn(channels, inputs, generator=draw) * 20).to(torch.float8_e4m3fn)
    rows, columns = block or (1, inputs)
    scales = torch.rand(-(-channels // rows), -(-inputs // columns), generator=draw) + 0.5
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:channels, :inputs]
    return Stored({"weight": weight, name: scales}, (weight.float() * spread).numpy())


def mxfp4(channels: int, inputs: int, seed: int = 0) -> Stored:
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 16, (channels, inputs))
    exponents = draw.integers(115, 130, (channels, inputs // 32))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(channels, inputs // 32, 16)
    scales = np.exp2(exponents.astype(np.float32) - 127)
    tensors = {"blocks": torch.from_numpy(packed), "scales": torch.from_numpy(exponents.astype(np.uint8))}
    return Stored(tensors, E2M1[codes] * np.repeat(scales, 32, axis=1))
