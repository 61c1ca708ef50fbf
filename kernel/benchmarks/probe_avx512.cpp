#include <immintrin.h>

#include "probe.hpp"

namespace kt::bench {
namespace {

double fp32(long rounds, volatile double* sink) {
  constexpr int kChains = 12;
  const __m512 x = _mm512_set1_ps(1.0001f), y = _mm512_set1_ps(0.999f);
  __m512 c[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) c[j] = _mm512_set1_ps(static_cast<float>(j));
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      c[j] = _mm512_fmadd_ps(c[j], x, y);
      asm volatile("" : "+v"(c[j]));
    }
  }
  float total = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) total += _mm512_cvtss_f32(c[j]);
  *sink = total;
  return static_cast<double>(rounds) * kChains * 16 * 2;
}

double int8(long rounds, volatile double* sink) {
  constexpr int kChains = 12;
  const __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
  __m512i c[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) c[j] = _mm512_setzero_si512();
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      c[j] = _mm512_dpbusd_epi32(c[j], x, y);
      asm volatile("" : "+v"(c[j]));
    }
  }
  long total = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) total += _mm512_reduce_add_epi32(c[j]);
  *sink = static_cast<double>(total);
  return static_cast<double>(rounds) * kChains * 64 * 2;
}

double bf16(long rounds, volatile double* sink) {
  constexpr int kChains = 12;
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = (__m512bh)_mm512_set1_epi16(0x3f00);
  __m512 c[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) c[j] = _mm512_setzero_ps();
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      c[j] = _mm512_dpbf16_ps(c[j], x, y);
      asm volatile("" : "+v"(c[j]));
    }
  }
  float total = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) total += _mm512_cvtss_f32(c[j]);
  *sink = total;
  return static_cast<double>(rounds) * kChains * 32 * 2;
}

void read(const char* p, std::size_t n, volatile std::uint64_t* sink) {
  __m512i s[4] = {};
  for (std::size_t i = 0; i < n; i += 256) {
    // A page ahead: without it one core here reads a third less than with it.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm_prefetch(p + i + 4096 + 64 * j, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) s[j] = _mm512_add_epi8(s[j], _mm512_load_si512(p + i + 64 * j));
  }
  *sink = static_cast<std::uint64_t>(
      _mm512_reduce_add_epi64(_mm512_add_epi8(_mm512_add_epi8(s[0], s[1]), _mm512_add_epi8(s[2], s[3]))));
}

}  // namespace

Probes avx512_probes() {
  return {"avx512", read, fp32, int8, bf16};
}

}  // namespace kt::bench
