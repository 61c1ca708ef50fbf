"""Checkpoints converted ahead of time: the command line of the seed, the files it writes, and loading them."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kt_kernel import (
    BackendError,
    GateFormula,
    MoEWrapper,
    WeightsError,
    convert_command,
    packed_file,
)
from kt_kernel.convert_command import main
from kt_kernel.converter import MANIFEST, Progress, Report, Step, convert
from kt_kernel.packed_file import open_packed
from tests.kernel import quantizers
from tests.kernel.layers import same_bits
from tests.kernel.mixtral import FILES, IDS, LAYERS, PREFIXES, WEIGHTS, X, make_mixtral, make_wrapper

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "kernel" / "scripts" / "convert_cpu_weights.py"


def _make_gptq(folder: Path) -> Path:
    """Three layers of 4-bit experts of the same names."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, prefix in enumerate(PREFIXES):
        for expert in range(2):
            for name, shape in {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}.items():
                stored = quantizers.gptq(quantizers.Grid.make(*shape, group=32, seed=10 * layer + expert))
                tensors |= {f"{prefix}.{expert}.{name}.{part}": value for part, value in stored.tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"hidden_size": 64, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_mixtral(tmp_path / "mixtral")


def _bytes(wrapper: MoEWrapper) -> bytes:
    assert wrapper._packed is not None
    return bytes(wrapper._packed.bytes())


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def _run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_the_printed_command_line_converts_one_file(tmp_path: Path) -> None:
    line = f"{SCRIPT} --input path/to/model.safetensors --output path/to/amx_weights --method AMXINT8"
    (tmp_path / "path" / "to").mkdir(parents=True)
    stacked = {f"mlp.experts.{name}": torch.from_numpy(value) for name, value in LAYERS[0].weights().items()}
    save_file(stacked, tmp_path / "path/to/model.safetensors")
    run = _run(*shlex.split(line), cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("1 layer(s) converted")
    converted, direct = make_wrapper("AMXINT8"), make_wrapper("AMXINT8")
    converted.load_weights(tmp_path / "path/to/amx_weights")
    direct.load_weights(LAYERS[0].weights())
    assert _bytes(converted) == _bytes(direct)


@pytest.mark.parametrize(
    ("method", "backend", "rotate"),
    [("AMXINT8", "INT8", True), ("amxint8", "INT8", False), ("amx-bf16", "BF16", True)],
)
def test_converted_weights_are_those_packed_on_the_fly(
    checkpoint: Path, tmp_path: Path, method: str, backend: str, rotate: bool
) -> None:
    convert(checkpoint, tmp_path / "out", method, threads=2, rotate=rotate)
    for prefix in PREFIXES:
        converted, direct = make_wrapper(backend, rotate=rotate), make_wrapper(backend, rotate=rotate)
        converted.load_weights(tmp_path / "out", prefix=prefix)
        direct.load_weights(checkpoint, prefix=prefix)
        assert _bytes(converted) == _bytes(direct)
        assert same_bits(converted.forward(X, IDS, WEIGHTS), direct.forward(X, IDS, WEIGHTS))


def test_experts_without_a_gate_and_with_biases(tmp_path: Path) -> None:
    layer = LAYERS[0]
    plain = {"up_proj": torch.from_numpy(layer.up), "down_proj": torch.from_numpy(layer.down)}
    save_file(plain, tmp_path / "plain.safetensors")
    biases = {"up_proj_bias": torch.randn(4, 24), "down_proj_bias": torch.randn(4, 40)}
    both = {"gate_proj": torch.from_numpy(layer.gate), "gate_proj_bias": torch.randn(4, 24)}
    save_file({**plain, **biases, **both}, tmp_path / "biased.safetensors")
    for name, gate in (("plain", GateFormula(activation="relu2", gated=False)), ("biased", GateFormula())):
        source, out = tmp_path / f"{name}.safetensors", tmp_path / name
        convert(source, out, "AMXINT8", threads=1)
        converted, direct = make_wrapper(gate=gate), make_wrapper(gate=gate)
        converted.load_weights(out)
        direct.load_weights(source)
        assert _bytes(converted) == _bytes(direct)


def test_the_output_is_a_folder_of_safetensors_with_what_the_model_needs(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert(checkpoint, out, "AMXINT8", threads=1)
    companions = ["chat_template.jinja", "config.json", MANIFEST, "tokenizer.json"]
    assert sorted(file.name for file in out.iterdir()) == sorted([*companions, *FILES])
    assert sorted(report.written) == FILES
    manifest = json.loads((out / MANIFEST).read_text())
    assert {layer["prefix"] for layer in manifest["layers"]} == set(PREFIXES)
    assert all((out / layer["file"]).stat().st_size == layer["bytes"] for layer in manifest["layers"])
    layer = open_packed(out / FILES[1])
    assert {source.name for source in layer.sources} == {"model-1.safetensors", "model-2.safetensors"}
    tensors = load_file(out / FILES[1])
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        f"{PREFIXES[1]}.packed": (torch.uint8, (4, layer.bytes_per_expert))
    }
    with safe_open(str(out / FILES[1]), framework="pt") as file:
        assert file.metadata()["prefix"] == PREFIXES[1]


def test_a_second_run_writes_only_what_is_missing_or_damaged(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(checkpoint, out, "AMXINT8", threads=1)
    first = _contents(out)
    (out / FILES[1]).unlink()
    with (out / FILES[2]).open("r+b") as file:
        file.truncate(len(first[FILES[2]]) - 1)
    untouched = (out / FILES[0]).stat()
    report = convert(checkpoint, out, "AMXINT8", threads=1)
    assert (report.written, report.kept) == (tuple(FILES[1:]), (FILES[0],))
    after = (out / FILES[0]).stat()
    assert (after.st_mtime_ns, after.st_ino) == (untouched.st_mtime_ns, untouched.st_ino)
    assert _contents(out) == first


def test_another_checkpoint_of_the_same_size_is_not_taken_for_the_old_one(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)
    for file in sorted(checkpoint.glob("*.safetensors")):
        tuned = {name: tensor * 2 for name, tensor in load_file(file).items()}
        file.unlink()
        save_file(tuned, file)
    assert convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1).kept == ()
    assert convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1).written == ()
    assert convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1, rotate=False).kept == ()


_KILLED = """
import os, signal, sys
from kt_kernel import converter, packed_file
done = 0
def sync(descriptor):  # the second file is written and not yet renamed
    global done
    done += 1
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
packed_file.os.fsync = sync
from kt_kernel.convert_command import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("method", ["AMXINT8", "AMXINT4"])
def test_killed_in_the_middle_the_same_command_finishes_the_work(tmp_path: Path, method: str) -> None:
    checkpoint = make_mixtral(tmp_path / "mixtral") if method == "AMXINT8" else _make_gptq(tmp_path / "gptq")
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(checkpoint, whole, method, threads=1)
    arguments = f"--input {checkpoint} --output {out} --method {method} --threads 1".split()
    assert _run("-c", _KILLED, *arguments).returncode == -signal.SIGKILL
    left = sorted(file.name for file in out.iterdir())
    assert left == [FILES[0], f"{FILES[1]}.partial"]
    run = _run(SCRIPT, *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    assert "2 layer(s) converted, 1 already there" in run.stdout
    assert _contents(out) == _contents(whole)


_KILLED_ANYWHERE = """
import os, resource, signal, sys
from pathlib import Path
import rich.console, rich.progress, safetensors, torch  # once, not in each child
from kt_kernel.convert_command import main
checkpoint, whole, out = map(Path, sys.argv[1:])

def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else {}

def run(folder, events=0, size=0):
    child = os.fork()
    if child == 0:
        count = 0
        def hook(event, arguments):
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(arguments[0]).startswith(str(folder)):
                count += 1
                if count == events:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout = open(os.devnull, "w")
        sys.addaudithook(hook)
        if size:  # the kernel of the system ends the process when a file is to become larger
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        options = ["--input", str(checkpoint), "--output", str(folder), "--method", "AMXINT8", "--threads", "1"]
        os._exit(main(options))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

wanted = contents(whole)

def killed(folder, **where):
    status, left = run(folder, **where), contents(folder)
    assert "kt_manifest.json" not in left or left == wanted, f"{where}: a folder that is not whole passes for one"
    half = [name for name, data in left.items() if name.endswith(".safetensors") and wanted[name] != data]
    assert not half, f"{where}: {half} pass for whole"
    if status != 0:
        assert status in (-signal.SIGKILL, -signal.SIGXFSZ), f"{where}: {status}"
        assert run(folder) == 0, where
        assert contents(folder) == wanted, f"{where}: other bytes after the second run"
    return status != 0

events = 1
while killed(out / str(events), events=events):
    events += 1
largest = max(map(len, wanted.values()))
for size in (1, 500, 2000, largest // 2, largest - 1):
    folder = out / f"bytes-{size}"
    assert killed(folder, size=size)
assert len(wanted["kt_manifest.json"]) > 300
(folder / "kt_manifest.json").unlink()
assert killed(folder, size=300)  # only the manifest is to be written
print(events)
"""


def test_killed_anywhere_nothing_half_passes_for_whole_and_a_second_run_gives_the_same_bytes(
    checkpoint: Path, tmp_path: Path
) -> None:
    convert(checkpoint, tmp_path / "whole", "AMXINT8", threads=1)
    (tmp_path / "out").mkdir()
    run = _run("-c", _KILLED_ANYWHERE, checkpoint, tmp_path / "whole", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 15  # three files, the manifest, what is copied; each opened, and most renamed


def test_a_disk_without_room_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10_000, 9_000, 1_000))
    out = tmp_path / "new" / "out"
    assert main(["--input", str(checkpoint), "--output", str(out), "--method", "AMXINT8"]) == 1
    error = capsys.readouterr().err
    assert "make room" in error
    assert error.count("\n") == 1
    assert not out.parent.exists()


def test_a_disk_that_fills_up_half_way_leaves_whole_files_only(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(checkpoint, whole, "AMXINT8", threads=1)
    synced = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    options = ["--input", str(checkpoint), "--output", str(out), "--method", "AMXINT8", "--threads", "1"]
    with monkeypatch.context() as patched:
        patched.setattr(packed_file.os, "fsync", full)
        assert main(options) == 1
    assert (
        capsys.readouterr().err == f"convert_cpu_weights.py: [Errno 28] No space left on device: '{out / FILES[1]}'\n"
    )
    assert sorted(file.name for file in out.iterdir()) == [FILES[0]]
    assert main(options) == 0
    assert _contents(out) == _contents(whole)


@pytest.mark.parametrize("made", [True, False])
def test_a_second_run_into_a_folder_is_refused_while_the_first_one_writes(
    checkpoint: Path, tmp_path: Path, made: bool
) -> None:
    whole, out, refused = tmp_path / "whole", tmp_path / "out", []
    convert(checkpoint, whole, "AMXINT8", threads=1)
    if made:
        out.mkdir()

    def again(step: Step) -> None:
        with pytest.raises(WeightsError, match=r"another run writes into .*out at this moment: wait for it"):
            convert(checkpoint, out, "AMXBF16", threads=1)
        refused.append(step)

    convert(checkpoint, out, "AMXINT8", threads=1, progress=again)
    assert len(refused) == len(FILES) + 1
    assert _contents(out) == _contents(whole)
    assert not convert(checkpoint, out, "AMXINT8", threads=1).written


def test_a_folder_that_cannot_be_locked_is_written_and_that_is_said(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1).written
    assert "out cannot be locked (No locks available)" in caplog.text


@pytest.mark.parametrize("option", ["--input", "--output"])
def test_an_empty_path_is_not_the_current_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    paths = {"--input": str(checkpoint), "--output": "out", option: ""}
    with pytest.raises(SystemExit, match="2"):
        main([part for pair in paths.items() for part in pair] + ["--method", "AMXINT8"])
    assert f"argument {option}" in (error := capsys.readouterr().err)
    assert "the path is empty" in error
    assert not any(here.iterdir())


def test_a_link_whose_target_was_not_fetched_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/4d7a")
    with pytest.raises(WeightsError, match=r"model\.safetensors is a link to \.\./blobs/4d7a, which is not there"):
        convert(tmp_path, tmp_path / "out", "AMXINT8", threads=1)


def test_a_terminal_shows_layers_rate_and_time_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(convert_command, "convert", _slowly(monkeypatch))
    options = ["--input", str(checkpoint), "--output", str(tmp_path / "out"), "--method", "AMXINT8", "--threads", "1"]
    assert main(options) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    # 3 files of 2 MB that take 4 seconds each: the rate is known after two, and then there are 4 seconds left.
    assert "2/3" in shown
    assert "500.0 kB/s" in shown
    assert "0:00:04" in shown


def _slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """A conversion that tells of 2 MB each 4 seconds, by a clock of its own, and shows every step."""
    from rich import progress as rich_progress

    now = [0.0]
    bar = rich_progress.Progress.__init__

    def with_clock(self: Any, *columns: Any, **options: Any) -> None:
        bar(self, *columns, **options, get_time=lambda: now[0], auto_refresh=False)

    monkeypatch.setattr(rich_progress.Progress, "__init__", with_clock)

    def run(_: Path, output: Path, *__: str, progress: Progress, **___: Any) -> Report:
        for done in range(4):
            progress(Step(PREFIXES[min(done, 2)], done, 3, done * 2_000_000, 6_000_000))
            now[0] += 4
        return Report(output, (), (), 6_000_000)

    return run


def test_steps_count_what_an_earlier_run_wrote(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(checkpoint, out, "AMXINT8", threads=1)
    size = (out / FILES[0]).stat().st_size
    (out / FILES[1]).unlink()
    steps: list[Step] = []
    convert(checkpoint, out, "AMXINT8", threads=1, progress=steps.append)
    assert steps == [Step(PREFIXES[1], 2, 3, 2 * size, 3 * size), Step("", 3, 3, 3 * size, 3 * size)]


def test_upstreams_spellings_of_the_options_are_taken(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--input-path", str(checkpoint), "--output", str(tmp_path / "out"), "--quant-method", "amxbf16"]
    assert main([*options, "--threads", "1"]) == 0
    assert open_packed(tmp_path / "out" / FILES[0]).formats.name == "BF16"


@pytest.mark.parametrize(
    ("method", "message"),
    [("RAWINT4", "not in this version"), ("AMXINT9", "did you mean"), ("AVX2INT8", "AMXINT8, AMXINT4, AMXBF16, FP8")],
)
def test_a_method_that_is_not_there_is_an_error_of_the_command_line(
    checkpoint: Path, tmp_path: Path, method: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--input", str(checkpoint), "--output", str(tmp_path / "out"), "--method", method]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(BackendError, match=message):
        convert(checkpoint, tmp_path / "out", method)
    assert not (tmp_path / "out").exists()


def test_a_command_line_without_an_input_is_status_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--output", str(tmp_path), "--method", "AMXINT8"])
    assert stop.value.code == 2


def test_a_checkpoint_without_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"model.layers.0.mlp.gate_proj.weight": torch.zeros(4, 4)}, tmp_path / "dense.safetensors")
    options = ["--input", str(tmp_path / "dense.safetensors"), "--output", str(tmp_path / "out")]
    assert main([*options, "--method", "AMXINT8"]) == 1
    assert "no experts in" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bad_layer_is_found_before_the_first_is_written(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model-2.safetensors")
    tensors.pop(next(name for name in tensors if name.startswith(PREFIXES[2])))
    save_file(tensors, checkpoint / "model-2.safetensors")
    with pytest.raises(WeightsError, match="1 of 12 tensors are missing"):
        convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_than_its_config_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 24}}))
    with pytest.raises(
        WeightsError, match=r"40 outputs, and config\.json's hidden_size is 24: the weights are another model's"
    ):
        convert(checkpoint, tmp_path / "out", "AMXINT8", threads=1)


def test_folders_with_other_weights_are_not_written_into(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="the checkpoint itself"):
        convert(checkpoint, checkpoint, "AMXINT8", threads=1)
    for name in ("other.safetensors", FILES[0]):
        out = tmp_path / f"out-{name}"
        out.mkdir()
        save_file({"mine": torch.zeros(1)}, out / name)
        with pytest.raises(WeightsError, match="pass another folder"):
            convert(checkpoint, out, "AMXINT8", threads=1)
        assert list(load_file(out / name)) == ["mine"]
