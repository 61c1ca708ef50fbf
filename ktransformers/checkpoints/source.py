"""Float weights of single modules, read from a checkpoint while a model loads, or read again after they were freed.

transformers' own conversion runs on one module at a time, and where that is possible on a few of its experts at a time:
every family's names and layouts on disk come out right, and what is in memory as floats stays small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from kt_kernel.checkpoint import LazyStack
from kt_kernel.packed_file import Source
from ktransformers.checkpoints.conversion import branch, conversion_mapping, convert_into, sources_of
from ktransformers.checkpoints.decoded import DecodedFiles
from ktransformers.checkpoints.headers import TORCH_DTYPES, CheckpointFiles, ReadRows
from ktransformers.checkpoints.memory import give_back
from ktransformers.checkpoints.parts import Part, common_start, split_experts
from ktransformers.checkpoints.preflight import verify_complete
from ktransformers.checkpoints.progress import progress_bar
from ktransformers.checkpoints.readahead import read_ahead
from ktransformers.errors import CheckpointError
from ktransformers.experts import ExpertsSpec, layer_weights, weight_shapes

__all__ = ["CheckpointModule", "CheckpointSource", "open_source"]

Read = tuple[Part, nn.Module]
Stored = Callable[..., Mapping[str, Any] | None]

_GIVE_BACK_EVERY = 64 << 20  # bytes read. What is freed in between is used again, which is faster than new pages.


class CheckpointSource:
    """Reads modules of a safetensors checkpoint."""

    def __init__(self, files: CheckpointFiles, twin: PreTrainedModel, names: Iterable[str]) -> None:
        """`twin`: the model on the meta device, in the dtypes that are wanted; this object's own from now on. `names`:
        the modules that will be asked for.
        """
        self._files = files
        self._twin = twin
        self._names = sources_of(twin, files.tensors, names)
        self._mapping = conversion_mapping(twin)
        self._read_since = 0

    @property
    def place(self) -> Path:
        return self._files.folder

    def identity(self) -> tuple[Sequence[Source], Mapping[str, Any]]:
        """The files, and everything else about the source that decides which numbers its modules hold."""
        config = self._twin.config.to_diff_dict()
        for name in ("quantization_config", "transformers_version", "_name_or_path"):
            config.pop(name, None)
        about = {"tensors": self._files.digest(), "model": type(self._twin).__name__, "config": config}
        return self._files.sources(), {**about, "dtype": str(self._twin.dtype)}

    def prefix(self, name: str) -> str:
        """What the names on disk of a module's tensors have in common, up to a dot."""
        return common_start(self._names[name]).removesuffix(".")

    def holds(self, name: str) -> bool:
        """Whether the tensors of a module on disk make all of its parameters and nothing else: then it can be read
        alone.
        """
        skeleton = self._twin.get_submodule(name)
        tensors = {tensor: self._unread(tensor) for tensor in self._names.get(name, ())}
        every = set(self._twin.state_dict())
        info = convert_into(self._twin, tensors, "meta", self._mapping)  # the whole model: what else comes of them?
        made = every - info.missing_keys
        wanted = {f"{name}.{key}" for key in skeleton.state_dict()}
        # Buffers that are computed, not saved, are transformers' to make.
        computed = {key for key, _ in skeleton.named_buffers()} - skeleton.state_dict().keys()
        return bool(wanted) and not computed and not _complaints(info) and made == wanted

    @contextmanager
    def modules(self, names: Sequence[str]) -> Iterator[Iterator[CheckpointModule]]:
        """The modules' weights, to be used in this order and each of them once; while one is packed, the next part is
        read. At the end the files are closed.
        """
        parts = {name: self._parts(name) for name in names}
        with ExitStack() as stack:
            stack.callback(give_back)
            stack.enter_context(progress_bar(shown=False))
            read = self._files.opened(stack)
            if isinstance(self._files, DecodedFiles):
                raw = self._files.raw.opened(stack)
                stored = {name: partial(self._files.matrices, self._names[name], raw) for name in names}
                yield self._stored(parts, read, stored, stack)
                return
            jobs = (partial(self._read, read, name, part) for name in names for part in parts[name])
            reads = stack.enter_context(closing(read_ahead(jobs)))
            yield (CheckpointModule(self._twin.get_submodule(name), reads) for name in names)

    def _stored(
        self, parts: Mapping[str, Sequence[Part]], read: ReadRows, stored: Mapping[str, Stored], stack: ExitStack
    ) -> Iterator[CheckpointModule]:
        """Modules whose weights may also be taken as they are stored: nothing beyond one is read ahead, and what was
        read of it goes when the next one is asked for.
        """
        of_one = stack.enter_context(ExitStack())
        for name, of_module in parts.items():
            of_one.close()
            reads = of_one.enter_context(closing(read_ahead(partial(self._read, read, name, p) for p in of_module)))
            yield CheckpointModule(self._twin.get_submodule(name), reads, stored[name])

    def _parts(self, name: str) -> list[Part]:
        """A few experts each where the module's tensors allow it, else the module as a whole."""
        module, tensors = self._twin.get_submodule(name), self._names[name]
        split = split_experts(module, tensors, self._files.tensors)
        whole = [Part(tuple(tensors))]
        if split is None:
            return whole
        nbytes = sum(parameter.nbytes for parameter in module.parameters()) // split.experts
        parts = split.parts(nbytes)
        if len(parts) == 1:
            return whole
        # What makes a part of a layer is shown by converting one without memory.
        trial, info = self._convert(name, parts[0], {t: self._unread(t, parts[0]) for t in parts[0].tensors}, "meta")
        complete = all(f"{name}.{key}" not in info.missing_keys for key in trial.state_dict())
        return parts if complete and not _complaints(info) else whole

    def _read(self, read: ReadRows, name: str, part: Part) -> Read:
        rows = slice(part.first, part.last)
        try:
            # Read here, on one thread: glibc gives each thread an arena of its own, of which it returns little.
            tensors = {t: read(t, rows if t in part.sliced else slice(None)) for t in part.tensors}
            filled, info = self._convert(name, part, tensors, "cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"the weights of {name} cannot be read from {self._files.folder}: {error}") from error
        lost = [key for key, tensor in filled.state_dict().items() if tensor.is_meta]
        if lost or _complaints(info):
            why = "; ".join(_complaints(info))
            raise CheckpointError(
                f"{self._files.folder} no longer holds the weights of {name}: {', '.join(lost) or 'of its shapes'}"
                + (f" ({why})" if why else "")
            )
        self._read_since += sum(tensor.nbytes for tensor in filled.state_dict().values())
        if self._read_since > _GIVE_BACK_EVERY:
            give_back()
            self._read_since = 0
        return part, filled

    def _convert(self, name: str, part: Part, tensors: Mapping[str, Any], device: str) -> tuple[nn.Module, Any]:
        filled = part.skeleton(self._twin.get_submodule(name))
        info = convert_into(branch(self._twin, name, filled), tensors, device, self._mapping)
        return filled, info

    def _unread(self, tensor: str, part: Part | None = None) -> torch.Tensor:
        header = self._files.tensors[tensor]
        shape = list(header.shape)
        if part is not None and tensor in part.sliced and part.last is not None:
            shape[0] = part.last - part.first
        return torch.empty(shape, dtype=TORCH_DTYPES[header.dtype], device="meta")


def open_source(files: CheckpointFiles, model: PreTrainedModel, names: Iterable[str]) -> CheckpointSource:
    """A source of the modules `names` of a model on the meta device, which stays as it is.

    Raises `CheckpointError` when the files are not those of the whole model.
    """
    twin = copy.deepcopy(model)
    verify_complete(files, twin)
    return CheckpointSource(files, twin, names)


class CheckpointModule:
    """One module's weights: a `ModuleWeights`."""

    def __init__(self, skeleton: nn.Module, reads: Iterator[Read], stored: Stored | None = None) -> None:
        self._skeleton = skeleton
        self._reads = reads
        self._stored = stored

    def fill(self, module: nn.Module) -> None:
        """Raises `CheckpointError` when the files no longer hold what they held."""
        part, filled = next(self._reads)
        if part.last is None:
            _adopt(module, filled)
            return
        for name, parameter in filled.named_parameters():
            if part.is_sliced(parameter):
                shape = self._skeleton.get_parameter(name).shape
                _set(module, name, torch.empty(shape, dtype=parameter.dtype))
            else:
                _set(module, name, parameter.data)
        while True:
            for name, parameter in filled.named_parameters():
                if part.is_sliced(parameter):
                    module.get_parameter(name).data[part.first : part.last] = parameter.data
            if part.last == part.experts:
                return
            del filled
            part, filled = next(self._reads)

    def quantized(self, spec: ExpertsSpec) -> Mapping[str, Any] | None:
        """The experts on the grid they are stored on, each read when it is packed; None where they are floats, or on a
        grid that is not packed.
        """
        return None if self._stored is None else self._stored(interleaved=not spec.is_concatenated)

    def experts(self, spec: ExpertsSpec) -> Mapping[str, LazyStack]:
        """Raises `CheckpointError` when the files no longer hold what they held."""
        window = _Window(self._reads, spec)
        dtype = str(spec.dtype).removeprefix("torch.")
        return {
            name: LazyStack(shape, dtype, partial(window.slice, name)) for name, shape in weight_shapes(spec).items()
        }


class _Window:
    """The part of a module that is in memory now."""

    def __init__(self, reads: Iterator[Read], spec: ExpertsSpec) -> None:
        self._reads = reads
        self._spec = spec
        self._experts = range(0)
        self._views: dict[str, torch.Tensor] = {}

    def slice(self, name: str, expert: int) -> torch.Tensor:
        while expert not in self._experts:
            self._views = {}  # let go before the next part is waited for
            part, filled = next(self._reads)
            last = self._spec.num_experts if part.last is None else part.last
            self._experts = range(part.first, last)
            self._views = layer_weights(filled, self._spec).named()
        return self._views[name][expert - self._experts.start]


def _adopt(module: nn.Module, filled: nn.Module) -> None:
    for name, tensor in filled.state_dict().items():
        _set(module, name, tensor)


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = owner._parameters.get(leaf)
    if parameter is None:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _complaints(info: Any) -> list[str]:
    """What transformers' conversion did not like."""
    shapes = [f"{name} is {tuple(there)}, not {tuple(wanted)}" for name, there, wanted in info.mismatched_keys]
    return [*info.error_msgs, *sorted(shapes), *(f"{name} cannot be converted" for name in info.conversion_errors)]
