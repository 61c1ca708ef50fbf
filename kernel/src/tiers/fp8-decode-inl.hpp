// FP8 through a buffer of decoded weights, as text for a tier's anonymous namespace (after fp8-inl.hpp and the tier's
// decode_e4m3, which gives 1 / kFp8Unit of the codes' values): pays where many rows share the decoding.

// `inputs` (a multiple of 64) inputs of both panels, to the BF16 layout.
inline void decode_fp8(const char* codes, std::size_t inputs, char* bf16) {
  for (std::size_t k = 0; k < inputs; k += 32, bf16 += 2 * kTileBytes) {
    const char* tile = Fp8Codes::tile(codes, k);
    for (std::size_t panel = 0; panel < 2; ++panel) {
      for (std::size_t row = 0; row < 16; ++row) {
        decode_e4m3(tile + panel * kTileBytes + row * Fp8Codes::kPairBytes,
                    bf16 + panel * kTileBytes + row * kRowBytes);
      }
    }
  }
}

// Bf16: the tier's BF16 micro kernel.
template <class Bf16>
struct DecodedProducts {
  static constexpr std::size_t kGroup = Bf16::kGroup;
  static constexpr float kUnit = kFp8Unit;

  static inline void run(const char* rows, std::size_t stride, std::size_t m, const char* codes, std::size_t inputs,
                         Prefetcher& prefetcher, float* products) {
    alignas(64) char weights[kBlockChannels * kFp8Inputs * 2];  // 8 KiB: stays in L1
    decode_fp8(codes, inputs, weights);
    Bf16::passes(rows, stride, m, weights, 0, prefetcher, inputs, products);
  }
};
