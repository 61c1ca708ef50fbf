"""Every experts class in the installed transformers is either read or refused with a reason; none is an accident."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ktransformers.errors import UnsupportedModuleError
from ktransformers.experts import ExpertsSpec
from ktransformers.operators.experts_torch import KExpertsTorch

_MODELS = Path(transformers.__file__).parent / "models"
_CLASS = re.compile(r"^class (\w+Experts)\(nn\.Module\)", re.MULTILINE)

# Outside the contract, with the word that has to be in the reason.
_REFUSED = {
    "DbrxExperts": "three dimensions",
    "InklingSharedExperts": "forward takes",
    "Llama4TextExperts": "forward takes",
    "LongcatFlashExperts": "outside",
    "Step3p7Experts": "outside",
}
# Norms with parameters of their own, sized for the family's default configuration.
_OWN_TEXT_DIFFERS = {"MuseSparkExperts"}
_NOT_FOR_THE_KERNEL = {
    "GptOssExperts": "bias",
    "Inkling2Experts": "gate computes none",
    "Inkling2LoopExperts": "gate computes none",
    "MuseSparkExperts": "normalises",
    "NemotronHExperts": "no gate projection",
    "OpenAIPrivacyFilterExperts": "bias",
}


def _classes() -> list[Any]:
    files = sorted(_MODELS.glob("*/modeling_*.py"))
    return [pytest.param(f, name, id=name) for f in files for name in _CLASS.findall(f.read_text(encoding="utf-8"))]


def _build_on_meta(file: Path, name: str) -> torch.nn.Module:
    """With the first of the family's default configurations that fits the class; text ones first."""
    package = f"transformers.models.{file.parent.name}"
    experts = getattr(importlib.import_module(f"{package}.{file.stem}"), name)
    configs = importlib.import_module(f"{package}.configuration_{file.parent.name}")
    names = [n for n in configs.__all__ if n.endswith("Config") and "Vision" not in n]
    for config_name in sorted(names, key=lambda n: "Text" not in n):
        try:
            with torch.device("meta"):
                module: torch.nn.Module = experts(getattr(configs, config_name)())
        except (AttributeError, TypeError):
            continue
        return module
    pytest.skip("no default configuration of the family builds it")


def _error_against_its_own_arithmetic(module: Any, spec: ExpertsSpec) -> float:
    """Runs the family's own eager text on three small experts, and `KExpertsTorch` by what the spec says of them."""
    experts, hidden, intermediate = 3, 16, 8
    rows = 2 * intermediate if spec.has_gate else intermediate
    first = "gate_up_proj" if spec.has_gate else "up_proj"
    shapes: dict[str, tuple[int, ...]] = {first: (experts, rows, hidden), "down_proj": (experts, hidden, intermediate)}
    if spec.is_transposed:
        shapes = {name: (experts, shape[2], shape[1]) for name, shape in shapes.items()}
    if spec.has_bias:
        shapes |= {f"{first}_bias": (experts, rows), "down_proj_bias": (experts, hidden)}
    assert {name for name, _ in module.named_parameters(recurse=False)} == set(shapes)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        setattr(module, name, torch.nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False))
    module.num_experts, module.config._experts_implementation = experts, "eager"
    small = ExpertsSpec.from_module(module)
    op = KExpertsTorch(module, small, torch.device("cpu"), resident=True)
    op.load()
    batch = (
        torch.randn(6, hidden, generator=generator) * 3,
        torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1], [1, 0]]),
        torch.rand(6, 2, generator=generator),
    )
    wanted = module(*batch)
    return float((op.forward(*batch) - wanted).norm() / wanted.norm())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("file", "name"), _classes())
def test_class_is_read_or_refused_with_a_reason(file: Path, name: str) -> None:
    module = _build_on_meta(file, name)
    try:
        spec = ExpertsSpec.from_module(module)
    except UnsupportedModuleError as error:
        assert _REFUSED.get(name, "listed as refused") in str(error)  # noqa: PT017 – some classes are refused, some not
        return
    assert name not in _REFUSED
    if name not in _OWN_TEXT_DIFFERS:
        assert _error_against_its_own_arithmetic(module, spec) < 1e-5
    if name in _NOT_FOR_THE_KERNEL:
        assert _NOT_FOR_THE_KERNEL[name] in " ".join(spec.unsupported)
    else:
        assert spec.unsupported == ()
        assert spec.gate is not None
