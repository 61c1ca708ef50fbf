"""The command tree itself: help, typos, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from ktransformers.cli import failures
from ktransformers.cli.app import app
from ktransformers.errors import CheckpointError, InjectionError, RuleFileError
from tests.cli.conftest import Kt


def test_without_arguments_the_commands_are_listed(kt: Kt) -> None:
    result = kt()
    for command in ("run", "rules", "doctor"):
        assert command in result.output


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["runn", "model"], "'run'"),
        (["rules", "chekc", "a", "b"], "'check'"),
        (["run", "model", "--backned", "INT8"], "--backend"),
        (["doctor", "--jsn"], "--json"),
    ],
)
def test_a_typo_names_the_nearest(kt: Kt, arguments: list[str], nearest: str) -> None:
    result = kt(*arguments)
    assert result.exit_code == 2
    assert nearest in result.stderr


def test_the_version_is_that_of_the_installed_package(kt: Kt) -> None:
    assert kt("--version").stdout.strip() == version("ktransformers")


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys; from ktransformers.cli.app import app; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuleFileError("line 3"), 2),
        (CheckpointError("no such model"), 2),
        (InjectionError("while packing"), 1),
        (KeyError("a bug"), None),
    ],
)
def test_wrong_input_and_failures_have_different_codes(error: Exception, code: int | None) -> None:
    assert failures.exit_code(error) == code


def _make_failing(error: BaseException) -> typer.Typer:
    failing = typer.Typer(cls=failures.Guarded, pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise error

    @failing.callback()
    def root(debug: bool = False) -> None:
        failures.show_tracebacks(debug)

    return failing


def _run(command: typer.Typer, *arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    result = CliRunner().invoke(command, list(arguments))
    return result.exit_code, result.stderr


@pytest.mark.usefixtures("kt")
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RuleFileError("rules.yaml:3: rule 1: no"), 2, "error: rules.yaml:3: rule 1: no"),
        (InjectionError("layer 3 [of 4] failed"), 1, "error: layer 3 [of 4] failed"),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (MemoryError("40 GiB for layer 3"), 1, "Out of memory. 40 GiB for layer 3"),
        (
            RuntimeError("[enforce fail] can't allocate memory: 4 bytes"),
            1,
            "error: Out of memory. [enforce fail] can't",
        ),
        (ZeroDivisionError("by zero"), 1, "unexpected ZeroDivisionError: by zero"),
    ],
)
def test_an_error_is_words_and_no_traceback(error: BaseException, code: int, text: str) -> None:
    found, stderr = _run(_make_failing(error), "fail")
    assert found == code
    assert text in stderr
    assert "Traceback" not in stderr


@pytest.mark.usefixtures("kt")
def test_debug_shows_the_traceback() -> None:
    code, stderr = _run(_make_failing(ZeroDivisionError("by zero")), "--debug", "fail")
    assert code == 1
    assert "Traceback" in stderr
    assert "--debug" not in stderr.replace("'--debug'", "")


def test_every_option_is_explained() -> None:
    command = typer.main.get_command(app)
    todo, unexplained = [command], []
    while todo:
        entry = todo.pop()
        todo += getattr(entry, "commands", {}).values()
        unexplained += [f"{entry.name} {p.name}" for p in entry.params if not getattr(p, "help", None)]
    assert unexplained == []


def test_the_installed_command_answers() -> None:
    script = "from ktransformers.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", script, "rules", "list"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "moe" in run.stdout


def test_ctrl_c_before_the_command_line_is_there_is_one_word() -> None:
    script = """
import sys
from ktransformers.cli import main

class Impatient:
    def find_spec(self, name, *_):
        if name == "ktransformers.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Impatient())
main()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (130, "\nInterrupted.\n")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-"])
def test_a_closed_stream_is_one_that_nobody_reads_and_never_a_file_of_ours(tmp_path: Path, closed: str) -> None:
    script = (
        "import os, sys; from ktransformers.cli import main; sys.argv[1:] = ['rules', 'list']\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        f"with open({str(tmp_path / 'file')!r}, 'w') as file: os._exit(code if file.fileno() > 2 else 9)"
    )
    command = f'"$0" -c "$1" {closed}'
    run = subprocess.run(["sh", "-c", command, sys.executable, script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert ("Qwen3MoE" in run.stdout) == (">&- 2" not in closed and closed != ">&-")
    assert not run.stderr
