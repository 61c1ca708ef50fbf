// BF16 on AVX-512 without its bf16 instructions: rows are bf16 values kept as fp32, weights are widened in registers,
// and each sum is one FMA chain over ascending K whatever the number of rows.

std::size_t bf16_wide_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return 4 * k_padded;
}

void encode_bf16_wide_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits&,
                          void* row, float*, float*) {
  float* out = static_cast<float*>(row);
  load_row(x, dtype, k, k_padded, out);
  for (std::size_t i = 0; i < k_padded; i += kWidth) {
    store(out + i, _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(load(out + i)), 16)));
  }
}

template <class Weights>
struct Bf16WideTile {
  using Sum = float;

  template <int kM>
  static inline void run(const char* rows, std::size_t stride, const char* block, std::size_t, Prefetcher& prefetcher,
                         std::size_t k_padded, Sum* sums) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 sum[kM][2];
#pragma GCC unroll 12
    for (int r = 0; r < kM; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (std::size_t k = 0; k < k_padded; k += 32) {
      const char* tile = Weights::tile(block, k);
      for (std::size_t row = 0; row < 16; ++row) {
        prefetcher.tick();
        prefetcher.tick();
        const __m512i left = Weights::load_pair(tile + row * Weights::kPairBytes);
        const __m512i right = Weights::load_pair(tile + kTileBytes + row * Weights::kPairBytes);
        const __m512 even[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                                _mm512_castsi512_ps(_mm512_slli_epi32(right, 16))};
        const __m512 odd[2] = {_mm512_castsi512_ps(_mm512_and_si512(left, high_half)),
                               _mm512_castsi512_ps(_mm512_and_si512(right, high_half))};
        const char* x = rows + 4 * (k + 2 * row);
#pragma GCC unroll 12
        for (int r = 0; r < kM; ++r) {
          const __m512 first = _mm512_castsi512_ps(broadcast_word(x + r * stride));
          sum[r][0] = _mm512_fmadd_ps(first, even[0], sum[r][0]);
          sum[r][1] = _mm512_fmadd_ps(first, even[1], sum[r][1]);
          const __m512 second = _mm512_castsi512_ps(broadcast_word(x + r * stride + 4));
          sum[r][0] = _mm512_fmadd_ps(second, odd[0], sum[r][0]);
          sum[r][1] = _mm512_fmadd_ps(second, odd[1], sum[r][1]);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kM; ++r) {
      _mm512_store_ps(sums + r * kBlockChannels, sum[r][0]);
      _mm512_store_ps(sums + r * kBlockChannels + kPanelChannels, sum[r][1]);
    }
  }
};
