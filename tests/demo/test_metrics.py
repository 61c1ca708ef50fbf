"""The accuracy figures, on cases small enough to work out by hand."""

import math

import pytest
import torch

from benchmarks.accuracy_metrics import compare, kl_divergence, log_probabilities, perplexity, token_windows

WINDOW = torch.tensor([0, 1, 0])


def rows(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_windows_cover_the_text_and_drop_a_remainder_that_predicts_nothing() -> None:
    windows = token_windows(torch.arange(9), 4)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(window) for window in token_windows(torch.arange(10), 4)] == [4, 4, 2]


def test_a_window_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        token_windows(torch.arange(4), 1)


def test_log_probabilities_are_float32_and_normalised() -> None:
    (result,) = log_probabilities(lambda window: torch.zeros(len(window), 4, dtype=torch.bfloat16), [WINDOW])
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.full((3, 4), -math.log(4.0)))


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    uniform = torch.full((3, 5), 1 / 5).log()
    assert perplexity([uniform], [WINDOW]) == pytest.approx(5.0)


def test_perplexity_weighs_tokens_not_windows() -> None:
    # First window: two predictions of probability 1/2. Second: one of 1/16. exp((2 ln 2 + ln 16) / 3) = 2 ** 2.
    first = rows([0.5, 0.5], [0.5, 0.5], [1.0, 0.0])
    second = rows([15 / 16, 1 / 16], [1.0, 0.0])
    assert perplexity([first, second], [WINDOW, torch.tensor([0, 1])]) == pytest.approx(4.0)


def test_kl_goes_from_reference_to_changed() -> None:
    reference, changed = rows([0.5, 0.5]), rows([0.25, 0.75])
    assert kl_divergence(reference, changed).item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-6)
    other_way = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert kl_divergence(changed, reference).item() == pytest.approx(other_way, rel=1e-6)


def test_kl_ignores_tokens_the_reference_excludes() -> None:
    assert kl_divergence(rows([1.0, 0.0]), rows([0.5, 0.5])).item() == pytest.approx(math.log(2.0))


def test_kl_is_infinite_where_the_changed_model_excludes_a_possible_token() -> None:
    assert kl_divergence(rows([0.5, 0.5]), rows([1.0, 0.0])).item() == math.inf


def test_a_model_compared_with_itself_loses_nothing() -> None:
    same = torch.log_softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(1)), dim=-1)
    accuracy = compare([same], [same], [WINDOW])
    assert (accuracy.relative_perplexity, accuracy.kl, accuracy.top1_agreement) == (0.0, 0.0, 1.0)
    assert accuracy.perplexity == pytest.approx(perplexity([same], [WINDOW]))


def test_compare_on_numbers_worked_out_by_hand() -> None:
    # Token 1 then token 0 are to be predicted; the last position counts for KL and agreement only.
    reference = rows([0.5, 0.5], [0.75, 0.25], [0.25, 0.75])
    changed = rows([0.75, 0.25], [0.75, 0.25], [0.75, 0.25])
    accuracy = compare([reference], [changed], [WINDOW])
    assert accuracy.perplexity == pytest.approx((0.25 * 0.75) ** -0.5)
    assert accuracy.relative_perplexity == pytest.approx(math.sqrt(2) - 1)
    first_kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    last_kl = 0.25 * math.log(1 / 3) + 0.75 * math.log(3)
    assert accuracy.kl == pytest.approx((first_kl + last_kl) / 3, rel=1e-6)
    assert accuracy.top1_agreement == pytest.approx(2 / 3)


def test_compare_refuses_sides_of_different_length() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([rows([0.5, 0.5])], [], [torch.tensor([0, 1])])
