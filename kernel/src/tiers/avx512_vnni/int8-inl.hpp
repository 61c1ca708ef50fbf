// INT8 by vpdpbusd on 512 bits, as text for a tier's anonymous namespace.

struct Int8DotTile {
  using Sum = std::int32_t;

  template <int kM>
  static inline void run(const char* rows, std::size_t stride, const char* block, std::size_t block_bytes,
                         Prefetcher& prefetcher, std::size_t k_padded, Sum* sums) {
    const std::int32_t* channels = channel_sums(block + block_bytes);
    const __m512i minus_offset = _mm512_set1_epi32(-128);
    const __m512i start[2] = {_mm512_mullo_epi32(load_int(channels), minus_offset),
                              _mm512_mullo_epi32(load_int(channels + kPanelChannels), minus_offset)};
    __m512i sum[kM][2];
#pragma GCC unroll 12
    for (int r = 0; r < kM; ++r) {
      sum[r][0] = start[0];
      sum[r][1] = start[1];
    }
    for (std::size_t k = 0; k < k_padded; k += 64, block += 2 * kTileBytes) {
      for (std::size_t row = 0; row < 16; ++row) {
        prefetcher.tick();
        prefetcher.tick();
        const __m512i left = _mm512_load_si512(block + row * kRowBytes);
        const __m512i right = _mm512_load_si512(block + kTileBytes + row * kRowBytes);
        const char* x = rows + k + 4 * row;
#pragma GCC unroll 12
        for (int r = 0; r < kM; ++r) {
          const __m512i values = broadcast_word(x + r * stride);
          sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], values, left);
          sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], values, right);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kM; ++r) {
      _mm512_store_si512(sums + r * kBlockChannels, sum[r][0]);
      _mm512_store_si512(sums + r * kBlockChannels + kPanelChannels, sum[r][1]);
    }
  }
};
