"""Every experts class in the installed transformers, found in its source text, and the models that hold it."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

__all__ = ["ExpertsClass", "experts_classes", "model_classes"]

MODELS = Path(transformers.__file__).parent / "models"
_DECORATED = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\n(?:@.*\n)*class (\w+)", re.MULTILINE)
_EXPERTS = re.compile(r"^class (\w*Experts)\((?:nn\.\w+)\)", re.MULTILINE)
# What holds whole text models comes first.
_HEADS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "LMHeadModel",
    "ForBlockDiffusion",
    "ForTokenClassification",
    "Model",
)


@dataclass(frozen=True)
class ExpertsClass:
    """`decorated`: behind `use_experts_implementation`, transformers' common contract of experts."""

    family: str
    name: str
    decorated: bool

    def load(self) -> Any:
        """The class."""
        return getattr(self.module(), self.name)

    def module(self) -> Any:
        """The family's modeling file, imported."""
        return importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")

    def configuration(self) -> Any:
        """The family's configuration file, imported."""
        return importlib.import_module(f"transformers.models.{self.family}.configuration_{self.family}")


def experts_classes() -> list[ExpertsClass]:
    """In the order of families."""
    found = []
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        decorated = _DECORATED.findall(text)
        if file.stem == f"modeling_{file.parent.name}":
            names = [match for match in _EXPERTS.findall(text) if match not in decorated]
            found += [ExpertsClass(file.parent.name, name, True) for name in decorated]
            found += [ExpertsClass(file.parent.name, name, False) for name in names]
    return found


def model_classes(experts: ExpertsClass) -> list[Any]:
    """The family's public model classes, those with a language model's head first."""
    module = experts.module()
    named = [name for name in module.__all__ if any(name.endswith(head) for head in _HEADS)]
    order = {name: next(i for i, head in enumerate(_HEADS) if name.endswith(head)) for name in named}
    return [getattr(module, name) for name in sorted(named, key=lambda name: order[name])]
