// FP8 on AVX2, as text for a tier's anonymous namespace (after fp8-inl.hpp and bf16-inl.hpp): decoded in registers.
//
// Moved by 7 bits, an e4m3 is an fp16 of 2^-8 its value, subnormals included, and the F16C conversion takes those at
// full speed. The products' factor of 2^-8 goes back with the scale.
struct Fp8Weights : Fp8Codes {
  // 16 words with the code's sign in bit 15 and the rest in bits 13…7, to fp32.
  static inline void widen(__m256i words, __m256* weights) {
    const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbf80)));
    weights[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    weights[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
  // The even codes, as signed bytes, times 128 and the odd ones times 0: one instruction for two shifts.
  static inline void even(const char* pair, __m256* weights) {
    widen(_mm256_maddubs_epi16(_mm256_set1_epi16(128), _mm256_load_si256(reinterpret_cast<const __m256i*>(pair))),
          weights);
  }
  static inline void odd(const char* pair, __m256* weights) {
    widen(_mm256_srai_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(pair)), 1), weights);
  }
};

// Decoding again for every 6 rows costs less than a buffer would: the shuffles run beside the multiplications.
struct Fp8Products {
  using Micro = Bf16MicroOf<Fp8Weights>;
  static constexpr std::size_t kGroup = Micro::kGroup;
  static constexpr float kUnit = 256.0f;

  static inline void run(const char* rows, std::size_t stride, std::size_t m, const char* codes, std::size_t inputs,
                         Prefetcher& prefetcher, float* products) {
    Micro::passes(rows, stride, m, codes, 0, prefetcher, inputs, products);
  }
};

using Fp8 = Fp8Micro<Fp8Products, 4, Bf16Micro::kRows>;
