"""A compiled extension and Python files that do not belong together."""

from __future__ import annotations

from types import ModuleType

import pytest

import kt_kernel
from kt_kernel import _ext, _versions


def test_the_installed_pair_agrees() -> None:
    assert kt_kernel.__version__ == _ext.__version__


def test_every_public_name_exists() -> None:
    assert all(hasattr(kt_kernel, name) for name in kt_kernel.__all__)


def test_a_stale_extension_is_refused_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "version", lambda _: "9.9.9")
    with pytest.raises(
        ImportError, match=r"kt_kernel 9.9.9 from /new/__init__.py with the compiled .*_ext.*which is version"
    ):
        _versions.check_extension(_ext, "/new/__init__.py")


def test_an_extension_of_the_same_version_that_lacks_names_is_refused() -> None:
    stale = ModuleType("stale")
    stale.__version__ = _ext.__version__  # type: ignore[attr-defined]
    stale.__file__ = "/old/_ext.so"
    with pytest.raises(ImportError, match=r"/old/_ext.so, which lacks Context, MoE"):
        _versions.check_extension(stale, "/new/__init__.py")
