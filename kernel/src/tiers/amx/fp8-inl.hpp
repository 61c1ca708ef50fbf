// FP8 on AMX, as text for a tier's anonymous namespace (after avx512/fp8-inl.hpp, bf16-inl.hpp and tiles-inl.hpp).
// Additions for few and for many rows are in the same order, that of BF16's.

struct Fp8LikeTiles {
  using Micro = Bf16LikeTiles<Fp8Weights>;
  static constexpr std::size_t kGroup = Micro::kRows;
  static constexpr float kUnit = kFp8Unit;

  static inline void run(const char* rows, std::size_t stride, std::size_t m, const char* codes, std::size_t inputs,
                         Prefetcher& prefetcher, float* products) {
    Micro::passes(rows, stride, m, codes, 0, prefetcher, inputs, products);
  }
};

using Fp8FewRows = Fp8Micro<Fp8LikeTiles, 2, Fp8LikeTiles::kGroup>;

// Many rows: decoded weights as BF16 tiles.

struct Fp8Tiles {
  using Sum = float;
  // Rows that share one decoding, which takes as long as the products of about 32 rows; their sums (32 KiB) stay in L2.
  static constexpr std::size_t kRows = 256;

  static void run(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    alignas(64) char weights[kBlockChannels * kFp8Inputs * 2];
    alignas(64) float products[kBlockChannels * kBlockChannels];
    const RowCut cut(m);
    // A step takes two tiles of decoded weights, 16 lines of codes.
    Prefetcher prefetcher(block + block_bytes, cut.pairs);
    configure_tiles(cut.rows);
    for (std::size_t k = 0; k < k_padded; k += kFp8Inputs) {
      const std::size_t inputs = k_padded - k < kFp8Inputs ? k_padded - k : kFp8Inputs;
      decode_fp8(Fp8Codes::tile(block, k), inputs, weights);
      asm volatile("" : : "r"(weights) : "memory");  // load_tiles does not say that it reads them
      const float* scales = fp8_panel_scales(block, k_padded, k);
      const F left = set1(scales[0] * kFp8Unit), right = set1(scales[1] * kFp8Unit);
      for (std::size_t pair = 0; pair < cut.pairs; ++pair) {
        const char* upper = rows + cut.first(2 * pair) * stride + 2 * k;
        const char* lower = rows + cut.first(2 * pair + 1) * stride + 2 * k;
        zero_sums();
        for (std::size_t d = 0; d < inputs / Bf16Product::kDepth; ++d) {
          load_tiles(upper + d * kRowBytes, lower + d * kRowBytes, stride, weights + d * 2 * kTileBytes);
          Bf16Product::multiply();
          for (std::size_t i = 0; i < kTileBytes / 64; ++i) prefetcher.tick();
        }
        store_sums(products, cut.rows);
        for (std::size_t tile = 2 * pair; tile < 2 * pair + 2; ++tile) {
          // The last tiles may overlap: a row is added once, from the first tile that has it.
          for (std::size_t row = tile * cut.rows; row < tile * cut.rows + cut.rows && row < m; ++row) {
            const std::size_t at = (tile - 2 * pair) * cut.rows + (row - cut.first(tile));
            add_scaled(products + at * kBlockChannels, left, right, k == 0, sums + row * kBlockChannels);
          }
        }
      }
    }
    release_tiles();
    scale_channels(block, k_padded, m, sums);
  }
};
