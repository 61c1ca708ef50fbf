"""`kt chat`, from a pipe and at a terminal, on the model that ships."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktransformers import KTransformer
from ktransformers.cli.ctrl_c import CtrlC
from tests.cli.conftest import Kt

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "model")
GREEDY = ("--temperature", "0", "--max-new-tokens", "10")


@pytest.fixture(scope="module")
def demo() -> KTransformer:
    return KTransformer.from_pretrained(DEMO, rules="auto")


def _answers(demo: KTransformer, *turns: str, system: str | None = None) -> list[str]:
    """Greedy answers to `turns`, each after all before it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(demo.generate(messages, max_new_tokens=10, do_sample=False))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_each_line_of_a_pipe_is_a_turn_that_knows_those_before(kt: Kt, demo: KTransformer) -> None:
    result = kt("chat", DEMO, *GREEDY, stdin="The king\n\nThe queen\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(f"{answer}\n" for answer in _answers(demo, "The king", "The queen"))
    assert "layers came packed from" in result.stderr  # the cache is on unless --no-cache


def test_reset_forgets_and_the_system_message_stays(kt: Kt, demo: KTransformer) -> None:
    result = kt("chat", DEMO, *GREEDY, "--system", "My dear,", stdin="The king\n/reset\nThe king\n/exit\nThe queen\n")
    (answer,) = _answers(demo, "The king", system="My dear,")
    assert result.stdout == f"{answer}\n{answer}\n"
    assert "a new conversation" in result.stderr


def test_an_unknown_command_is_not_said_to_the_model_and_a_path_is(kt: Kt, demo: KTransformer) -> None:
    result = kt("chat", DEMO, *GREEDY, stdin="/rset\n/home/me went\n")
    assert "there is no command /rset: /exit ends" in result.stderr
    assert result.stdout == f"{_answers(demo, '/home/me went')[0]}\n"


def test_raw_shows_what_the_model_reads(kt: Kt, demo: KTransformer) -> None:
    result = kt("chat", DEMO, *GREEDY, "--raw", "--system", "Dear", stdin="Sir\n")
    assert demo.tokenizer is not None
    ids = demo.tokenizer.encode("Dear\n\nSir")
    assert "the model reads: 'Dear\\n\\nSir'" in result.stderr
    assert f"as {len(ids)} tokens: {' '.join(map(str, ids))}" in result.stderr


def test_a_seed_makes_a_chat_repeatable(kt: Kt) -> None:
    options = ("--temperature", "1.5", "--max-new-tokens", "12")
    first, again, other = (kt("chat", DEMO, *options, "--seed", s, stdin="The\nking\n").stdout for s in ("1", "1", "2"))
    assert first == again != other


def test_a_conversation_that_fills_the_context_says_how_to_go_on(kt: Kt) -> None:
    result = kt("chat", DEMO, *GREEDY, stdin="word " * 1500 + "\n")
    assert result.exit_code == 2
    assert "the model reads 1024: /reset begins a new one" in result.stderr


def test_an_answer_that_meets_its_limit_is_called_cut(kt: Kt) -> None:
    assert "the answer was cut at 10 tokens" in kt("chat", DEMO, *GREEDY, stdin="The king\n").stderr


def test_a_model_without_a_template_is_told_the_alternatives(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    refused = kt("chat", moe_folder, stdin="x\n")
    assert refused.exit_code == 2
    assert "kt run" in refused.stderr
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[-1].content }}{{ raise_exception('no more') if messages | length > 1 }}")
    given = ("chat", moe_folder, "--chat-template", str(template), "--max-new-tokens", "2")
    assert kt(*given, stdin="x\n").exit_code == 0
    second = kt(*given, stdin="x\nx\n")
    assert second.exit_code == 2
    assert "refuses these messages: no more" in second.stderr
    missing = kt("chat", moe_folder, "--chat-template", str(tmp_path / "none.jinja"))
    assert missing.exit_code == 2
    assert "none.jinja cannot be read" in missing.stderr


class _Terminal:
    """`kt chat` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        # A shell's first steps: a session whose terminal this is, or Ctrl-C would reach nobody.
        session = "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        program = [sys.executable, "-c", f"{session}; from ktransformers.cli import main; main()", "chat", *arguments]
        self.process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` was shown after what was waited for before."""
        assert self._shows(text, within=120), self.shown

    def interrupt_until(self, text: str) -> None:
        """Presses Ctrl-C until `text` is shown, like a person: again where nothing happened.

        Python's `input` forgets one that comes after it has shown its prompt and before it waits for keys: a moment
        that a busy machine draws out.
        """
        for _ in range(12):
            self.type("\x03")
            if self._shows(text, within=10):
                return
        raise AssertionError(self.shown)

    def _shows(self, text: str, within: float) -> bool:
        deadline = time.monotonic() + within
        while text not in self.shown:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return False
            self.shown += os.read(self._ours, 65536).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_at_a_terminal_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    terminal = _Terminal(DEMO, "--temperature", "0")
    try:
        terminal.wait_for("> ")
        terminal.interrupt_until("/exit or Ctrl-D ends")
        terminal.wait_for("> ")
        terminal.type("Once upon a time\n")
        terminal.wait_for(", which, in the midst")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("a new conversation")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


def test_ctrl_c_is_heard_where_it_stops_something_and_nowhere_between() -> None:
    ctrl_c = CtrlC()
    with ctrl_c.ignored():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c.heard():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
