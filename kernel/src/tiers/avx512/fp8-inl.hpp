// FP8 on AVX-512 F and BW, as text for a tier's anonymous namespace (after fp8-inl.hpp and rows-inl.hpp).
//
// e4m3 to a bf16 of 2^-8 its value: exponent and mantissa move by 4 bits, and the exponent's bias goes from 7 to 127
// with 112 added, 8 less than it takes, which is all in bits that are free: an XOR does it. A subnormal (m/8·2^-6)
// takes what it needs instead from a table in a register. The products' factor of 2^-8 goes back with the scale.
constexpr float kFp8Unit = 256.0f;

// bf16 of m·2^-17, XOR m << 4.
alignas(64) constexpr std::uint16_t kSubnormals[32] = {0x0000, 0x3710, 0x37a0, 0x37f0, 0x3840, 0x3870, 0x3820, 0x3810};

struct Fp8Weights : Fp8Codes {
  // 32 codes to bf16, order kept.
  static inline __m512i load_pair(const char* codes) {
    const __m512i x = _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes)));
    const __mmask32 subnormal = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
    // The table is looked up by the code's low 5 bits: m, where it is used.
    const __m512i change =
        _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(112 << 7), subnormal, x, _mm512_load_si512(kSubnormals));
    // (x << 4 & sign, exponent and mantissa) ^ change
    return _mm512_ternarylogic_epi32(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(static_cast<short>(0x87f0)), change,
                                     0x6a);
  }
};

inline void decode_e4m3(const char* codes, char* bf16) {
  _mm512_store_si512(bf16, Fp8Weights::load_pair(codes));
}

#include "tiers/fp8-decode-inl.hpp"

// Tile: the tier's BF16 tile over weights of either kind. One pass decodes in registers, more share a buffer; the
// numbers that are multiplied are the same.
template <template <class> class Tile>
struct Fp8Products {
  using Few = RowsOf<Tile<Fp8Weights>>;
  using Many = DecodedProducts<RowsOf<Tile<Bf16Weights>>>;
  static constexpr std::size_t kGroup = Few::kGroup;
  static constexpr float kUnit = kFp8Unit;

  static inline void run(const char* rows, std::size_t stride, std::size_t m, const char* codes, std::size_t inputs,
                         Prefetcher& prefetcher, float* products) {
    if (m > kGroup) return Many::run(rows, stride, m, codes, inputs, prefetcher, products);
    Few::passes(rows, stride, m, codes, 0, prefetcher, inputs, products);
  }
};
