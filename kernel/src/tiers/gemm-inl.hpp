// The loops around a tier's micro kernels, as text for its anonymous namespace (see elementwise-inl.hpp).
//
// A micro kernel type has: Sum (std::int32_t or float), kRows (most rows a call takes) and
//   static void run(const char* rows, std::size_t row_stride, std::size_t m, const char* block,
//                   std::size_t block_bytes, std::size_t k_padded, Sum* sums)
// which leaves m x 32 sums, m <= kRows; that of grouped weights takes a `const MatrixTraits&` first. A row's sums must
// not depend on m or on its neighbours. While it computes it prefetches what lies prefetch_ahead() behind, so that
// memory and arithmetic overlap (past the last block that is a harmless hint).

// Bytes from the weights in use to those to prefetch. Rows that take one pass over a block, in the order of its lines,
// are done as fast as memory gives them: near ahead, as the loop that measures bandwidth reads. One core of a Zen 5
// read 93 to 96 % of what that loop did with 6 to 12 KiB, 86 % with a block (26 to 130 KiB) ahead (INT8 and BF16 on
// AVX-512); what is prefetched behind the end of a thread's share is little, too. More passes leave time to fetch the
// whole next block.
constexpr std::size_t kNear = 8192;

inline std::size_t prefetch_ahead(bool one_pass, std::size_t block_bytes) {
  return one_pass ? kNear : block_bytes;
}

// Hands out a range of cache lines evenly over a computation: a burst would fill the core's miss buffers and stall it.
class Prefetcher {
 public:
  // Lines from `first` on, one every `every` ticks.
  Prefetcher(const char* first, std::size_t every) : next_(first), every_(every), left_(every) {}
  inline void tick() {
    if (--left_ == 0) {
      __builtin_prefetch(next_, 0, 2);
      next_ += 64;
      left_ = every_;
    }
  }

 private:
  const char* next_;
  std::size_t every_;
  std::size_t left_;
};

// `sums` of one row -> 32 fp32 channel values: INT8 scales them, then biases are added. A block ends in its biases,
// then for INT8 its scales and channel sums.
inline void finish_row(const std::int32_t* sums, const GemmCall& call, const char* block, std::size_t row, float* out) {
  const char* trailer = block + call.block_bytes - kTrailerBytes;
  scale_sums(sums, reinterpret_cast<const float*>(trailer), call.row_scales[row], out);
  if (call.has_bias) add_biases(reinterpret_cast<const float*>(trailer - kBiasBytes), out);
}

inline void finish_row(const float* sums, const GemmCall& call, const char* block, std::size_t, float* out) {
  for (std::size_t i = 0; i < kBlockChannels; i += kWidth) store(out + i, load(sums + i));
  if (call.has_bias) add_biases(reinterpret_cast<const float*>(block + call.block_bytes - kBiasBytes), out);
}

// Output columns of one gate_up block.
inline std::size_t activated_channels(const Gate& gate) {
  return gate.gated ? kPanelChannels : kBlockChannels;
}

template <class Micro, class Epilogue>
inline void for_each_row(const GemmCall& call, const Epilogue& epilogue) {
  for (std::size_t b = 0; b < call.block_count; ++b) {
    const char* block = static_cast<const char*>(call.blocks) + b * call.block_bytes;
    for (std::size_t first = 0; first < call.m; first += Micro::kRows) {
      const std::size_t rows = call.m - first < Micro::kRows ? call.m - first : Micro::kRows;
      alignas(64) typename Micro::Sum sums[Micro::kRows * kBlockChannels];
      const char* x = static_cast<const char*>(call.rows) + first * call.row_stride;
      if constexpr (requires { Micro::run(*call.traits, x, 0, 0, block, 0, 0, sums); }) {
        Micro::run(*call.traits, x, call.row_stride, rows, block, call.block_bytes, call.k_padded, sums);
      } else {
        Micro::run(x, call.row_stride, rows, block, call.block_bytes, call.k_padded, sums);
      }
      for (std::size_t r = 0; r < rows; ++r) epilogue(sums + r * kBlockChannels, block, b, first + r);
    }
  }
}

template <class Micro>
void gate_up(const GemmCall& call, const Gate& gate) {
  for_each_row<Micro>(call, [&](const typename Micro::Sum* sums, const char* block, std::size_t b, std::size_t row) {
    alignas(64) float values[kBlockChannels];
    finish_row(sums, call, block, row, values);
    store_activated(values, gate, call.out + row * call.out_stride + b * activated_channels(gate));
  });
}

template <class Micro>
void down(const GemmCall& call) {
  for_each_row<Micro>(call, [&](const typename Micro::Sum* sums, const char* block, std::size_t b, std::size_t row) {
    finish_row(sums, call, block, row, call.out + row * call.out_stride + b * kBlockChannels);
  });
}
