"""The shipped rule files: where they lie, what they are called, which one fits a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import RuleNotFoundError
from ktransformers.hints import nearest
from ktransformers.rules.document import parse_yaml
from ktransformers.rules.rule import Rule
from ktransformers.rules.schema import build_rules

__all__ = ["ShippedRules", "default_rules_for", "find_rules", "rules_folder", "shipped_rules"]

GENERIC = "moe.yaml"

# model_type of the configuration → shipped file; everything else goes by the generic pattern.
_BY_MODEL_TYPE = {
    "deepseek_v2": "DeepSeek-V3.yaml",
    "deepseek_v3": "DeepSeek-V3.yaml",
    "kimi_k2": "DeepSeek-V3.yaml",
    "mixtral": "Mixtral.yaml",
    "olmoe": "OLMoE.yaml",
    "qwen2_moe": "Qwen2MoE.yaml",
    "qwen3_moe": "Qwen3MoE.yaml",
}


@dataclass(frozen=True)
class ShippedRules:
    """One shipped file; `summary` is its first comment line, or what its rules put in where it has none."""

    name: str
    path: Path
    summary: str


def rules_folder() -> Path:
    """The folder of the shipped files: inside the installed package, or beside the package in a source tree.

    Raises:
        RuleNotFoundError: neither is there, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "optimize_rules", package.parent / "optimize_rules")
    for folder in candidates:
        if (folder / GENERIC).is_file():
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise RuleNotFoundError(f"the shipped rule files are missing (looked in {looked}); install the package again")


def shipped_rules() -> list[ShippedRules]:
    """Every shipped file, by name."""
    return [
        ShippedRules(path.stem, path, _summary(path))
        for path in sorted(rules_folder().glob("*.yaml"), key=lambda path: path.name.casefold())
    ]


def find_rules(name: str | os.PathLike[str]) -> Path:
    """The file behind a path, or behind the bare name of a shipped file: `.yaml` may be left out, case does not count.

    A file that exists under the path wins over a shipped one of the same name.

    Raises:
        RuleNotFoundError: naming the nearest files there are.
    """
    if not os.fspath(name):
        raise RuleNotFoundError(f"the name of the rule file is empty; {_choices(rules_folder(), '')}")
    path = Path(name).expanduser()
    if path.is_file() or path.is_fifo():
        return path
    if path.is_dir():
        raise RuleNotFoundError(f"{path} is a folder, not a rule file; {_choices(path, '')}")
    if len(path.parts) > 1:
        raise RuleNotFoundError(f"there is no rule file {path}; {_choices(path.parent, path.name)}")
    folder = rules_folder()
    for shipped in folder.glob("*.yaml"):
        if path.name.casefold() in (shipped.name.casefold(), shipped.stem.casefold()):
            return shipped
    raise RuleNotFoundError(
        f"no rule file is called {path.name!r}, neither here nor among the shipped ones; {_choices(folder, path.name)}"
    )


def default_rules_for(model_type: str | None) -> Path:
    """The shipped file for a configuration's `model_type`; the generic one for every type without a file of its own."""
    return rules_folder() / _BY_MODEL_TYPE.get(model_type or "", GENERIC)


def _choices(folder: Path, wanted: str) -> str:
    """Which rule files to take instead."""
    names = sorted((path.name for path in folder.glob("*.y*ml")), key=str.casefold) if folder.is_dir() else []
    if not names:
        there = f"{folder} holds no .yaml file" if folder.is_dir() else f"there is no folder {folder}"
        return f"{there}; shipped: {', '.join(shipped.name for shipped in shipped_rules())}"
    close = nearest(wanted.removesuffix(".yaml"), [Path(name).stem for name in names], cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}There is {', '.join(names)}" if meant else f"there is {', '.join(names)}"


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        text = file.read()
    first = text.partition("\n")[0].strip()
    if first.startswith("#"):
        return first.lstrip("# ")
    return "; ".join(dict.fromkeys(_told(rule) for rule in build_rules(parse_yaml(text, path.name)) if not rule.keeps))


def _told(rule: Rule) -> str:
    """`KTransformersExperts with generate_device cpu, backend AMXINT8`: the class and its arguments, as written."""
    arguments = ", ".join(f"{key} {value}" for key, value in rule.kwargs.items())
    name = rule.replacement.rpartition(".")[2]
    return f"{name} with {arguments}" if arguments else name
