// AMX tiles, int8 and bf16 (Sapphire Rapids 2023 and later); few rows and everything elementwise on AVX-512.
#include "tiers/amx/amx.hpp"

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
#include "tiers/amx/tiles-inl.hpp"
#include "tiers/amx/bf16-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/avx512/bytes-inl.hpp"
#include "tiers/avx512_vnni/grouped-dots-inl.hpp"
#include "tiers/grouped-inl.hpp"
#include "tiers/amx/grouped-inl.hpp"
#include "tiers/fp8-inl.hpp"
#include "tiers/avx512/fp8-inl.hpp"
#include "tiers/amx/fp8-inl.hpp"

// Rows of an expert from which tiles are used; below, configuring them and loading whole tiles of weights costs more
// than the products save. Measured on one core of a Xeon with AMX, K = 2048, weights in L2, vectors / tiles in GOP/s:
// INT8 314 / 337 at 3 rows, 496 / 452 at 4, 515 / 536 at 5, 592 / 1246 at 10; BF16 72 / 74 at 2, 98 / 130 at 4.
// Changing it changes no bit.
constexpr std::size_t kTileFrom = 4;

// The same for grouped weights, whose integers leave the tiles once a segment: INT4 286 / 192 GOP/s at 6 rows, 334 /
// 351 at 8, 402 / 564 at 32; INT8_GROUPED 293 / 223 at 6, 390 / 465 at 8, 391 / 660 at 32.
constexpr std::size_t kGroupedTileFrom = 8;

// A line more than the inputs: rows a power of two apart would crowd into a few sets of the caches.
std::size_t spread_int8_row_bytes(const MatrixTraits& traits, std::size_t k_padded) {
  return int8_row_bytes(traits, k_padded) + 64;
}
std::size_t spread_bf16_row_bytes(const MatrixTraits& traits, std::size_t k_padded) {
  return bf16_row_bytes(traits, k_padded) + 64;
}

void int8_gate_up(const GemmCall& call, const Gate& gate) {
  if (call.m >= kTileFrom) return gate_up_by_tiles<Int8Product>(call, gate);
  gate_up<RowsOf<Int8DotTile>>(call, gate);
}

void int8_down(const GemmCall& call) {
  if (call.m >= kTileFrom) return down_by_tiles<Int8Product>(call);
  down<RowsOf<Int8DotTile>>(call);
}

void bf16_gate_up(const GemmCall& call, const Gate& gate) {
  if (call.m >= kTileFrom) return gate_up_by_tiles<Bf16Product>(call, gate);
  gate_up<Bf16LikeTiles<Bf16Weights>>(call, gate);
}

void bf16_down(const GemmCall& call) {
  if (call.m >= kTileFrom) return down_by_tiles<Bf16Product>(call);
  down<Bf16LikeTiles<Bf16Weights>>(call);
}

void fp8_gate_up(const GemmCall& call, const Gate& gate) {
  if (call.m >= kTileFrom) return gate_up<Fp8Tiles>(call, gate);
  gate_up<Fp8FewRows>(call, gate);
}

void fp8_down(const GemmCall& call) {
  if (call.m >= kTileFrom) return down<Fp8Tiles>(call);
  down<Fp8FewRows>(call);
}

void int4_gate_up(const GemmCall& call, const Gate& gate) {
  if (call.m >= kGroupedTileFrom) return gate_up<Int4Tiles>(call, gate);
  gate_up<Int4Micro>(call, gate);
}

void int4_down(const GemmCall& call) {
  if (call.m >= kGroupedTileFrom) return down<Int4Tiles>(call);
  down<Int4Micro>(call);
}

void grouped_int8_gate_up(const GemmCall& call, const Gate& gate) {
  if (call.m >= kGroupedTileFrom) return gate_up<GroupedInt8Tiles>(call, gate);
  gate_up<GroupedInt8Micro>(call, gate);
}

void grouped_int8_down(const GemmCall& call) {
  if (call.m >= kGroupedTileFrom) return down<GroupedInt8Tiles>(call);
  down<GroupedInt8Micro>(call);
}

constexpr TierTable kTable = {
    .int8 = {spread_int8_row_bytes, encode_offset_row, int8_gate_up, int8_down},
    .bf16 = {spread_bf16_row_bytes, encode_bf16_row, bf16_gate_up, bf16_down},
    .int4 = {grouped_row_bytes, encode_grouped_row<nibble_offset>, int4_gate_up, int4_down},
    .int8_grouped = {grouped_row_bytes, encode_grouped_row<int8_offset>, grouped_int8_gate_up, grouped_int8_down},
    .fp8 = {spread_bf16_row_bytes, encode_bf16_row, fp8_gate_up, fp8_down},
    .combine = combine,
    .rotate = rotate,
    .quantize = quantize,
};

}  // namespace

const TierTable* amx_table() {
  return &kTable;
}

}  // namespace kt
