from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner, Result

from ktransformers.cli.app import app
from ktransformers.cli.failures import show_tracebacks
from tests.models import make_llama_dense, make_qwen3_moe, save_with_tokenizer

Kt = Callable[..., Result]


@pytest.fixture
def kt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kt]:
    """`kt(*arguments, stdin="")` runs the command inside this process and leaves its logging behind as it was."""
    monkeypatch.setenv("COLUMNS", "160")
    loggers = [logging.getLogger(name) for name in ("ktransformers", "kt_kernel")]
    handlers = [list(logger.handlers) for logger in loggers]
    requests = logging.getLogger("ktransformers.server")
    level = requests.level
    verbosity = transformers_logging.get_verbosity()

    def invoke(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="kt")

    yield invoke
    transformers_logging.set_verbosity(verbosity)
    show_tracebacks(False)
    requests.setLevel(level)
    for logger, kept in zip(loggers, handlers, strict=True):
        logger.handlers = kept


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3-MoE checkpoint of three layers, the first one dense."""
    return str(save_with_tokenizer(make_qwen3_moe(), tmp_path_factory.mktemp("moe") / "qwen3-moe"))


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama checkpoint."""
    return str(save_with_tokenizer(make_llama_dense(), tmp_path_factory.mktemp("dense") / "llama"))


@pytest.fixture
def rule_file(tmp_path: Path) -> Callable[[str], str]:
    """`rule_file(text)` writes a rule file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "my-rules.yaml"
        path.write_text(text)
        return str(path)

    return write
