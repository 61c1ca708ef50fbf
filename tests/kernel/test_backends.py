from __future__ import annotations

import pytest

from kt_kernel import BACKENDS, BackendError, MoEWrapper, parse_backend
from tests.kernel.layers import make_layer


@pytest.mark.parametrize("spelling", ["AMXINT8", "AMXInt8", "amxint8", "AMX-INT8", "AMX_INT8", " amxInt8 "])
def test_every_spelling_of_a_backend_is_the_same_backend(spelling: str) -> None:
    assert parse_backend(spelling) is BACKENDS["AMXINT8"]


@pytest.mark.parametrize("missing", [None, "", "  ", "auto", "AUTO"])
def test_no_backend_means_choose_for_me_and_not_amx(missing: str | None) -> None:
    backend = parse_backend(missing)
    assert backend.name == "auto"
    assert backend.family is None
    assert backend.format == "BF16"


@pytest.mark.parametrize(
    ("name", "format", "family"),
    [
        ("AMXINT8", "INT8", "amx"),
        ("AMXBF16", "BF16", "amx"),
        ("AVX512INT8", "INT8", "avx512"),
        ("AVX512BF16", "BF16", "avx512"),
        ("AVX2INT8", "INT8", "avx2"),
        ("AVX2BF16", "BF16", "avx2"),
        ("AMXFP8", "FP8", "amx"),
        ("AVX2FP8", "FP8", "avx2"),
        ("FP8", "FP8", None),
        ("FP8_PERCHANNEL", "FP8", None),
        ("INT8", "INT8", None),
        ("BF16", "BF16", None),
        ("MOE_INT8", "INT8", None),
        ("AMXINT4", "INT4", "amx"),
        ("AMXInt4", "INT4", "amx"),
        ("AVX2INT4", "INT4", "avx2"),
        ("MOE_INT4", "INT4", None),
        ("AVX2", "BF16", "avx2"),
        ("AVX512", "BF16", "avx512"),
        ("AMX", "BF16", "amx"),
    ],
)
def test_a_name_stands_for_a_format_and_a_family(name: str, format: str, family: str | None) -> None:
    backend = parse_backend(name)
    assert (backend.format, backend.family) == (format, family)


@pytest.mark.parametrize("name", ["AMXINT4_1", "RAWINT4", "GPTQ_INT4", "MXFP4", "MXFP8", "llamafile", "GGUF"])
def test_a_backend_of_another_version_is_refused_with_what_runs_instead(name: str) -> None:
    with pytest.raises(BackendError, match=r"is not in this version; .*AMXINT8.*BF16"):
        parse_backend(name)


@pytest.mark.parametrize("name", ["RAWINT4", "GPTQ_INT4", "AWQ", "MXFP4", "llamafile"])
def test_a_backend_for_files_that_are_read_says_how(name: str) -> None:
    with pytest.raises(BackendError, match="such files are read with backend 'auto'"):
        parse_backend(name)


def test_a_fine_tuning_backend_says_so() -> None:
    with pytest.raises(BackendError, match="fine-tuning"):
        parse_backend("AMXBF16_SFT")


def test_a_typo_names_the_nearest_backend() -> None:
    with pytest.raises(BackendError, match="unknown backend 'AMXINT9'; did you mean 'AMXINT8'"):
        parse_backend("AMXINT9")


@pytest.mark.parametrize("value", [8, True, False, ["AMXINT8"], 1.5])
def test_a_backend_that_is_not_text_is_refused(value: object) -> None:
    with pytest.raises(BackendError, match="a backend is a name"):
        parse_backend(value)


def test_the_wrapper_refuses_an_impossible_backend_before_it_sees_weights() -> None:
    with pytest.raises(BackendError, match="MXFP8"):
        MoEWrapper(make_layer(2, 8, 8).config(1), backend="MXFP8")


@pytest.mark.parametrize("name", list(BACKENDS))
def test_every_supported_backend_runs_on_this_machine(name: str) -> None:
    layer = make_layer(4, 32, 32)
    wrapper = MoEWrapper(layer.config(2), backend=name, threads=1)
    wrapper.load_weights(layer.weights())
    assert wrapper.backend == name
    assert wrapper.format == BACKENDS[name].format
