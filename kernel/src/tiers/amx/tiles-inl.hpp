// The tile path of AMX, as text for a tier's anonymous namespace (after gemm-inl.hpp).
//
// 2x2 blocking: two tiles of rows (tmm4, tmm5), the two panels of a block (tmm6, tmm7), four tiles of sums (tmm0…tmm3),
// so that each loaded tile is used twice: 4 products of 16 cycles hide 4 loads of 8.
//
// The compiler's tile intrinsics do not say which memory they touch; the instructions below do.

// The operand of ldtilecfg (Intel SDM, "TILE CONFIGURATION").
struct alignas(64) TileConfig {
  std::uint8_t palette;
  std::uint8_t start_row;
  std::uint8_t reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

// 0…3 sums and 4, 5 rows of activations, `row_bytes` each; 6, 7 weights, 4 inputs a row.
inline void configure_tiles(std::size_t rows, std::size_t row_bytes = kRowBytes) {
  TileConfig config = {};
  config.palette = 1;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = static_cast<std::uint16_t>(t == 4 || t == 5 ? row_bytes : kRowBytes);
    config.rows[t] = static_cast<std::uint8_t>(t < 6 ? rows : row_bytes / 4);
  }
  asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void release_tiles() {
  asm volatile("tilerelease");
}

inline void zero_sums() {
  asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : :);
}

// Loads two tiles of rows (from `upper` and `lower`, `stride` bytes a row) and the two tiles of weights at `weights`.
inline void load_tiles(const char* upper, const char* lower, std::size_t stride, const char* weights) {
  asm volatile(
      "tileloadd (%2,%4,1), %%tmm6\n\t"
      "tileloadd (%0,%3,1), %%tmm4\n\t"
      "tileloadd 1024(%2,%4,1), %%tmm7\n\t"
      "tileloadd (%1,%3,1), %%tmm5"
      :
      : "r"(upper), "r"(lower), "r"(weights), "r"(stride), "r"(kRowBytes));
}

// Sums of the two tiles of `rows` rows to 2·rows x 32 values.
inline void store_sums(void* sums, std::size_t rows) {
  char* upper = static_cast<char*>(sums);
  char* lower = upper + rows * kBlockChannels * 4;
  asm volatile(
      "tilestored %%tmm0, (%0,%2,1)\n\t"
      "tilestored %%tmm1, 64(%0,%2,1)\n\t"
      "tilestored %%tmm2, (%1,%2,1)\n\t"
      "tilestored %%tmm3, 64(%1,%2,1)"
      :
      : "r"(upper), "r"(lower), "r"(kBlockChannels * 4)
      : "memory");
}

struct Int8Product {
  using Sum = std::int32_t;
  static constexpr std::size_t kDepth = 64;  // inputs of one tile

  static inline void multiply() {  // u8 rows, s8 weights
    asm volatile(
        "tdpbusd %%tmm6, %%tmm4, %%tmm0\n\ttdpbusd %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbusd %%tmm6, %%tmm5, %%tmm2\n\ttdpbusd %%tmm7, %%tmm5, %%tmm3"
        :
        :);
  }

  // Takes the rows' offset of 128 back (see offset-inl.hpp).
  static inline void finish(std::int32_t* sums, const char* block_end) {
    const std::int32_t* channels = channel_sums(block_end);
    for (std::size_t i = 0; i < kBlockChannels; i += kWidth) {
      _mm512_store_si512(sums + i, _mm512_sub_epi32(load_int(sums + i), _mm512_slli_epi32(load_int(channels + i), 7)));
    }
  }
};

struct Bf16Product {
  using Sum = float;
  static constexpr std::size_t kDepth = 32;

  static inline void multiply() {
    asm volatile(
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3"
        :
        :);
  }

  static inline void finish(float*, const char*) {}
};

// How m rows are cut: 2·pairs tiles of `rows` rows each. The cut is even, so one configuration serves the whole call;
// the last tiles may overlap (a row computed twice gets the same bits), which wastes fewer rows than 16-row tiles plus
// a rest.
struct RowCut {
  explicit RowCut(std::size_t m) : m(m), pairs((m + 31) / 32), rows((m + 2 * pairs - 1) / (2 * pairs)) {}
  std::size_t first(std::size_t tile) const { return tile * rows + rows <= m ? tile * rows : m - rows; }

  std::size_t m;
  std::size_t pairs;
  std::size_t rows;
};

// Runs `epilogue(sums, block, block index, row)` for every row of every block. The epilogue of one pair of tiles runs
// between the tile products of the next pair: the tile unit and the vector units then work at the same time.
template <class Product, class Epilogue>
inline void for_each_row_by_tiles(const GemmCall& call, const Epilogue& epilogue) {
  using Sum = typename Product::Sum;
  const RowCut cut(call.m);
  const std::size_t depth = call.k_padded / Product::kDepth;
  alignas(64) Sum sums[2][kBlockChannels * kBlockChannels];
  // Lines of the next block to prefetch beside one step in K: a step takes two tiles of weights, 32 lines.
  const std::size_t lines = (2 * kTileBytes / 64 + cut.pairs - 1) / cut.pairs;

  struct Finished {
    const char* block = nullptr;
    std::size_t index = 0, pair = 0, next = 0, rows = 0;  // rows [next, rows) still wait for their epilogue
    Sum* sums = nullptr;
  } done;
  const auto finish_rows = [&](std::size_t count) {
    for (; count > 0 && done.next < done.rows; --count, ++done.next) {
      Sum* row_sums = done.sums + done.next * kBlockChannels;
      const std::size_t tile = 2 * done.pair + done.next / cut.rows;
      Product::finish(row_sums, done.block + call.block_bytes);
      epilogue(row_sums, done.block, done.index, cut.first(tile) + done.next % cut.rows);
    }
  };

  configure_tiles(cut.rows);
  std::size_t step = 0;
  for (std::size_t b = 0; b < call.block_count; ++b) {
    const char* block = static_cast<const char*>(call.blocks) + b * call.block_bytes;
    const char* ahead = block + call.block_bytes;
    for (std::size_t pair = 0; pair < cut.pairs; ++pair, ++step) {
      const char* upper = static_cast<const char*>(call.rows) + cut.first(2 * pair) * call.row_stride;
      const char* lower = static_cast<const char*>(call.rows) + cut.first(2 * pair + 1) * call.row_stride;
      const std::size_t share = (done.rows + depth - 1) / depth;
      zero_sums();
      for (std::size_t d = 0; d < depth; ++d) {
        load_tiles(upper + d * kRowBytes, lower + d * kRowBytes, call.row_stride, block + d * 2 * kTileBytes);
        Product::multiply();
        for (std::size_t i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        finish_rows(share);
      }
      store_sums(sums[step % 2], cut.rows);
      done = {block, b, pair, 0, 2 * cut.rows, sums[step % 2]};
    }
  }
  finish_rows(done.rows);
  release_tiles();
}

template <class Product>
void gate_up_by_tiles(const GemmCall& call, const Gate& gate) {
  for_each_row_by_tiles<Product>(
      call, [&](const typename Product::Sum* sums, const char* block, std::size_t b, std::size_t row) {
        alignas(64) float values[kBlockChannels];
        finish_row(sums, call, block, row, values);
        store_activated(values, gate, call.out + row * call.out_stride + b * activated_channels(gate));
      });
}

template <class Product>
void down_by_tiles(const GemmCall& call) {
  for_each_row_by_tiles<Product>(
      call, [&](const typename Product::Sum* sums, const char* block, std::size_t b, std::size_t row) {
        finish_row(sums, call, block, row, call.out + row * call.out_stride + b * kBlockChannels);
      });
}
