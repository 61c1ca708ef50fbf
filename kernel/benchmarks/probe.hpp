// What this machine can do, measured in the same process as the kernel: the denominators of every percentage.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt::bench {

// One thread's share of a probe. Arithmetic probes run `rounds` rounds and return the operations done (multiply and add
// count as two); each returns something that depends on the result through *sink, so that nothing is optimised away.
using ArithmeticProbe = double (*)(long rounds, volatile double* sink);

// Reads bytes [p, p + n), n a multiple of 4096.
using ReadProbe = void (*)(const char* p, std::size_t n, volatile std::uint64_t* sink);

struct Probes {
  const char* isa;
  ReadProbe read;
  ArithmeticProbe fp32;  // fp32 FMA
  ArithmeticProbe int8;  // 8-bit dot products into 32-bit sums
  ArithmeticProbe bf16;  // bf16 dot products into fp32, null where the ISA has none
};

Probes avx2_probes();
#if KT_BENCH_AVX512
Probes avx512_probes();
#endif
#if KT_BENCH_AMX
Probes amx_probes();
#endif

}  // namespace kt::bench
