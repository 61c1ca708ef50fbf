#include <immintrin.h>

#include "probe.hpp"

namespace kt::bench {
namespace {

// 10 chains: FMA's latency (4 or 5 cycles) times two units.
double fp32(long rounds, volatile double* sink) {
  constexpr int kChains = 10;
  const __m256 x = _mm256_set1_ps(1.0001f), y = _mm256_set1_ps(0.999f);
  __m256 c[kChains];
#pragma GCC unroll 10
  for (int j = 0; j < kChains; ++j) c[j] = _mm256_set1_ps(static_cast<float>(j));
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 10
    for (int j = 0; j < kChains; ++j) {
      c[j] = _mm256_fmadd_ps(c[j], x, y);
      asm volatile("" : "+x"(c[j]));
    }
  }
  float total = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) total += _mm256_cvtss_f32(c[j]);
  *sink = total;
  return static_cast<double>(rounds) * kChains * 8 * 2;
}

// The shortest AVX2 int8 sequence: u8·s8 pairs, pairs to quads, add.
double int8(long rounds, volatile double* sink) {
  constexpr int kChains = 8;
  __m256i x = _mm256_set1_epi8(3);
  const __m256i y = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
  __m256i c[kChains];
#pragma GCC unroll 8
  for (int j = 0; j < kChains; ++j) c[j] = _mm256_setzero_si256();
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kChains; ++j) {
      asm volatile("" : "+x"(x));  // a new operand as far as the compiler knows: each product is really computed
      c[j] = _mm256_add_epi32(c[j], _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), one));
    }
  }
  long total = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) total += _mm256_extract_epi32(c[j], 0);
  *sink = static_cast<double>(total);
  return static_cast<double>(rounds) * kChains * 32 * 2;
}

void read(const char* p, std::size_t n, volatile std::uint64_t* sink) {
  __m256i s[4] = {};
  for (std::size_t i = 0; i < n; i += 128) {
    // A page ahead: without it one core here reads a third less than with it.
#pragma GCC unroll 4
    for (int j = 0; j < 2; ++j) _mm_prefetch(p + i + 4096 + 64 * j, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      s[j] = _mm256_add_epi8(s[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
  }
  *sink = static_cast<std::uint64_t>(
      _mm256_extract_epi64(_mm256_add_epi8(_mm256_add_epi8(s[0], s[1]), _mm256_add_epi8(s[2], s[3])), 0));
}

}  // namespace

Probes avx2_probes() {
  return {"avx2", read, fp32, int8, nullptr};
}

}  // namespace kt::bench
