"""The C++ library as Python sees it. Raw addresses and sizes: `kt_kernel.wrappers` is the safe face."""

from typing_extensions import Buffer

__version__: str
LAYOUT_VERSION: int

class KernelError(Exception): ...
class ForkError(KernelError): ...

class WeightsValueError(KernelError):
    """A NaN or infinite weight; the text names projection, channel and position."""

def cpu_features() -> dict[str, bool]:
    """What CPUID reports and the OS lets this process use: `sse2 avx avx2 fma f16c avx_vnni avx512f avx512bw avx512dq
    avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16` plus `os_avx os_avx512 os_amx` (XCR0; for AMX also the
    process's tile permission, asked for once). Other architectures: all False plus their own names (`neon`)."""

def cpu_name() -> str: ...

class TierInfo:
    name: str  # "generic", "avx2", … ascending
    compiled: bool  # this build holds the tier
    missing_cpu: list[str]  # CPU features the tier needs and this CPU lacks
    missing_os: list[str]  # state components the OS or hypervisor has not enabled
    formats: list[str]  # formats the tier implements ("INT8", "BF16", …)

def tiers() -> list[TierInfo]:
    """Every tier this source tree knows, lowest first, `generic` always usable."""

def parse_cgroup_cpu_max(text: str) -> float | None:
    """cgroup v2 `cpu.max` → CPUs ("50000 100000" → 0.5, "max 100000" → None); ValueError on anything else."""

def parse_cgroup_v1_quota(quota: str, period: str) -> float | None:
    """cgroup v1 `cpu.cfs_quota_us`, `cpu.cfs_period_us` ("-1" → None)."""

class Topology:
    logical_cpus: int
    physical_cores: int
    affinity: list[int]  # CPUs this process may run on
    physical_in_affinity: int
    cgroup_quota: float | None
    numa_nodes: int
    default_threads: int  # min(physical cores in the affinity mask, floor(quota)), at least 1

def topology(sysfs: str = "/sys", cgroup: str = "/sys/fs/cgroup", proc: str = "/proc") -> Topology: ...

class Context:
    """Owns the worker threads and their scratch memory. Threads sleep when idle."""
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def read_bandwidth(self, bytes: int) -> float:
        """Bytes a second that all threads together read from `bytes` of memory, the best of a few passes."""
    def run_failing_job(self, message: str) -> None:
        """Throws `message` inside a worker thread; it must reach the caller as KernelError (for tests)."""

class Gate:
    """What becomes of the first products: activation(g)·(u + up_offset), or activation(x) where `gated` is False.
    Activations: "silu" (x·sigmoid(alpha·x)), "gelu", "gelu_tanh", "relu", "relu2". limit above 0: g at most the limit
    (with `limit_after` activation(g) instead), u within ±limit."""

    def __init__(
        self,
        activation: str = "silu",
        gated: bool = True,
        alpha: float = 1.0,
        limit: float = 0.0,
        limit_after: bool = False,
        up_offset: float = 0.0,
    ) -> None: ...

class MatrixTraits:
    """How one weight matrix is kept. Formats: "INT8", "BF16", "INT4", "INT8_GROUPED", "FP8". The rest is for grouped
    formats: inputs a scale, levels "int4", "uint4", "e2m1", "int8", "normal4", dtype of scales and minimums."""

    def __init__(
        self,
        format: str,
        group: int = 0,
        levels: str = "int4",
        minimums: bool = False,
        scales: str = "float32",
    ) -> None: ...
    format: str
    group: int
    levels: str
    minimums: bool
    scales: str

def default_traits(format: str) -> MatrixTraits:
    """What weights that come as floats become in a format."""

class Fp8View:
    """An FP8 e4m3 matrix in memory: addresses of uint8 codes and of fp32 scales, one for each block (channels, inputs),
    whose rows are `scale_stride` apart; strides in elements as (channel, input). Without codes: no matrix is there."""

    def __init__(
        self,
        codes: int = 0,
        strides: tuple[int, ...] = (0, 0),
        scales: int = 0,
        scale_stride: int = 0,
        block: tuple[int, int] = (1, 1),
        bias: int = 0,
    ) -> None: ...

class PackedExperts:
    """Packed weights of one layer, 64-byte aligned, independent of tier, threads and NUMA."""
    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        gate_up: MatrixTraits,
        down: MatrixTraits,
        rotate: bool,
        gated: bool = True,
        biased: bool = False,
    ) -> None: ...
    @staticmethod
    def map(
        path: str,
        offset: int,
        experts: int,
        hidden: int,
        intermediate: int,
        gate_up: MatrixTraits,
        down: MatrixTraits,
        rotate: bool,
        gated: bool = True,
        biased: bool = False,
    ) -> PackedExperts:
        """Works on the bytes of a file from `offset` on, without a copy; KernelError when it cannot be mapped or ends
        too early. They have to come from an equal layer and LAYOUT_VERSION. Nothing can be packed or loaded into it.
        """
    mapped: bool
    experts: int
    hidden: int
    intermediate: int
    gate_up: MatrixTraits
    down: MatrixTraits
    rotated: bool
    gated: bool
    biased: bool
    nbytes: int
    bytes_per_expert: int
    def pack_expert(
        self,
        context: Context,
        tier: str,
        expert: int,
        gate: int,
        gate_strides: tuple[int, int],
        up: int,
        up_strides: tuple[int, int],
        down: int,
        down_strides: tuple[int, int],
        dtype: str,
        gate_bias: int = 0,
        up_bias: int = 0,
        down_bias: int = 0,
    ) -> None:
        """Quantises one expert. Addresses of gate, up (I, H) and down (H, I); strides in elements as (channel, input),
        so transposed and interleaved sources need no copy; dtype "float32", "bfloat16", "float16". Biases: addresses of
        contiguous fp32 vectors (I), (I), (H), all of them in a biased layer. Without a gate, `gate` and `gate_bias` are
        0 and not read. Releases the GIL."""
    def pack_quantized_expert(
        self,
        context: Context,
        expert: int,
        gate: tuple[int, int, int, int, int] | None,
        up: tuple[int, int, int, int, int],
        down: tuple[int, int, int, int, int],
        gate_bias: int = 0,
        up_bias: int = 0,
        down_bias: int = 0,
    ) -> None:
        """Lays out one expert that comes quantised, for a layer of grouped formats that is not rotated: addresses of
        int8 values (channels, inputs), fp32 scales and minimums (channels, groups; 0 without), and the elements between
        channels of values and of the other two. WeightsValueError for a value that is none of the levels and for scales
        that are not finite or not exact in the matrix's dtype. Releases the GIL."""
    def pack_fp8_expert(self, context: Context, expert: int, gate: Fp8View, up: Fp8View, down: Fp8View) -> None:
        """Lays out one expert's codes and scales as they are, in a layer whose matrices are FP8. WeightsValueError for
        NaN codes, scales that are not finite, and blocks that are neither whole channels nor multiples of 16 x 128.
        Releases the GIL."""
    def load_expert(self, expert: int, data: Buffer) -> None:
        """Takes over one expert's packed bytes: a contiguous buffer of exactly `bytes_per_expert`, else KernelError.
        They have to come from a layer of equal sizes, formats, rotation, gate, biases and LAYOUT_VERSION."""
    def unpack_expert(self, expert: int, gate: int, up: int, down: int) -> None:
        """Writes dequantised, un-rotated fp32 (I, H), (I, H), (H, I), contiguous; no gate where there is none."""
    def bytes(self) -> memoryview:
        """The packed bytes, read-only."""

class Pending:
    def wait(self) -> None:
        """Blocks (without the GIL) until the submitted forward has finished; rethrows its error."""
    def done(self) -> bool: ...

class MoE:
    def __init__(
        self, context: Context, packed: PackedExperts, tier: str, gate: Gate, top_k: int, max_tokens: int
    ) -> None:
        """`gate.gated` has to be what `packed.gated` is."""
    def forward(
        self,
        tokens: int,
        k: int,
        x: int,
        x_dtype: str,
        ids: int,
        ids_dtype: str,
        weights: int,
        weights_dtype: str,
        out: int,
        out_dtype: str,
    ) -> None:
        """All arrays contiguous: x (T,H), ids (T,k) int32/int64, weights (T,k), out (T,H). Releases the GIL.
        Ids outside 0…E−1 contribute nothing. T beyond max_tokens is processed in chunks, with equal bits."""
    def submit(
        self,
        tokens: int,
        k: int,
        x: int,
        x_dtype: str,
        ids: int,
        ids_dtype: str,
        weights: int,
        weights_dtype: str,
        out: int,
        out_dtype: str,
    ) -> Pending:
        """As forward, on the context's submission thread; the caller keeps every array alive until wait() returns."""
    def warm_up(self) -> None:
        """Touches every packed page and runs one token through every phase."""
    def scratch_bytes(self) -> int: ...
    def fill_scratch(self, byte: int) -> None:
        """Overwrites all scratch memory (for tests: stale scratch must never reach an output)."""

class BlockType:
    """A quantised block type of GGUF files that is decoded here."""

    name: str  # as ggml spells it
    weights: int  # in a block
    bytes: int  # of a block
    group: int  # weights that share a scale
    levels: str  # see kt_kernel.quantized.LEVELS
    has_minimum: bool

def block_types() -> list[BlockType]: ...
def unpack_blocks(
    context: Context, type: str, source: int, bytes: int, values: int, scales: int, minimums: int
) -> None:
    """Addresses of contiguous int8 values, fp32 scales and fp32 minimums (0 for types without). Releases the GIL."""

def dequantize_blocks(context: Context, type: str, source: int, bytes: int, out: int, dtype: str) -> None:
    """Into contiguous "float32" or "bfloat16". Releases the GIL."""

class PackedMatrix:
    """One packed matrix of N channels and K inputs, as an expert's down projection is packed."""
    def __init__(
        self, channels: int, inputs: int, traits: MatrixTraits, rotate: bool, biased: bool = False
    ) -> None: ...
    channels: int
    inputs: int
    traits: MatrixTraits
    rotated: bool
    biased: bool
    nbytes: int
    def pack(
        self, context: Context, tier: str, weight: int, strides: tuple[int, int], dtype: str, bias: int = 0
    ) -> None:
        """Quantises (N, K) at an address; strides in elements as (channel, input); `bias`: N contiguous fp32 numbers.
        Releases the GIL."""
    def unpack(self, weights: int) -> None:
        """Writes dequantised, un-rotated fp32 (N, K), contiguous."""

class Linear:
    def __init__(self, context: Context, packed: PackedMatrix, tier: str) -> None: ...
    def forward(self, rows: int, x: int, x_dtype: str, out: int, out_dtype: str) -> None:
        """Contiguous x (rows, K) and out (rows, N). Releases the GIL."""
