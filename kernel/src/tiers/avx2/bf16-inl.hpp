// BF16 micro kernels of the AVX2 family: rows are bf16 values kept as fp32, weights are widened in registers.
//
// Each sum is one FMA chain over ascending K whatever the number of rows, so a token's bits do not depend on its batch.

std::size_t bf16_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return 4 * k_padded;
}

void encode_bf16_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits&, void* row,
                     float*, float*) {
  float* out = static_cast<float*>(row);
  load_row(x, dtype, k, k_padded, out);
  for (std::size_t i = 0; i < k_padded; i += kWidth) {
    store(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(load(out + i)), 16)));
  }
}

// sum += a·b, fused. As an instruction rather than an intrinsic: GCC else overwrites operands it needs again and spills
// sums.
inline void accumulate(__m256& sum, __m256 a, __m256 b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// Weights as they lie. even() and odd() give the first and the second of a pair of inputs for 16 channels.
struct Bf16Weights {
  static constexpr std::size_t kPairBytes = kRowBytes;
  static inline const char* tile(const char* block, std::size_t k) { return block + k / 32 * 2 * kTileBytes; }

  static inline void even(const char* pair, __m256* weights) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m256i raw = _mm256_load_si256(reinterpret_cast<const __m256i*>(pair + 32 * c));
      weights[c] = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    }
  }
  static inline void odd(const char* pair, __m256* weights) {
    const __m256 high_half = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)));
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      weights[c] = _mm256_and_ps(high_half, _mm256_load_ps(reinterpret_cast<const float*>(pair + 32 * c)));
    }
  }
};

template <class Weights>
struct Bf16MicroOf {
  using Sum = float;
  // 6 rows x 2 registers of channels = 12 sums; 2 weights, 1 broadcast and the mask fill the 16 registers.
  static constexpr std::size_t kGroup = 6;
  // Up to here all 32 channels are in one pass: 8 sums.
  static constexpr int kInOrder = 2;
  // Rows that pass over a block together, so that prefetching the next one is spread over all their work.
  static constexpr std::size_t kRows = 60;

  // kRegs (2 or 4) registers of 8 channels, starting at channel 8·first (0 or 16) of the block.
  template <int kM, int kRegs>
  static inline void tile(const float* x, std::size_t stride, const char* block, Prefetcher& prefetcher,
                          std::size_t first, std::size_t k_padded, float* sums) {
    __m256 sum[kM][kRegs];
#pragma GCC unroll 6
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kRegs; ++c) sum[r][c] = _mm256_setzero_ps();
    }
    for (std::size_t k = 0; k < k_padded; k += 32) {
      const char* w = Weights::tile(block, k) + first / 2 * kTileBytes;
      for (std::size_t row = 0; row < 16; ++row) {
        const char* pair = w + row * Weights::kPairBytes;
        const float* xk = x + k + 2 * row;
        __m256 even[kRegs], odd[kRegs];
#pragma GCC unroll 2
        for (int c = 0; c < kRegs; c += 2) {
          Weights::even(pair + c / 2 * kTileBytes, even + c);
          prefetcher.tick();  // one for each panel row
        }
#pragma GCC unroll 6
        for (int r = 0; r < kM; ++r) {
          const __m256 value = _mm256_broadcast_ss(xk + r * stride);
#pragma GCC unroll 4
          for (int c = 0; c < kRegs; ++c) accumulate(sum[r][c], value, even[c]);
        }
#pragma GCC unroll 2
        for (int c = 0; c < kRegs; c += 2) Weights::odd(pair + c / 2 * kTileBytes, odd + c);
#pragma GCC unroll 6
        for (int r = 0; r < kM; ++r) {
          const __m256 value = _mm256_broadcast_ss(xk + r * stride + 1);
#pragma GCC unroll 4
          for (int c = 0; c < kRegs; ++c) accumulate(sum[r][c], value, odd[c]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kRegs; ++c) _mm256_store_ps(sums + r * kBlockChannels + 8 * (first + c), sum[r][c]);
    }
  }

  template <int kM>
  static inline void panels(const float* x, std::size_t stride, const char* block, Prefetcher& prefetcher,
                            std::size_t k_padded, float* sums) {
    if constexpr (kM <= kInOrder) {
      tile<kM, 4>(x, stride, block, prefetcher, 0, k_padded, sums);
    } else {
      tile<kM, 2>(x, stride, block, prefetcher, 0, k_padded, sums);
      tile<kM, 2>(x, stride, block, prefetcher, 2, k_padded, sums);
    }
  }

  static void run(const char* rows, std::size_t row_stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    Prefetcher prefetcher(block + prefetch_ahead(m <= kInOrder, block_bytes), (m + kGroup - 1) / kGroup);
    passes(rows, row_stride, m, block, block_bytes, prefetcher, k_padded, sums);
  }

  static inline void passes(const char* rows, std::size_t row_stride, std::size_t m, const char* block, std::size_t,
                            Prefetcher& prefetcher, std::size_t k_padded, Sum* sums) {
    const float* x = reinterpret_cast<const float*>(rows);
    const std::size_t stride = row_stride / sizeof(float);
    for (; m >= kGroup; m -= kGroup, x += kGroup * stride, sums += kGroup * kBlockChannels) {
      panels<kGroup>(x, stride, block, prefetcher, k_padded, sums);
    }
    switch (m) {
      case 1:
        return panels<1>(x, stride, block, prefetcher, k_padded, sums);
      case 2:
        return panels<2>(x, stride, block, prefetcher, k_padded, sums);
      case 3:
        return panels<3>(x, stride, block, prefetcher, k_padded, sums);
      case 4:
        return panels<4>(x, stride, block, prefetcher, k_padded, sums);
      case 5:
        return panels<5>(x, stride, block, prefetcher, k_padded, sums);
    }
  }
};

using Bf16Micro = Bf16MicroOf<Bf16Weights>;
