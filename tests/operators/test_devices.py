"""Devices in rules on a host that has none of them."""

from __future__ import annotations

import logging

import pytest
import torch

from ktransformers.errors import DeviceError
from ktransformers.operators import devices

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a host without CUDA does")


@needs_no_cuda
def test_cuda_becomes_the_cpu_with_one_line_for_all_spellings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ktransformers"):
        resolved = [devices.resolve(name) for name in ("cuda", "cuda:0", "cuda:3", "cuda")]
    assert {(r.device, r.fell_back) for r in resolved} == {(torch.device("cpu"), True)}
    assert [record.message for record in caplog.records] == [
        f"cuda was asked for, and this host has none (torch {torch.__version__}): the CPU takes its place."
    ]


@needs_no_cuda
def test_strict_makes_the_missing_device_an_error() -> None:
    with pytest.raises(DeviceError, match="cuda was asked for, and this host has none"):
        devices.resolve("cuda:1", strict=True)


def test_the_cpu_is_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cpu", "cpu:0", torch.device("cpu")):
        resolved = devices.resolve(name, strict=True)
        assert (resolved.device, resolved.fell_back) == (torch.device("cpu"), False)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("cdua", "cuda"), ("CUDA", "cuda"), ("gpu", "npu"), ("cuda:", "cuda"), ("cuda:-1", "cuda"), ("cpuu", "cpu")],
)
def test_a_misspelt_device_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(DeviceError, match=f"is no device.*{nearest}"):
        devices.parse(name)


@pytest.mark.parametrize("name", [None, 0, "", "meta", "cpu:1", ["cpu"]])
def test_what_is_no_device_is_refused(name: object) -> None:
    with pytest.raises(DeviceError, match="is no device"):
        devices.parse(name)


def test_an_index_beyond_the_hosts_devices_becomes_the_cpu_unless_strict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve("cuda:1").device == torch.device("cuda:1")
    resolved = [devices.resolve("cuda:2") for _ in range(2)]
    assert {(r.device, r.fell_back) for r in resolved} == {(torch.device("cpu"), True)}
    assert len(caplog.records) == 1
    assert "cuda:2 was asked for, and this host has 2 cuda device(s)" in caplog.text
    with pytest.raises(DeviceError, match=r"this host has 2 cuda device\(s\)"):
        devices.resolve("cuda:2", strict=True)
