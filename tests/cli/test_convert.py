from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Kt


def test_kt_convert_is_the_converter(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    result = kt("convert", "--input", moe_folder, "--output", str(tmp_path / "packed"), "--method", "AMXINT8")
    assert result.exit_code == 0, result.output
    assert "2 layer(s) converted" in result.output
    assert (tmp_path / "packed" / "kt_manifest.json").is_file()


def test_the_command_line_of_the_original_script_gives_the_same_files(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    kt("convert", "--input", moe_folder, "--output", str(ours), "--method", "AMXINT8")
    options = "--input-type bf16 --quant-method int8 --cpuinfer-threads 1 --threadpool-count 2 --no-merge-safetensor"
    result = kt("convert", "-i", moe_folder, "-o", str(theirs), *options.split(), "--resume-layer", "1", "--gpu")
    assert result.exit_code == 0, result.output
    for option in ("--input-type", "--threadpool-count", "--no-merge-safetensor", "--resume-layer", "--gpu"):
        assert f"{option} has no effect: " in result.output
    written = sorted(path.name for path in ours.iterdir())
    assert written == sorted(path.name for path in theirs.iterdir())
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in written)


def test_kt_convert_explains_its_options(kt: Kt) -> None:
    result = kt("convert", "--help")
    assert result.exit_code == 0
    assert "usage: kt convert" in result.output
    assert "--cpuinfer-threads" in result.output


def test_an_option_that_is_not_there_is_named(kt: Kt, moe_folder: str, tmp_path: Path) -> None:
    result = kt("convert", "-i", moe_folder, "-o", str(tmp_path / "packed"), "--method", "AMXINT8", "--rotated")
    assert result.exit_code == 2
    assert "unrecognized arguments: --rotated" in result.output
    assert not (tmp_path / "packed").exists()
