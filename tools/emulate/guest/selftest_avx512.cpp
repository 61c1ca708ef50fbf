// The AVX-512 instructions that the kernel's arithmetic stands on.
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "selftest.hpp"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")))

namespace selftest {
namespace {

constexpr int kLanes = 16;

struct Int8Case {
  std::vector<std::uint8_t> a = random_values<std::uint8_t>(64), b = random_values<std::uint8_t>(64);
  std::vector<std::int32_t> start = random_values<std::int32_t>(kLanes);

  // Unsigned a times signed b, four products of a lane.
  std::int32_t products(int lane) const {
    std::int32_t sum = 0;
    for (int i = 4 * lane; i < 4 * lane + 4; ++i) sum += a[i] * static_cast<std::int8_t>(b[i]);
    return sum;
  }
};

AVX512 std::vector<std::int32_t> lanes(__m512i v) {
  std::vector<std::int32_t> values(kLanes);
  _mm512_storeu_si512(values.data(), v);
  return values;
}

AVX512 void test_vnni() {
  const Int8Case c;
  const __m512i a = _mm512_loadu_si512(c.a.data()), b = _mm512_loadu_si512(c.b.data());
  const __m512i start = _mm512_loadu_si512(c.start.data());
  std::vector<std::int32_t> expected(kLanes);
  for (int i = 0; i < kLanes; ++i) expected[i] = wrapping_sum(c.start[i], c.products(i));
  check(lanes(_mm512_dpbusd_epi32(start, a, b)) == expected, "vpdpbusd");

  constexpr __mmask16 kMask = 0xa5c3;
  for (int i = 0; i < kLanes; ++i) expected[i] = (kMask >> i & 1) != 0 ? expected[i] : c.start[i];
  check(lanes(_mm512_mask_dpbusd_epi32(start, kMask, a, b)) == expected, "vpdpbusd with a mask");

  constexpr std::int32_t kNearTop = 0x7fffff00;
  for (int i = 0; i < kLanes; ++i) {
    expected[i] = static_cast<std::int32_t>(std::min<std::int64_t>(INT32_MAX, std::int64_t{kNearTop} + c.products(i)));
  }
  check(lanes(_mm512_dpbusds_epi32(_mm512_set1_epi32(kNearTop), a, b)) == expected, "vpdpbusds saturates");

  for (int i = 0; i < kLanes; ++i) {
    std::int16_t x[2], y[2];
    std::memcpy(x, &c.a[4 * i], 4);
    std::memcpy(y, &c.b[4 * i], 4);
    expected[i] = wrapping_sum(x[0] * y[0], x[1] * y[1]);
  }
  check(lanes(_mm512_madd_epi16(a, b)) == expected, "vpmaddwd");
}

AVX512 void test_bf16() {
  const auto a = random_bf16(2 * kLanes), b = random_bf16(2 * kLanes);
  const __m512 sum = _mm512_dpbf16_ps(_mm512_set1_ps(1.5f), (__m512bh)_mm512_loadu_si512(a.data()),
                                      (__m512bh)_mm512_loadu_si512(b.data()));
  float got[kLanes];
  _mm512_storeu_ps(got, sum);
  double worst = 0;
  for (int i = 0; i < kLanes; ++i) {
    const double even = double{from_bf16(a[2 * i])} * from_bf16(b[2 * i]);
    const double odd = double{from_bf16(a[2 * i + 1])} * from_bf16(b[2 * i + 1]);
    worst = std::fmax(worst, std::fabs(1.5 + even + odd - got[i]));
  }
  check(worst < 2e-6, "vdpbf16ps");
}

AVX512 void test_conversions() {
  std::vector<float> values(kLanes);
  for (float& value : values) value = static_cast<float>(static_cast<std::int32_t>(random()())) * 1e-7f;
  const __m512 v = _mm512_loadu_ps(values.data());

  std::uint16_t halves[kLanes], expected_halves[kLanes];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), (__m256i)_mm512_cvtneps_pbh(v));
  std::transform(values.begin(), values.end(), expected_halves, to_bf16);
  check(std::equal(halves, halves + kLanes, expected_halves), "vcvtneps2bf16 rounds to nearest even");

  std::int8_t bytes[kLanes];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  bool same = true;
  for (int i = 0; i < kLanes; ++i) {
    same = same && bytes[i] == static_cast<std::int8_t>(std::clamp(std::nearbyint(values[i]), -128.0f, 127.0f));
  }
  check(same, "vcvtps2dq rounds and vpmovsdb saturates");
}

}  // namespace

void test_avx512() {
  test_vnni();
  test_bf16();
  test_conversions();
}

}  // namespace selftest
