from __future__ import annotations

import pytest

from kt_kernel import ConfigError, MoEWrapper, environment
from tests.kernel.layers import make_layer


@pytest.mark.parametrize("text", ["ON", "on", "1", "true", "Yes"])
def test_switch_understands_every_spelling_of_on(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AMX", text)
    assert environment.ENABLE_AMX.get() is True


@pytest.mark.parametrize("text", ["OFF", "off", "0", "False", "no", " OFF "])
def test_switch_understands_every_spelling_of_off(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AMX", text)
    assert environment.ENABLE_AMX.get() is False


def test_empty_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "")
    assert environment.ENABLE_AVX2.get() is None


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("CPUINFER_ENABLE_AMX", "maybe", "ON or OFF"),
        ("CPUINFER_ENABLE_AVX512", "2", "ON or OFF"),
        ("KT_NUM_THREADS", "two", "a whole number from 1"),
        ("KT_NUM_THREADS", "0", "a whole number from 1"),
        ("KT_NUM_THREADS", "-3", "a whole number from 1"),
        ("KT_NUM_THREADS", "1.5", "a whole number from 1"),
    ],
)
def test_bad_value_is_an_error_that_names_variable_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is '{text}'.*{allowed}"):
        MoEWrapper(make_layer(2, 8, 8).config(1))


def test_number_of_threads_is_read_when_the_wrapper_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_layer(2, 8, 8).config(1)
    monkeypatch.setenv("KT_NUM_THREADS", "1")
    assert MoEWrapper(config).threads == 1
    monkeypatch.setenv("KT_NUM_THREADS", "3")
    assert MoEWrapper(config).threads == 3
    assert MoEWrapper(config, threads=2).threads == 2


def test_describe_tells_the_value_now_and_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_NUM_THREADS", "many")
    rows = {row["name"]: row for row in environment.describe()}
    assert {"CPUINFER_ENABLE_AMX", "CPUINFER_ENABLE_AVX512", "CPUINFER_ENABLE_AVX2", "KT_STRICT_DEVICES"} < rows.keys()
    assert rows["KT_NUM_THREADS"]["current"] == "many"
    assert "many" in rows["KT_NUM_THREADS"]["problem"]
    assert rows["CPUINFER_ENABLE_AMX"]["problem"] == ""
    assert all(row["meaning"] and row["allowed"] and row["default"] for row in rows.values())
