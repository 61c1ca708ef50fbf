"""Arguments and options that several commands take, in the same words everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BackendName",
    "Cache",
    "ChatTemplate",
    "ConfigModel",
    "Force",
    "Legacy",
    "Model",
    "RuleFile",
    "Rules",
    "Seed",
    "Temperature",
    "Threads",
    "Verbose",
    "WeightsPath",
]

Model = Annotated[
    str, typer.Argument(help="A model folder, a GGUF file, or a model id in the local Hugging Face cache.")
]
ConfigModel = Annotated[
    str,
    typer.Argument(
        help="A model folder, a GGUF file, or a model id in the local Hugging Face cache. No weight is read."
    ),
]
RuleFile = Annotated[str, typer.Argument(help="A rule file, or the name of a shipped one.")]
Rules = Annotated[
    str | None,
    typer.Option(help="A rule file, or the name of a shipped one. Default: auto, which goes by the model's type."),
]
BackendName = Annotated[
    str | None,
    typer.Option("--backend", help="Overrides the backend of the rules: AMXINT8, AMXBF16, INT8, BF16, auto …"),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Worker threads of the kernel. Default: KT_NUM_THREADS, else what the machine has."),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="0 takes the likeliest token each time, more samples. Default: as the model says."),
]


def _seed(value: int | None) -> int | None:
    if value is not None and not -(1 << 63) <= value < 1 << 64:
        raise typer.BadParameter("torch takes 64 bits: a number from -2^63 to 2^64 - 1")
    return value


Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", callback=_seed)]
ChatTemplate = Annotated[Path | None, typer.Option(help="A Jinja file in the place of the model's own chat template.")]
WeightsPath = Annotated[
    Path | None, typer.Option(help="A folder that `kt convert` wrote of this model: experts are read from there.")
]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache", help="Keep packed experts on disk (KT_CACHE_DIR), so that the next start takes seconds."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Go on although the model does not fit into memory.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say what runs for each layer, not each range.")]
Legacy = Annotated[
    bool, typer.Option("--legacy", help="An older rule file: rules that match nothing are warnings, not errors.")
]
