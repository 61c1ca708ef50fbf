"""Backends: the names users write in rule files and constructors, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kt_kernel.errors import BackendError, did_you_mean

__all__ = ["AUTO", "BACKENDS", "Backend", "Family", "Format", "parse_backend"]

Format = Literal["INT8", "BF16", "INT4", "FP8"]
Family = Literal["generic", "avx2", "avx512", "amx"]

FAMILIES: tuple[Family, ...] = ("generic", "avx2", "avx512", "amx")
"""ISA families, ascending."""


@dataclass(frozen=True)
class Backend:
    """A format and the highest ISA family it asks for; `family` None asks for the best there is."""

    name: str
    format: Format
    family: Family | None
    meaning: str


AUTO = Backend("auto", "BF16", None, "BF16, which loses nothing on a bf16 checkpoint, on the best tier")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("AMXINT8", "INT8", "amx", "INT8 on AMX tiles, or the next tier down"),
        Backend("AMXINT4", "INT4", "amx", "INT4 in groups of 32, on the best tier there is up to AMX"),
        Backend("AMXBF16", "BF16", "amx", "BF16 on AMX tiles, or the next tier down"),
        Backend("AMXFP8", "FP8", "amx", "FP8 (e4m3) on AMX tiles, or the next tier down"),
        Backend("AVX512INT8", "INT8", "avx512", "INT8, AVX-512 at most"),
        Backend("AVX512INT4", "INT4", "avx512", "INT4, AVX-512 at most"),
        Backend("AVX512BF16", "BF16", "avx512", "BF16, AVX-512 at most"),
        Backend("AVX512FP8", "FP8", "avx512", "FP8, AVX-512 at most"),
        Backend("AVX2INT8", "INT8", "avx2", "INT8, AVX2 at most"),
        Backend("AVX2INT4", "INT4", "avx2", "INT4, AVX2 at most"),
        Backend("AVX2BF16", "BF16", "avx2", "BF16, AVX2 at most"),
        Backend("AVX2FP8", "FP8", "avx2", "FP8, AVX2 at most"),
        Backend("INT8", "INT8", None, "INT8 on the best tier"),
        Backend("INT4", "INT4", None, "INT4 in groups of 32, on the best tier"),
        Backend("BF16", "BF16", None, "BF16 on the best tier"),
        Backend("FP8", "FP8", None, "FP8 on the best tier; FP8 checkpoints keep their values"),
        Backend("AMX", "BF16", "amx", "same as AMXBF16"),
        Backend("AVX512", "BF16", "avx512", "same as AVX512BF16"),
        Backend("AVX2", "BF16", "avx2", "same as AVX2BF16"),
        AUTO,
    )
}

# Other names of the same thing: spellings found in rule files and command lines written for other versions.
_ALIASES = {"MOE_INT8": "INT8", "MOE_INT4": "INT4", "FP8_PERCHANNEL": "FP8", "NONE": "auto", "DEFAULT": "auto"}

# Names with a meaning in the wild that this version has no kernel for, with the weights they stand for.
_NOT_HERE = {
    "AMXINT4_1": "4-bit weights with a zero point",
    "RAWINT4": "packed 4-bit checkpoints",
    "GPTQ_INT4": "GPTQ checkpoints",
    "SYCL_GPTQ_INT4": "GPTQ checkpoints on a SYCL device",
    "AWQ": "AWQ checkpoints",
    "MXFP4": "MXFP4 checkpoints",
    "MXFP8": "MXFP8 checkpoints",
    "LLAMAFILE": "GGUF files",
    "GGUF": "GGUF files",
}

# Of those, what is read from a checkpoint all the same.
_READ = {"RAWINT4", "GPTQ_INT4", "SYCL_GPTQ_INT4", "AWQ", "MXFP4", "LLAMAFILE", "GGUF"}


def _key(name: str) -> str:
    """Case, hyphens, underscores and spaces do not matter: `AMX-INT8`, `AMXInt8` and `amx_int8` are one name."""
    return name.upper().translate(str.maketrans("", "", "-_ \t"))


_BY_KEY = {_key(name): backend for name, backend in BACKENDS.items()}
_BY_KEY |= {_key(alias): BACKENDS[name] for alias, name in _ALIASES.items()}
_NOT_HERE_BY_KEY = {_key(name): name for name in _NOT_HERE}


def parse_backend(name: object = None) -> Backend:
    """The backend of that name; None, "" and "auto" choose for you.

    Raises `BackendError` for a name that is unknown (with the nearest names) or known and not in this version.
    """
    if isinstance(name, Backend):
        return name
    if name is None:
        return AUTO
    if not isinstance(name, str):
        raise BackendError(f"a backend is a name such as 'AMXINT8', not {name!r} ({type(name).__name__})")
    key = _key(name)
    if not key:
        return AUTO
    if key in _BY_KEY:
        return _BY_KEY[key]
    supported = ", ".join(BACKENDS)
    if key in _NOT_HERE_BY_KEY:
        known = _NOT_HERE_BY_KEY[key]
        raise BackendError(
            f"backend {name!r} ({_NOT_HERE[known]}) is not in this version; "
            + ("such files are read with backend 'auto'; " if known in _READ else "")
            + f"these run: {supported}"
        )
    if key.endswith(("SFT", "SKIPLORA")):
        raise BackendError(f"backend {name!r} is for fine-tuning, which is not in this version; these run: {supported}")
    hint = did_you_mean(name, [*BACKENDS, *_NOT_HERE])
    raise BackendError(f"unknown backend {name!r}{hint or '.'} Supported: {supported}")
