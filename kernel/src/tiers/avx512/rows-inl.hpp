// The loop over rows that the AVX-512 micro kernels share, as text for a tier's anonymous namespace (after
// gemm-inl.hpp).
//
// A Tile type has: Sum, and template <int kM> static void run(const char* rows, std::size_t stride, const char* block,
// std::size_t block_bytes, Prefetcher&, std::size_t k_padded, Sum* sums), both panels at once.

template <class Tile>
struct RowsOf {
  using Sum = typename Tile::Sum;
  // 12 rows x 2 panels = 24 sums of the 32 registers; weights, a broadcast and temporaries take the rest.
  static constexpr std::size_t kGroup = 12;
  // Rows that pass over a block together, so that prefetching the next one is spread over all their work.
  static constexpr std::size_t kRows = 60;

  template <int kM>
  static inline void rest(const char* rows, std::size_t stride, std::size_t m, const char* block,
                          std::size_t block_bytes, Prefetcher& prefetcher, std::size_t k_padded, Sum* sums) {
    if (m == kM) {
      Tile::template run<kM>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
    } else if constexpr (kM > 1) {
      rest<kM - 1>(rows, stride, m, block, block_bytes, prefetcher, k_padded, sums);
    }
  }

  static void run(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    // One line a panel row, two panel rows a step: a prefetch for both every so many steps.
    Prefetcher prefetcher(block + prefetch_ahead(m <= kGroup, block_bytes), (m + kGroup - 1) / kGroup);
    passes(rows, stride, m, block, block_bytes, prefetcher, k_padded, sums);
  }

  static inline void passes(const char* rows, std::size_t stride, std::size_t m, const char* block,
                            std::size_t block_bytes, Prefetcher& prefetcher, std::size_t k_padded, Sum* sums) {
    for (; m >= kGroup; m -= kGroup, rows += kGroup * stride, sums += kGroup * kBlockChannels) {
      Tile::template run<kGroup>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
    }
    rest<kGroup - 1>(rows, stride, m, block, block_bytes, prefetcher, k_padded, sums);
  }
};

// BF16 weights as they lie: 16 channels x a pair of inputs.
struct Bf16Weights {
  static constexpr std::size_t kPairBytes = kRowBytes;
  static inline const char* tile(const char* block, std::size_t k) { return block + k / 32 * 2 * kTileBytes; }
  static inline __m512i load_pair(const char* pair) { return _mm512_load_si512(pair); }
};

inline __m512i broadcast_word(const char* p) {
  std::int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
