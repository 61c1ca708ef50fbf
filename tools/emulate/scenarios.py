"""Which tests run on which emulated CPU: each tier on a model that has its instructions and none of the next tier's.

An instruction that does not belong to the tier is then an illegal one and ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.emulate.job import Tiles

# Emulation is some fifty times slower than the CPU. Left out, unless everything is asked for: tests whose references
# take minutes here, and whose kernels and shapes the remaining ones run as well (hashes: INT8 layers of every gate and
# shape; gemm: every number of rows; bits: every batch; values and routing: NaN, infinities, ids of no expert).
TOO_LONG = (
    "layer: close to float64",
    "layer: BF16 is close",
    "layer: INT8 is the contract",
    "gemm: one block, many blocks",
    "gemm: gate and up of every number",
    "gate: every formula has",
    "pack: same bytes",
)
# What concerns threads and processes more than instructions runs where there is tile state to lose.
ONLY_WITH_TILES = (
    "context: ",
    "fork: ",
    "bits: any number of threads",
    "bits: more rows than one chunk",
    "bits: long inputs",
)
# Tiers that this machine has just run natively, and those that every machine of the last ten years runs so, need here
# only every kernel once, on a CPU that has no more than them.
SHOWN_NATIVELY = (
    "hashes: ",
    "grouped: more inputs",
    "gate: silu is within",
    "linear: ",
    "routing: all tokens on one expert",
    "routing: one token to every number",
    "bits: more rows than one chunk",
    "bits: long inputs",
    "conversions: ",
    "activation: layers",
    "bias: layers",
    "bits: a token alone",
    "bits: any number of threads",
    "layer: outliers",
)
DETECTION = ("features: this machine", "features: the compiler's own detection")


@dataclass(frozen=True)
class Scenario:
    """One boot of the emulator."""

    name: str
    title: str
    model: str  # as Bochs names it
    tiers: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    tiles: Tiles = Tiles.ABSENT
    brief: bool = False
    extra: tuple[str, ...] = DETECTION  # further tests, by name

    def arguments(self, natively: frozenset[str] = frozenset(), *, everything: bool = False) -> tuple[str, ...]:
        """The words for kt_tests. `natively`: tiers whose tests passed on this machine's own CPU."""
        wanted = [word for tier in self.tiers for word in (f"[{tier} ", f"[{tier}]")]
        left_out = () if everything else self.left_out(natively)
        return (*wanted, *self.extra, *(word for text in left_out for word in ("--without", text)))

    def left_out(self, natively: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Tests that it runs only when everything is asked for, by parts of their names."""
        threads = () if self.tiles is Tiles.GRANTED else ONLY_WITH_TILES
        shown = self.brief or natively.issuperset(self.tiers)
        return (*TOO_LONG, *threads, *(SHOWN_NATIVELY if shown else ()))


SCENARIOS = (
    Scenario("amx", "AMX", "sapphire_rapids", ("amx",), tiles=Tiles.GRANTED),
    Scenario("no-amx", "the same CPU without AMX", "sapphire_rapids", ("avx512_bf16",)),
    Scenario("vnni", "AVX-512 with VNNI, without BF16", "corei7_icelake_u", ("avx512_vnni",)),
    Scenario("avx512", "AVX-512 alone", "corei7_skylake_x", ("avx512",)),
    Scenario("client", "a client CPU: AVX-VNNI, no AVX-512", "arrow_lake", ("avx_vnni",)),
    Scenario("avx2", "AVX2 only", "corei7_haswell_4770", ("avx2",), brief=True),
    Scenario("amd", "AVX2 only, AMD", "ryzen", ("avx2",), brief=True),
    Scenario("no-avx", "no AVX at all", "corei5_lynnfield_750", ("generic",), brief=True),
)
