// AVX-512 F, BW, DQ, VL (Skylake-X 2017): no 8-bit dot product, so INT8 multiplies in 16 bits.
#include "tiers/avx512/avx512.hpp"

#include <immintrin.h>

#include "tiers/table.hpp"

namespace kt {
namespace {

// The order matters: conversions, vector type, shared numerics, loops, micro kernels.
#include "tiers/scalar-inl.hpp"
#include "tiers/avx512/vector-inl.hpp"
#include "tiers/elementwise-inl.hpp"
#include "tiers/gemm-inl.hpp"
#include "tiers/avx512/rows-inl.hpp"
#include "tiers/avx512/bf16-inl.hpp"
#include "tiers/fp8-inl.hpp"
#include "tiers/avx512/fp8-inl.hpp"
#include "tiers/avx2/widen-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/avx512/bytes-inl.hpp"
#include "tiers/avx512/grouped-dots-inl.hpp"
#include "tiers/grouped-inl.hpp"

std::size_t int8_wide_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return 2 * k_padded;
}

void encode_int8_wide_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits& traits,
                          void* row, float* scale, float* work) {
  char* narrow = static_cast<char*>(row) + k_padded;
  encode_int8_row(x, dtype, k, k_padded, traits, narrow, scale, work);
  widen_row(narrow, k_padded, static_cast<char*>(row));
}

struct Int8WideTile {
  using Sum = std::int32_t;

  template <int kM>
  static inline void run(const char* rows, std::size_t stride, const char* block, std::size_t, Prefetcher& prefetcher,
                         std::size_t k_padded, Sum* sums) {
    __m512i sum[kM][2];
#pragma GCC unroll 12
    for (int r = 0; r < kM; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (std::size_t k = 0; k < k_padded; k += 64, block += 2 * kTileBytes) {
      for (std::size_t row = 0; row < 16; ++row) {
        prefetcher.tick();
        prefetcher.tick();
        const __m512i left = _mm512_load_si512(block + row * kRowBytes);
        const __m512i right = _mm512_load_si512(block + kTileBytes + row * kRowBytes);
        const __m512i even[2] = {_mm512_srai_epi16(_mm512_slli_epi16(left, 8), 8),
                                 _mm512_srai_epi16(_mm512_slli_epi16(right, 8), 8)};
        const __m512i odd[2] = {_mm512_srai_epi16(left, 8), _mm512_srai_epi16(right, 8)};
        const char* x = rows + 2 * (k + 4 * row);
#pragma GCC unroll 12
        for (int r = 0; r < kM; ++r) {
          const __m512i first = broadcast_word(x + r * stride), second = broadcast_word(x + r * stride + 4);
#pragma GCC unroll 2
          for (int panel = 0; panel < 2; ++panel) {
            sum[r][panel] = _mm512_add_epi32(sum[r][panel], _mm512_madd_epi16(first, even[panel]));
            sum[r][panel] = _mm512_add_epi32(sum[r][panel], _mm512_madd_epi16(second, odd[panel]));
          }
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

using Int8Micro = RowsOf<Int8WideTile>;
using Bf16Micro = RowsOf<Bf16WideTile<Bf16Weights>>;
using Fp8 = Fp8Micro<Fp8Products<Bf16WideTile>, 4, Bf16Micro::kRows>;

constexpr TierTable kTable = {
    .int8 = {int8_wide_row_bytes, encode_int8_wide_row, gate_up<Int8Micro>, down<Int8Micro>},
    .bf16 = {bf16_wide_row_bytes, encode_bf16_wide_row, gate_up<Bf16Micro>, down<Bf16Micro>},
    .int4 = {grouped_row_bytes, encode_grouped_row<nibble_offset>, gate_up<Int4Micro>, down<Int4Micro>},
    .int8_grouped = {grouped_row_bytes, encode_grouped_row<no_offset>, gate_up<GroupedInt8Micro>,
                     down<GroupedInt8Micro>},
    .fp8 = {bf16_wide_row_bytes, encode_bf16_wide_row, gate_up<Fp8>, down<Fp8>},
    .combine = combine,
    .rotate = rotate,
    .quantize = quantize,
};

}  // namespace

const TierTable* avx512_table() {
  return &kTable;
}

}  // namespace kt
