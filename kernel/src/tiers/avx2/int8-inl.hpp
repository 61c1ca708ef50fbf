// INT8 micro kernels of AVX2 without VNNI. Two exact ways to the same integers:
//
// few rows   |w| (u8) times x with w's sign (s8): vpmaddubsw adds two products of at most 127·127, which fits 16 bits.
// many rows  weights widened to 16 bits once per panel and K chunk, then vpmaddwd: one instruction less a product than
// the signs cost.
//
// A row holds its 8-bit values and, behind them, the same widened (widen-inl.hpp).

std::size_t int8_wide_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return 3 * k_padded;
}

void encode_int8_wide_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits& traits,
                          void* row, float* scale, float* work) {
  encode_int8_row(x, dtype, k, k_padded, traits, row, scale, work);
  widen_row(static_cast<const char*>(row), k_padded, static_cast<char*>(row) + k_padded);
}

inline __m256i broadcast_word(const char* p) {
  std::int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

struct Int8Signs {
  // kM rows x kRegs registers of 8 channels, starting at channel 8·first of the block.
  template <int kM, int kRegs>
  static inline void tile(const char* rows, std::size_t stride, const char* block, Prefetcher& prefetcher,
                          std::size_t first, std::size_t k_padded, std::int32_t* sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[kM][kRegs];
#pragma GCC unroll 4
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kRegs; ++c) sum[r][c] = _mm256_setzero_si256();
    }
    const char* tile = block + first / 2 * kTileBytes + first % 2 * 32;
    for (std::size_t k = 0; k < k_padded; k += 64, tile += 2 * kTileBytes) {
      for (std::size_t row = 0; row < 16; ++row) {
        __m256i x[kM];
#pragma GCC unroll 4
        for (int r = 0; r < kM; ++r) x[r] = broadcast_word(rows + r * stride + k + 4 * row);
#pragma GCC unroll 4
        for (int c = 0; c < kRegs; ++c) {
          const __m256i w = _mm256_load_si256(
              reinterpret_cast<const __m256i*>(tile + row * kRowBytes + c / 2 * kTileBytes + c % 2 * 32));
          const __m256i magnitude = _mm256_abs_epi8(w);
          if (c % 2 == 0) prefetcher.tick();  // one for each panel row, that is for each cache line
#pragma GCC unroll 4
          for (int r = 0; r < kM; ++r) {
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x[r], w));
            sum[r][c] = _mm256_add_epi32(sum[r][c], _mm256_madd_epi16(pairs, ones));
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kRegs; ++c) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(sums + r * kBlockChannels + 8 * (first + c)), sum[r][c]);
      }
    }
  }

  static inline void run(const char* rows, std::size_t stride, std::size_t m, const char* block,
                         std::size_t block_bytes, std::size_t k_padded, std::int32_t* sums) {
    // Up to 2 rows take both panels in one pass.
    Prefetcher prefetcher(block + prefetch_ahead(m <= 2, block_bytes), (m + 3) / 4);
    while (m >= 4) {
      tile<4, 2>(rows, stride, block, prefetcher, 0, k_padded, sums);
      tile<4, 2>(rows, stride, block, prefetcher, 2, k_padded, sums);
      m -= 4, rows += 4 * stride, sums += 4 * kBlockChannels;
    }
    if (m == 3) {
      tile<3, 2>(rows, stride, block, prefetcher, 0, k_padded, sums);
      tile<3, 2>(rows, stride, block, prefetcher, 2, k_padded, sums);
    } else if (m == 2) {
      tile<2, 4>(rows, stride, block, prefetcher, 0, k_padded, sums);
    } else if (m == 1) {
      tile<1, 4>(rows, stride, block, prefetcher, 0, k_padded, sums);
    }
  }
};

// sum += pairs·w, 16-bit products. As instructions: GCC else moves the loads of later rows up and spills sums.
inline void accumulate(__m256i& sum, __m256i pairs, __m256i w) {
  __m256i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(pairs), "x"(w));
}

struct Int8Wide {
  // K inputs widened at a time: 16 channels x 512 x 2 bytes = 16 KiB, half of the smallest L1, beside 6 rows x 1 KiB.
  static constexpr std::size_t kChunk = 512;
  static constexpr std::size_t kChunkRows = kChunk / 4;  // panel rows of 64 bytes; each becomes 128

  // `count` panel rows from panel row `row` on.
  static inline void widen(const char* block, std::size_t panel, std::size_t row, std::size_t count, char* wide) {
    for (std::size_t i = 0; i < count; ++i) {
      const char* p = block + (row + i) / 16 * 2 * kTileBytes + panel * kTileBytes + (row + i) % 16 * kRowBytes;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
        _mm256_store_si256(reinterpret_cast<__m256i*>(wide + 128 * i + 32 * half),
                           _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
        _mm256_store_si256(reinterpret_cast<__m256i*>(wide + 128 * i + 64 + 32 * half), _mm256_srai_epi16(w, 8));
      }
    }
  }

  // 6 rows x 16 channels = 12 sums; two weights, a broadcast and a product fill the 16 registers.
  template <int kM>
  static inline void tile(const char* x, std::size_t stride, const char* wide, std::size_t words,
                          Prefetcher& prefetcher, std::int32_t* sums) {
    __m256i sum[kM][2];
#pragma GCC unroll 6
    for (int r = 0; r < kM; ++r) {
      sum[r][0] = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + r * kBlockChannels));
      sum[r][1] = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + r * kBlockChannels + 8));
    }
    for (std::size_t i = 0; i < words;
         i += 2) {  // two words a round: the loop's own instructions compete for the same ports
      prefetcher.tick();
#pragma GCC unroll 2
      for (std::size_t j = i; j < i + 2; ++j) {
        const __m256i w0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(wide + 64 * j));
        const __m256i w1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(wide + 64 * j + 32));
#pragma GCC unroll 6
        for (int r = 0; r < kM; ++r) {
          const __m256i pair = broadcast_word(x + r * stride + 4 * j);
          accumulate(sum[r][0], pair, w0);
          accumulate(sum[r][1], pair, w1);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kM; ++r) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + r * kBlockChannels), sum[r][0]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + r * kBlockChannels + 8), sum[r][1]);
    }
  }

  static inline void rest(const char* x, std::size_t stride, std::size_t m, const char* wide, std::size_t words,
                          Prefetcher& prefetcher, std::int32_t* sums) {
    switch (m) {
      case 1:
        return tile<1>(x, stride, wide, words, prefetcher, sums);
      case 2:
        return tile<2>(x, stride, wide, words, prefetcher, sums);
      case 3:
        return tile<3>(x, stride, wide, words, prefetcher, sums);
      case 4:
        return tile<4>(x, stride, wide, words, prefetcher, sums);
      case 5:
        return tile<5>(x, stride, wide, words, prefetcher, sums);
    }
  }

  static inline void run(const char* rows, std::size_t stride, std::size_t m, const char* block,
                         std::size_t block_bytes, std::size_t k_padded, std::int32_t* sums) {
    alignas(64) char wide[kChunkRows * 128];
    for (std::size_t i = 0; i < m * kBlockChannels; i += kWidth)
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + i), zero_int());
    // A panel row is one line of weights and two words of a row's inputs: one round of tile().
    Prefetcher prefetcher(block + block_bytes, (m + 5) / 6);
    for (std::size_t panel = 0; panel < 2; ++panel) {
      for (std::size_t k = 0; k < k_padded; k += kChunk) {
        const std::size_t inputs = k_padded - k < kChunk ? k_padded - k : kChunk;
        widen(block, panel, k / 4, inputs / 4, wide);
        const char* x = rows + k_padded + 2 * k;
        std::int32_t* out = sums + panel * kPanelChannels;
        std::size_t r = 0;
        for (; r + 6 <= m; r += 6)
          tile<6>(x + r * stride, stride, wide, inputs / 2, prefetcher, out + r * kBlockChannels);
        rest(x + r * stride, stride, m - r, wide, inputs / 2, prefetcher, out + r * kBlockChannels);
      }
    }
  }
};

struct Int8Micro {
  using Sum = std::int32_t;
  // Rows that share one widening of the weights; their sums (8 KiB) stay in L1.
  static constexpr std::size_t kRows = 60;
  // From this many rows the saved sign operations pay for the widening. Both ways give the same integers.
  static constexpr std::size_t kWideFrom = 6;

  static void run(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    if (m >= kWideFrom) {
      Int8Wide::run(rows, stride, m, block, block_bytes, k_padded, sums);
    } else {
      Int8Signs::run(rows, stride, m, block, block_bytes, k_padded, sums);
    }
  }
};
