// FP8 e4m3, as text for a tier's anonymous namespace.
//
// e4m3 is exact in bf16 and fp16, so the arithmetic is BF16's: the products of 128 inputs are added up from zero as the
// tier's BF16 kernel adds them; times the scale of their panel they are added in ascending order of the inputs, and at
// last the channel's scale is applied. A token's bits depend on its batch as little as BF16's do.
//
// A block is its codes, then the scales: one fp32 for each of 32 channels, then two for each 128 inputs, of the left
// and of the right panel. Either kind is all ones where the source has only the other. A panel row has 16 channels x
// inputs 0 and 1 in its first half, 16 channels x inputs 2 and 3 in the second: each half decodes to one panel row of
// BF16.

// Where the codes of 32 inputs from k on begin, and how many bytes a pair of inputs takes of one panel.
struct Fp8Codes {
  static constexpr std::size_t kPairBytes = kRowBytes / 2;
  static inline const char* tile(const char* block, std::size_t k) {
    return block + k / 64 * 2 * kTileBytes + k % 64 / 32 * (kTileBytes / 2);
  }
};

inline const char* fp8_scales(const char* block, std::size_t k_padded) {
  return block + kBlockChannels * k_padded;
}

// The panel scales of the 128 inputs from `k` on: left, right.
inline const float* fp8_panel_scales(const char* block, std::size_t k_padded, std::size_t k) {
  return reinterpret_cast<const float*>(fp8_scales(block, k_padded) + kFp8ChannelScaleBytes) + k / kFp8Inputs * 2;
}

// sums = products·scale for the first inputs, sums += products·scale after them; one row.
inline void add_scaled(const float* products, F left, F right, bool first, float* sums) {
  for (std::size_t i = 0; i < kBlockChannels; i += kWidth) {
    const F scaled = mul(load(products + i), i < kPanelChannels ? left : right);
    store(sums + i, first ? scaled : add(load(sums + i), scaled));
  }
}

inline void scale_channels(const char* block, std::size_t k_padded, std::size_t m, float* sums) {
  const float* scales = reinterpret_cast<const float*>(fp8_scales(block, k_padded));
  for (std::size_t i = 0; i < m * kBlockChannels; i += kWidth) {
    store(sums + i, mul(load(sums + i), load(scales + i % kBlockChannels)));
  }
}

// Products has: kGroup, the rows of one pass over the codes; kUnit, what its products are multiplied by to be those of
// e4m3; and static void run(const char* rows, std::size_t stride, std::size_t m, const char* codes, std::size_t inputs,
// Prefetcher&, float* products) for at most 128 inputs, which ticks for each line of bf16, that is twice for one of
// codes. A row takes kInputBytes an input.
template <class Products, std::size_t kInputBytes, std::size_t kMost>
struct Fp8Micro {
  using Sum = float;
  static constexpr std::size_t kRows = kMost;

  static void run(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    alignas(64) float products[kRows * kBlockChannels];
    const std::size_t passes = (m + Products::kGroup - 1) / Products::kGroup;
    Prefetcher prefetcher(block + prefetch_ahead(passes == 1, block_bytes), 2 * passes);
    for (std::size_t k = 0; k < k_padded; k += kFp8Inputs) {
      const std::size_t inputs = k_padded - k < kFp8Inputs ? k_padded - k : kFp8Inputs;
      Products::run(rows + k * kInputBytes, stride, m, Fp8Codes::tile(block, k), inputs, prefetcher, products);
      const float* scales = fp8_panel_scales(block, k_padded, k);
      const F left = set1(scales[0] * Products::kUnit), right = set1(scales[1] * Products::kUnit);
      for (std::size_t r = 0; r < m; ++r) {
        add_scaled(products + r * kBlockChannels, left, right, k == 0, sums + r * kBlockChannels);
      }
    }
    scale_channels(block, k_padded, m, sums);
  }
};
