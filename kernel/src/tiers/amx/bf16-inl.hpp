// BF16 for few rows on AMX, as text for a tier's anonymous namespace: the tile product's arithmetic on vectors.
//
// tdpbf16ps (Intel SDM) sums a tile's even and odd inputs in two fused chains from zero, adds the two, then adds that
// to the sum, subnormals taken as zero. Doing the same here makes a token's bits independent of how many others share
// its expert.

// Subnormals as zero, in and out, while alive.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }  // FTZ, DAZ
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

template <class Weights>
struct Bf16LikeTiles {
  using Sum = float;
  // 4 rows x 2 panels x (sum, even, odd) = 24 registers, 4 for weights, 2 for the row's inputs.
  static constexpr std::size_t kRows = 4;

  template <int kM>
  static inline void tile(const char* rows, std::size_t stride, const char* block, Prefetcher& prefetcher,
                          std::size_t k_padded, Sum* sums) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 sum[kM][2];
#pragma GCC unroll 4
    for (int r = 0; r < kM; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (std::size_t k = 0; k < k_padded; k += 32) {
      const char* weights = Weights::tile(block, k);
      __m512 even[kM][2], odd[kM][2];
#pragma GCC unroll 4
      for (int r = 0; r < kM; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = _mm512_setzero_ps();
      for (std::size_t row = 0; row < 16; ++row) {
        prefetcher.tick();
        prefetcher.tick();
        const __m512i left = Weights::load_pair(weights + row * Weights::kPairBytes);
        const __m512i right = Weights::load_pair(weights + kTileBytes + row * Weights::kPairBytes);
        const __m512 even_w[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                                  _mm512_castsi512_ps(_mm512_slli_epi32(right, 16))};
        const __m512 odd_w[2] = {_mm512_castsi512_ps(_mm512_and_si512(left, high_half)),
                                 _mm512_castsi512_ps(_mm512_and_si512(right, high_half))};
#pragma GCC unroll 4
        for (int r = 0; r < kM; ++r) {
          const __m512i pair = broadcast_word(rows + r * stride + 2 * (k + 2 * row));
          const __m512 even_x = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
          const __m512 odd_x = _mm512_castsi512_ps(_mm512_and_si512(pair, high_half));
#pragma GCC unroll 2
          for (int panel = 0; panel < 2; ++panel) {
            even[r][panel] = _mm512_fmadd_ps(even_x, even_w[panel], even[r][panel]);
            odd[r][panel] = _mm512_fmadd_ps(odd_x, odd_w[panel], odd[r][panel]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 2
        for (int panel = 0; panel < 2; ++panel) sum[r][panel] = add(sum[r][panel], add(even[r][panel], odd[r][panel]));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kM; ++r) {
      _mm512_store_ps(sums + r * kBlockChannels, sum[r][0]);
      _mm512_store_ps(sums + r * kBlockChannels + kPanelChannels, sum[r][1]);
    }
  }

  static void run(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    Prefetcher prefetcher(block + kNear, 1);
    passes(rows, stride, m, block, block_bytes, prefetcher, k_padded, sums);
  }

  static inline void passes(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t,
                            Prefetcher& prefetcher, std::size_t k_padded, Sum* sums) {
    const FlushSubnormals flush;
    switch (m) {
      case 1:
        return tile<1>(rows, stride, block, prefetcher, k_padded, sums);
      case 2:
        return tile<2>(rows, stride, block, prefetcher, k_padded, sums);
      case 3:
        return tile<3>(rows, stride, block, prefetcher, k_padded, sums);
      case 4:
        return tile<4>(rows, stride, block, prefetcher, k_padded, sums);
    }
  }
};
