// AVX-VNNI: 256-bit vpdpbusd on CPUs without AVX-512 (Alder Lake 2021, Zen 5). BF16 as on AVX2.
#include "tiers/avx_vnni/avx_vnni.hpp"

#include <immintrin.h>

#include "tiers/table.hpp"

namespace kt {
namespace {

// The order matters: conversions, vector type, shared numerics, loops, micro kernels.
#include "tiers/scalar-inl.hpp"
#include "tiers/avx2/vector-inl.hpp"
#include "tiers/elementwise-inl.hpp"
#include "tiers/gemm-inl.hpp"
#include "tiers/offset-inl.hpp"
#include "tiers/avx2/bf16-inl.hpp"
#include "tiers/fp8-inl.hpp"
#include "tiers/avx2/fp8-inl.hpp"

// sum += four u8·s8 products a lane. As an instruction: GCC else moves the loads of later rows up and spills sums.
inline void accumulate(__m256i& sum, __m256i x, __m256i w) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
}

struct Int8Micro {
  using Sum = std::int32_t;
  // 6 rows x 2 registers of channels = 12 sums; two weights and a broadcast leave one register free.
  static constexpr std::size_t kGroup = 6;
  // Up to here all 32 channels are in one pass: 8 sums.
  static constexpr int kInOrder = 2;
  // Rows that pass over a block together, so that prefetching the next one is spread over all their work.
  static constexpr std::size_t kRows = 60;

  // kM rows x kRegs registers of 8 channels, starting at channel 8·first of the block.
  template <int kM, int kRegs>
  static inline void tile(const char* x, std::size_t stride, const char* block, std::size_t block_bytes,
                          Prefetcher& prefetcher, std::size_t first, std::size_t k_padded, Sum* sums) {
    const __m256i minus_offset = _mm256_set1_epi32(-128);
    __m256i sum[kM][kRegs];
#pragma GCC unroll 4
    for (int c = 0; c < kRegs; ++c) {
      const __m256i start =
          _mm256_mullo_epi32(load_int(channel_sums(block + block_bytes) + 8 * (first + c)), minus_offset);
#pragma GCC unroll 6
      for (int r = 0; r < kM; ++r) sum[r][c] = start;
    }
    const char* tile = block + first / 2 * kTileBytes + first % 2 * 32;
    for (std::size_t k = 0; k < k_padded; k += 64, tile += 2 * kTileBytes) {
      for (std::size_t row = 0; row < 16; ++row) {
        __m256i w[kRegs];
#pragma GCC unroll 4
        for (int c = 0; c < kRegs; ++c) {
          w[c] = _mm256_load_si256(
              reinterpret_cast<const __m256i*>(tile + row * kRowBytes + c / 2 * kTileBytes + c % 2 * 32));
          if (c % 2 == 0) prefetcher.tick();  // one for each panel row, that is for each cache line
        }
#pragma GCC unroll 6
        for (int r = 0; r < kM; ++r) {
          std::int32_t quad;
          __builtin_memcpy(&quad, x + r * stride + k + 4 * row, 4);
          const __m256i values = _mm256_set1_epi32(quad);
#pragma GCC unroll 4
          for (int c = 0; c < kRegs; ++c) accumulate(sum[r][c], values, w[c]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kRegs; ++c) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(sums + r * kBlockChannels + 8 * (first + c)), sum[r][c]);
      }
    }
  }

  template <int kM>
  static inline void panels(const char* x, std::size_t stride, const char* block, std::size_t block_bytes,
                            Prefetcher& prefetcher, std::size_t k_padded, Sum* sums) {
    if constexpr (kM <= kInOrder) {
      tile<kM, 4>(x, stride, block, block_bytes, prefetcher, 0, k_padded, sums);
    } else {
      tile<kM, 2>(x, stride, block, block_bytes, prefetcher, 0, k_padded, sums);
      tile<kM, 2>(x, stride, block, block_bytes, prefetcher, 2, k_padded, sums);
    }
  }

  static void run(const char* rows, std::size_t stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    Prefetcher prefetcher(block + prefetch_ahead(m <= kInOrder, block_bytes), (m + kGroup - 1) / kGroup);
    for (; m >= kGroup; m -= kGroup, rows += kGroup * stride, sums += kGroup * kBlockChannels) {
      panels<kGroup>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
    }
    switch (m) {
      case 1:
        return panels<1>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
      case 2:
        return panels<2>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
      case 3:
        return panels<3>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
      case 4:
        return panels<4>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
      case 5:
        return panels<5>(rows, stride, block, block_bytes, prefetcher, k_padded, sums);
    }
  }
};

#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/avx2/bytes-inl.hpp"
#include "tiers/avx_vnni/grouped-dots-inl.hpp"
#include "tiers/grouped-inl.hpp"

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

const TierTable* avx_vnni_table() {
  return &kTable;
}

}  // namespace kt
