"""The trainer: its parts, and a whole run of two steps."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.muon import Muon, orthogonalise
from demo.train import draw_batch, learning_rate, parse_arguments, train, window_length


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(1.0)
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(0.02, abs=1e-3)


def test_windows_grow_to_the_full_context() -> None:
    assert [window_length(step, 100) for step in (0, 59, 60, 84, 85, 99)] == [256, 256, 512, 512, 1024, 1024]


def test_batches_are_stretches_of_the_text() -> None:
    batch = draw_batch(torch.arange(100), tokens=32, length=8, generator=torch.Generator().manual_seed(0))
    assert batch.shape == (4, 8)
    assert torch.equal(batch - batch[:, :1], torch.arange(8).expand(4, 8))


@pytest.mark.parametrize("shape", [(32, 64), (3, 32, 64), (2, 64, 16)])
def test_orthogonalised_updates_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalise(update).float())
    assert singular.min() > 0.3
    assert singular.max() < 1.4


def test_stacked_experts_are_updated_like_single_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(2, 8, 16, generator=generator))
    single = torch.nn.Parameter(stack[1].detach().clone())
    stack.grad = torch.randn(stack.shape, generator=generator)
    single.grad = stack.grad[1].clone()
    Muon([stack, single], lr=0.1, momentum=0.9, weight_decay=0.1).step()
    torch.testing.assert_close(stack[1], single, atol=1e-2, rtol=1e-2)


def test_batches_that_do_not_hold_whole_windows_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--batch-tokens", "1500"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "multiple of 1024" in capsys.readouterr().err


def test_two_runs_write_the_same_loadable_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Sentence {number} of a text about nothing." for number in range(1200)))
    threads = torch.get_num_threads()
    options = ["--steps", "2", "--batch-tokens", "1024", "--vocabulary", "300", "--corpus", str(text)]
    for run in ("first", "second"):
        monkeypatch.setattr("sys.argv", ["train", "--output", str(tmp_path / run), *options])
        train(parse_arguments(), Console(quiet=True))
    torch.set_num_threads(threads)

    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("first", "second")]
    assert weights[0] == weights[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "model")
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first" / "model")
    heldout = (tmp_path / "first" / "heldout.txt").read_text(encoding="utf-8")
    assert tokenizer.decode(tokenizer(heldout, verbose=False).input_ids) == heldout
