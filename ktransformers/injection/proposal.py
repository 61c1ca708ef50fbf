"""A pattern for module names that exist, in place of one that finds nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ktransformers.injection.tree import without_numbers

__all__ = ["propose_pattern"]

# The part of a pattern that says which layers: `1` in `layers\.1\.mlp`, `(0|[1-9])` in `layers\.(0|[1-9])\.`.
_WHICH_LAYERS = re.compile(r"(?:layers|layer|blocks|h)\\?\.(?P<which>[^\\]*?\d.*?)\\\.")


def propose_pattern(meant: str, targets: Sequence[str], names: Iterable[str]) -> str | None:
    """A regular expression that finds `targets` among `names`, and nothing else; None without targets.

    `names` holds the targets. The layers that the pattern `meant` picks by number are picked here too, where the model
    has them.
    """
    targets, names = list(dict.fromkeys(targets)), list(names)
    if not targets:
        return None
    narrowed = [_pattern(targets, found["which"])] if (found := _WHICH_LAYERS.search(meant)) else []
    for pattern in [*narrowed, _pattern(targets, r"\d+")]:
        hits = _hits(pattern, names)
        if hits and hits <= set(targets) and (pattern in narrowed or hits == set(targets)):
            return pattern
    return f"^({'|'.join(re.escape(target) for target in targets)})$"


def _pattern(targets: Iterable[str], number: str) -> str:
    """Of all shapes of the targets, with `number` for what differs between those of one shape."""
    members: dict[str, list[list[str]]] = {}
    for target in targets:
        members.setdefault(without_numbers(target), []).append(target.split("."))
    shapes = [
        r"\.".join(re.escape(parts[0]) if len(set(parts)) == 1 else number for parts in zip(*group, strict=True))
        for group in members.values()
    ]
    return f"^{shapes[0]}$" if len(shapes) == 1 else f"^({'|'.join(shapes)})$"


def _hits(pattern: str, names: Iterable[str]) -> set[str]:
    try:
        return {name for name in names if re.search(pattern, name)}
    except re.error:  # a piece cut out of the middle of something
        return set()
