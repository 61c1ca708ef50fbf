// AVX-512 with VNNI and BF16 (Cooper Lake 2020, Sapphire Rapids, Zen 4).
#include "tiers/avx512_bf16/avx512_bf16.hpp"

#include <immintrin.h>

#include "tiers/table.hpp"

namespace kt {
namespace {

// The order matters: conversions, vector type, shared numerics, loops, micro kernels.
#include "tiers/scalar-inl.hpp"
#include "tiers/avx512/vector-inl.hpp"
#include "tiers/elementwise-inl.hpp"
#include "tiers/gemm-inl.hpp"
#include "tiers/offset-inl.hpp"
#include "tiers/avx512/rows-inl.hpp"
#include "tiers/avx512_vnni/int8-inl.hpp"
#include "tiers/avx512_bf16/rows-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/avx512/bytes-inl.hpp"
#include "tiers/avx512_vnni/grouped-dots-inl.hpp"
#include "tiers/grouped-inl.hpp"
#include "tiers/fp8-inl.hpp"
#include "tiers/avx512/fp8-inl.hpp"

// vdpbf16ps adds a pair of products a lane; each sum is one chain over ascending K whatever the number of rows.
template <class Weights>
struct Bf16DotTile {
  using Sum = float;

  template <int kM>
  static inline void run(const char* rows, std::size_t stride, const char* block, std::size_t, Prefetcher& prefetcher,
                         std::size_t k_padded, Sum* sums) {
    __m512 sum[kM][2];
#pragma GCC unroll 12
    for (int r = 0; r < kM; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (std::size_t k = 0; k < k_padded; k += 32) {
      const char* tile = Weights::tile(block, k);
      for (std::size_t row = 0; row < 16; ++row) {
        prefetcher.tick();
        prefetcher.tick();
        const __m512bh left = (__m512bh)Weights::load_pair(tile + row * Weights::kPairBytes);
        const __m512bh right = (__m512bh)Weights::load_pair(tile + kTileBytes + row * Weights::kPairBytes);
        const char* x = rows + 2 * (k + 2 * row);
#pragma GCC unroll 12
        for (int r = 0; r < kM; ++r) {
          const __m512bh pair = (__m512bh)broadcast_word(x + r * stride);
          sum[r][0] = _mm512_dpbf16_ps(sum[r][0], pair, left);
          sum[r][1] = _mm512_dpbf16_ps(sum[r][1], pair, right);
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

using Int8Micro = RowsOf<Int8DotTile>;
using Bf16Micro = RowsOf<Bf16DotTile<Bf16Weights>>;
using Fp8 = Fp8Micro<Fp8Products<Bf16DotTile>, 2, Bf16Micro::kRows>;

constexpr TierTable kTable = {
    .int8 = {int8_row_bytes, encode_offset_row, gate_up<Int8Micro>, down<Int8Micro>},
    .bf16 = {bf16_row_bytes, encode_bf16_row, gate_up<Bf16Micro>, down<Bf16Micro>},
    .int4 = {grouped_row_bytes, encode_grouped_row<nibble_offset>, gate_up<Int4Micro>, down<Int4Micro>},
    .int8_grouped = {grouped_row_bytes, encode_grouped_row<int8_offset>, gate_up<GroupedInt8Micro>,
                     down<GroupedInt8Micro>},
    .fp8 = {bf16_row_bytes, encode_bf16_row, gate_up<Fp8>, down<Fp8>},
    .combine = combine,
    .rotate = rotate,
    .quantize = quantize,
};

}  // namespace

const TierTable* avx512_bf16_table() {
  return &kTable;
}

}  // namespace kt
