// The 256-bit vector type of the AVX2 family, as text for a tier's anonymous namespace (see tiers/elementwise-inl.hpp).

constexpr std::size_t kWidth = 8;
typedef __m256 F;
typedef __m256i I;

inline F load(const float* p) {
  return _mm256_loadu_ps(p);
}
inline void store(float* p, F v) {
  _mm256_storeu_ps(p, v);
}
inline I load_int(const std::int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline F set1(float x) {
  return _mm256_set1_ps(x);
}
inline F add(F a, F b) {
  return _mm256_add_ps(a, b);
}
inline F sub(F a, F b) {
  return _mm256_sub_ps(a, b);
}
inline F mul(F a, F b) {
  return _mm256_mul_ps(a, b);
}
inline F div(F a, F b) {
  return _mm256_div_ps(a, b);
}
inline F max_of(F a, F b) {
  return _mm256_max_ps(a, b);
}
inline F min_of(F a, F b) {
  return _mm256_min_ps(a, b);
}
inline F to_float(I v) {
  return _mm256_cvtepi32_ps(v);
}
inline I zero_int() {
  return _mm256_setzero_si256();
}
inline I max_int(I a, I b) {
  return _mm256_max_epi32(a, b);
}
inline I abs_bits(F v) {
  return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}
inline F pow2(I n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline I round_to_int(F v) {
  return _mm256_cvtps_epi32(v);
}

inline std::uint32_t largest_lane(I v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
}

inline void store_int8(std::int8_t* p, I v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline F load_bf16(const std::uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline F load_f16(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// float_to_bf16 on eight lanes, result in the low half of each 32-bit lane.
inline I bf16_bits(F v) {
  const I bits = _mm256_castps_si256(v);
  const I high = _mm256_srli_epi32(bits, 16);
  const I odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const I rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const I quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}

inline void store_bf16(std::uint16_t* p, F v) {
  const I bits = bf16_bits(v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}

inline void store_f16(std::uint16_t* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Stages 1, 2, 4: partner = the lane h away; the lower lane takes self + partner, the upper one partner - self.
inline F butterflies_in_register(F v) {
  F partner = _mm256_permute_ps(v, 0xb1);
  v = _mm256_blend_ps(_mm256_add_ps(v, partner), _mm256_sub_ps(partner, v), 0xaa);
  partner = _mm256_permute_ps(v, 0x4e);
  v = _mm256_blend_ps(_mm256_add_ps(v, partner), _mm256_sub_ps(partner, v), 0xcc);
  partner = _mm256_permute2f128_ps(v, v, 0x01);
  return _mm256_blend_ps(_mm256_add_ps(v, partner), _mm256_sub_ps(partner, v), 0xf0);
}
