// The 512-bit vector type of the AVX-512 family, as text for a tier's anonymous namespace (see
// tiers/elementwise-inl.hpp).

constexpr std::size_t kWidth = 16;
typedef __m512 F;
typedef __m512i I;

inline F load(const float* p) {
  return _mm512_loadu_ps(p);
}
inline void store(float* p, F v) {
  _mm512_storeu_ps(p, v);
}
inline I load_int(const std::int32_t* p) {
  return _mm512_loadu_si512(p);
}
inline F set1(float x) {
  return _mm512_set1_ps(x);
}
inline F add(F a, F b) {
  return _mm512_add_ps(a, b);
}
inline F sub(F a, F b) {
  return _mm512_sub_ps(a, b);
}
inline F mul(F a, F b) {
  return _mm512_mul_ps(a, b);
}
inline F div(F a, F b) {
  return _mm512_div_ps(a, b);
}
inline F max_of(F a, F b) {
  return _mm512_max_ps(a, b);
}
inline F min_of(F a, F b) {
  return _mm512_min_ps(a, b);
}
inline F to_float(I v) {
  return _mm512_cvtepi32_ps(v);
}
inline I zero_int() {
  return _mm512_setzero_si512();
}
inline I max_int(I a, I b) {
  return _mm512_max_epi32(a, b);
}
inline I abs_bits(F v) {
  return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}
inline F pow2(I n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline I round_to_int(F v) {
  return _mm512_cvtps_epi32(v);
}
inline std::uint32_t largest_lane(I v) {
  return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(v));
}

inline void store_int8(std::int8_t* p, I v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}

inline F load_bf16(const std::uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline F load_f16(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// float_to_bf16 on sixteen lanes, result in the low half of each 32-bit lane. Not vcvtneps2bf16: that one flushes
// subnormals.
inline I bf16_bits(F v) {
  const I bits = _mm512_castps_si512(v);
  const I high = _mm512_srli_epi32(bits, 16);
  const I odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const I rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
}

inline void store_bf16(std::uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(v)));
}

inline void store_f16(std::uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Lanes in `upper` take partner - self, the others self + partner.
inline F butterfly(F self, F partner, __mmask16 upper) {
  return _mm512_mask_sub_ps(_mm512_add_ps(self, partner), upper, partner, self);
}

inline F butterflies_in_register(F v) {
  v = butterfly(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
  v = butterfly(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
  v = butterfly(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
  return butterfly(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
}
