"""`kt run`, on a tiny checkpoint and the real kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kt_kernel
from ktransformers import KTransformer
from ktransformers.cli.clock import TokenClock
from tests.cli.conftest import Kt

_OTHER_CLASS = """
- match:
    name: 'mlp\\.experts$'
  replace:
    class: default
"""


def _text(result: object) -> str:
    return str(getattr(result, "stdout", "")).removesuffix("\n")


def test_it_writes_what_the_api_writes(kt: Kt, moe_folder: str) -> None:
    options = ("--max-new-tokens", "8", "--backend", "INT8", "--temperature", "0")
    result = kt("run", moe_folder, "--prompt", "abc", *options)
    assert result.exit_code == 0, result.stderr
    model = KTransformer.from_pretrained(moe_folder)
    model.inject_expert_backend(layer_regex=r"\.mlp\.experts$", backend="INT8")
    assert _text(result) == model.generate("abc", max_new_tokens=8, do_sample=False)


def test_stderr_tells_rules_backend_layers_and_both_speeds(kt: Kt, moe_folder: str) -> None:
    result = kt("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "8", "--backend", "INT8", "--threads", "1")
    tier = kt_kernel.cpu_info().chosen["INT8"]
    assert "rules: Qwen3MoE, which ships for model type qwen3_moe" in result.stderr
    told = f"rule 1 (Qwen3MoE.yaml:2): asked for INT8, runs INT8 on {tier}, 1 thread (KExpertsCPU)"
    assert f"model.layers.N.mlp.experts, N = 1–2: {told}" in result.stderr
    assert "prefill 3 tokens at" in result.stderr
    assert "decode 7 tokens at" in result.stderr


def test_rules_that_are_named_are_used(kt: Kt, moe_folder: str, rule_file: Callable[[str], str]) -> None:
    kept = kt("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "2", "--rules", rule_file(_OTHER_CLASS))
    assert kept.exit_code == 0, kept.stderr
    assert "transformers' own" in kept.stderr


def test_rules_auto_are_those_of_the_models_type(kt: Kt, moe_folder: str) -> None:
    done = kt("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "2", "--rules", "auto")
    assert done.exit_code == 0, done.stderr
    assert "which ships for model type" in done.stderr


def test_the_backend_of_an_amx_rule_file_can_be_overridden(kt: Kt, moe_folder: str) -> None:
    arguments = ("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "2", "--rules", "Qwen3MoE-serve-amx")
    assert "AMXINT8" in kt(*arguments).stderr
    overridden = kt(*arguments, "--backend", "AVX2BF16").stderr
    assert "AVX2BF16" in overridden
    assert "INT8" not in overridden


def test_a_backend_for_rules_that_have_none_is_refused(
    kt: Kt, moe_folder: str, rule_file: Callable[[str], str]
) -> None:
    result = kt("run", moe_folder, "--prompt", "abc", "--rules", rule_file(_OTHER_CLASS), "--backend", "INT8")
    assert result.exit_code == 2
    assert "--backend INT8: no rule of" in result.stderr


def test_the_prompt_may_be_piped_in(kt: Kt, moe_folder: str) -> None:
    arguments = ("run", moe_folder, "--max-new-tokens", "6", "--temperature", "0")
    assert _text(kt(*arguments, stdin="abc\n")) == _text(kt(*arguments, "--prompt", "abc"))
    assert _text(kt(*arguments)) == _text(kt(*arguments, "--prompt", "Once upon a time"))


def test_a_seed_repeats_what_was_sampled(kt: Kt, moe_folder: str) -> None:
    arguments = ("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "12", "--temperature", "1.5", "--seed")
    first, again, other = (_text(kt(*arguments, seed)) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_temperature_samples_and_zero_does_not(kt: Kt, moe_folder: str) -> None:
    arguments = ("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "12", "--temperature")
    assert _text(kt(*arguments, "0", "--seed", "1")) == _text(kt(*arguments, "0", "--seed", "2"))
    assert _text(kt(*arguments, "3", "--seed", "1")) != _text(kt(*arguments, "0"))


def test_chat_puts_the_prompt_into_the_template(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    folder = tmp_path / "with-template"
    shutil.copytree(moe_folder, folder)
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    arguments = ("run", str(folder), "--max-new-tokens", "8", "--temperature", "0", "--prompt")
    assert _text(kt(*arguments, "abc", "--chat")) == _text(kt(*arguments, "[user]abc"))


def test_chat_without_a_template_is_refused(kt: Kt, moe_folder: str) -> None:
    result = kt("run", moe_folder, "--prompt", "abc", "--chat")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
    assert "unexpected" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--backend", "AMXIMT8"), "AMXINT8"),
        (("--backend", "RAWINT4"), "not in this version"),
        (("--rules", "Qwen3MoEE"), "Qwen3MoE"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--threads", "0"), "--threads"),
        (("--temperature", "-1"), "--temperature"),
        (("--seed", str(1 << 64)), "--seed"),
    ],
)
def test_a_wrong_option_is_refused_before_weights_are_read(
    kt: Kt, moe_folder: str, tmp_path: Path, arguments: tuple[str, str], text: str
) -> None:
    weightless = tmp_path / "weightless"
    shutil.copytree(moe_folder, weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    result = kt("run", str(weightless), "--prompt", "abc", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_model_that_is_not_there_names_the_near_one(kt: Kt, moe_folder: str) -> None:
    result = kt("run", moe_folder + "e", "--prompt", "abc")
    assert result.exit_code == 2
    assert "qwen3-moe" in result.stderr


def test_a_truncated_weight_file_is_words_and_no_traceback(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    folder = tmp_path / "truncated"
    shutil.copytree(moe_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = kt("run", str(folder), "--prompt", "abc")
    assert result.exit_code == 2
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_healthy_run_says_nothing_but_what_it_did(kt: Kt, moe_folder: str) -> None:
    result = kt("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "2")
    said = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert said == ["rules", "model.layers.N.mlp.experts, N = 1–2", "cache", "speed"]


def test_verbose_names_every_layer(kt: Kt, moe_folder: str) -> None:
    result = kt("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "1", "--verbose")
    for layer in (1, 2):
        assert f"model.layers.{layer}.mlp.experts: rule 1 (Qwen3MoE.yaml:2): asked for auto, runs BF16" in result.stderr


def test_the_clock_splits_prefill_from_decode() -> None:
    clock = TokenClock(started=10.0)
    ids, scores = torch.zeros(1, 40, dtype=torch.long), torch.zeros(1, 5)
    assert clock(ids, scores) is scores
    clock(ids, scores)
    clock.ticks = [12.0, 13.0, 14.0]
    assert clock.prompt_tokens == 40
    assert clock.prefill_speed == 20.0
    assert clock.decode_speed == 1.0
    assert str(TokenClock()) == "no token was generated"


def _kt_process(*arguments: str, stdin: bytes = b"", encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    program = [sys.executable, "-c", "from ktransformers.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(program, input=stdin, env=environment, capture_output=True, check=False)


def test_a_terminal_that_lacks_a_character_gets_a_stand_in_for_it(moe_folder: str) -> None:
    options = ("--prompt", "abc", "--max-new-tokens", "24", "--temperature", "0")
    done = _kt_process("run", moe_folder, *options, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
    assert b"speed: " in done.stderr


def test_piped_bytes_that_are_no_utf_8_are_told(moe_folder: str) -> None:
    done = _kt_process("run", moe_folder, stdin=b"caf\xe9")
    assert done.returncode == 2
    assert b"a prompt is text in UTF-8" in done.stderr


def test_the_second_run_takes_packed_experts_from_the_cache(
    kt: Kt, moe_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path))
    arguments = ("run", moe_folder, "--prompt", "abc", "--max-new-tokens", "4", "--temperature", "0")
    without = kt(*arguments, "--no-cache")
    assert list(tmp_path.iterdir()) == []
    first, second = kt(*arguments), kt(*arguments)
    assert "cache: 0 of 2 layers came packed from" in first.stderr
    assert "cache: 2 of 2 layers came packed from" in second.stderr
    assert _text(without) == _text(first) == _text(second)
