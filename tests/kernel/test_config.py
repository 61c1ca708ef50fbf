from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kt_kernel import ConfigError, GateFormula, MoEConfig, MoEWrapper

GOOD: dict[str, Any] = {
    "expert_num": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "max_len": 16,
    "num_experts_per_tok": 2,
}


def test_the_gate_may_be_left_out() -> None:
    assert MoEConfig.from_dict(GOOD).gate == GateFormula()


@pytest.mark.parametrize(
    ("alpha", "limit", "gate"),
    [
        (0, 0, GateFormula("silu")),
        (0.0, 7.0, GateFormula("silu", limit=7.0)),
        (1.702, 7.0, GateFormula("silu", alpha=1.702, limit=7.0, up_offset=1.0)),
        (1.702, 0.0, GateFormula("silu", alpha=1.702, up_offset=1.0)),
    ],
)
def test_alpha_and_limit_choose_the_formula(alpha: float, limit: float, gate: GateFormula) -> None:
    assert MoEConfig.from_dict({**GOOD, "swiglu_alpha": alpha, "swiglu_limit": limit}).gate == gate


@pytest.mark.parametrize("key", list(GOOD))
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        MoEConfig.from_dict(config)


def test_a_misspelt_key_names_the_nearest() -> None:
    config = {**GOOD, "num_expert_per_tok": 2}
    del config["num_experts_per_tok"]
    with pytest.raises(ConfigError, match="unknown key 'num_expert_per_tok'; did you mean 'num_experts_per_tok'"):
        MoEConfig.from_dict(config)


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(ConfigError, match=r"'max_len' is missing.*unknown key 'layers'.*'hidden_size' is -1") as error:
        MoEConfig.from_dict(
            {"expert_num": 8, "hidden_size": -1, "intermediate_size": 4, "num_experts_per_tok": 1, "layers": 3}
        )
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", None, 2**31])
@pytest.mark.parametrize("key", list(GOOD))
def test_a_size_is_a_whole_number_of_at_least_one(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is"):
        MoEConfig.from_dict({**GOOD, key: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1.0", None])
@pytest.mark.parametrize("key", ["swiglu_alpha", "swiglu_limit"])
def test_a_gate_constant_is_a_finite_number_of_at_least_zero(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is"):
        MoEConfig.from_dict({**GOOD, key: value})


def test_numpy_integers_are_whole_numbers() -> None:
    assert MoEConfig.from_dict({**GOOD, "expert_num": np.int64(8)}).expert_num == 8


def test_more_slots_than_experts_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"'num_experts_per_tok' is 6, more than the 4 experts"):
        MoEConfig.from_dict({**GOOD, "expert_num": 4, "num_experts_per_tok": 6})


def test_something_else_than_a_dictionary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config is a dictionary with expert_num.*got list"):
        MoEWrapper([8, 64, 32])  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, -2, 1.5, True, "2", 100_000])
def test_threads_are_a_whole_number_of_at_least_one(threads: Any) -> None:
    with pytest.raises(ConfigError, match="threads is"):
        MoEWrapper(GOOD, threads=threads)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size"])
def test_a_size_beyond_the_format_is_refused_before_weights_are_read(key: str) -> None:
    config = {**GOOD, key: 2**16 + 64}
    told = f"'{key}' is 65600; INT8 takes at most 65536; a BF16 backend takes up to 1048576"
    with pytest.raises(ConfigError, match=told):
        MoEWrapper(config, backend="INT8", threads=1)
    assert MoEWrapper(config, backend="BF16", threads=1).format == "BF16"
    MoEWrapper({**GOOD, key: 2**16}, backend="INT8", threads=1)
    with pytest.raises(ConfigError, match=r"BF16 takes at most 1048576$"):
        MoEWrapper({**GOOD, key: 2**20 + 1}, backend="BF16", threads=1)
