"""Short ways to write rules in tests."""

from __future__ import annotations

from typing import Any

EXPERTS = r"^model\.layers\.\d+\.mlp\.experts$"
PASS_THROUGH = "tests.injection.operators.PassThrough"
PACKING = "tests.injection.operators.Packing"


def make_rule(
    name: str | None = None, to: str = PASS_THROUGH, *, of: str | None = None, recursive: bool = True, **kwargs: Any
) -> dict[str, Any]:
    """`make_rule(r"experts$", PACKING, backend="INT8")`; `of` is the class to match."""
    match = {key: value for key, value in (("name", name), ("class", of)) if value is not None}
    return {"match": match, "replace": {"class": to, "kwargs": kwargs}, "recursive": recursive}
