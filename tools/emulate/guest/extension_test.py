"""Inside the guest: the extension as installed, under a Python without anything else. Prints as kt_tests does.

An instruction above the CPU's, at import, while the CPU is asked, or in a layer on a tier that is said to be usable,
would end this process. Arguments: the highest tier that this CPU can run, and the fingerprint that the host computed.
"""

from __future__ import annotations

import sys
from array import array

TYPE_CHECKING = False  # the guest has no typing module
if TYPE_CHECKING:
    from typing import Any

results: list[bool] = []


def check(name: str, passed: bool) -> None:
    results.append(passed)
    print(f"{'ok  ' if passed else 'FAIL'}  {name}", flush=True)


def numbers(count: int, seed: int) -> array[float]:
    """The same on every CPU: multiples of 2^-11 between -1 and 1."""
    values = array("f")
    for _ in range(count):
        seed = (seed * 1103515245 + 12345) % 2**31
        values.append((seed >> 15) % 4096 / 2048 - 1)
    return values


def address(values: array[float] | array[int]) -> int:
    return values.buffer_info()[0]


def layer_output(extension: Any, tier: str, kind: str) -> bytes:
    """4 experts, 7 tokens of 96, an intermediate of 40; one slot is routed nowhere."""
    experts, hidden, inner, tokens, slots = 4, 96, 40, 7, 2
    context = extension.Context(2)
    packed = extension.PackedExperts(experts, hidden, inner, *[extension.MatrixTraits(kind)] * 2, True)
    for e in range(experts):
        gate, up, down = (numbers(hidden * inner, 3 * e + i) for i in range(3))
        wide, narrow = (hidden, 1), (inner, 1)
        places = (address(gate), wide, address(up), wide, address(down), narrow)
        packed.pack_expert(context, tier, e, *places, "float32")
    x, weights, out = numbers(tokens * hidden, 77), numbers(tokens * slots, 78), array("f", bytes(4 * tokens * hidden))
    ids = array("q", [(5 * i) % experts for i in range(tokens * slots)])
    ids[3] = -1
    layer = extension.MoE(context, packed, tier, extension.Gate(), slots, 4)
    arrays = (address(x), "float32", address(ids), "int64", address(weights), "float32", address(out), "float32")
    layer.forward(tokens, slots, *arrays)
    return out.tobytes()


def fingerprint(output: bytes) -> str:
    """hashlib would need more of Python than this has to carry."""
    return f"{int.from_bytes(output, 'little') % (2**89 - 1):x}"


def near(got: bytes, expected: bytes) -> bool:
    """Within 3 % of the largest number."""
    a, b = array("f", got), array("f", expected)
    return all(abs(x - y) <= 0.03 * max(map(abs, b)) for x, y in zip(a, b, strict=True))


def main(expected: str, host: str) -> int:
    _ext: Any = __import__("_ext")  # beside this file in the guest, not in a package

    check("extension: imports", True)
    print(f"{_ext.cpu_name()}: {', '.join(name for name, has in _ext.cpu_features().items() if has)}")
    usable = [tier for tier in _ext.tiers() if tier.compiled and not tier.missing_cpu and not tier.missing_os]
    check(f"extension: the highest tier is {expected}", usable[-1].name == expected)
    for tier in usable:
        output = layer_output(_ext, tier.name, "INT8")
        check(f"extension: an INT8 layer has the host's bits [{tier.name} INT8]", fingerprint(output) == host)
        bf16 = layer_output(_ext, tier.name, "BF16")
        check(f"extension: a BF16 layer is near the INT8 one [{tier.name} BF16]", near(bf16, output))
    print(f"{len(results)} tests, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
