// AVX-512 with VNNI (Cascade Lake 2019, Ice Lake, Zen 4).
#include "tiers/avx512_vnni/avx512_vnni.hpp"

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
#include "tiers/avx512/bf16-inl.hpp"
#include "tiers/fp8-inl.hpp"
#include "tiers/avx512/fp8-inl.hpp"
#include "tiers/avx512_vnni/int8-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/avx512/bytes-inl.hpp"
#include "tiers/avx512_vnni/grouped-dots-inl.hpp"
#include "tiers/grouped-inl.hpp"

using Int8Micro = RowsOf<Int8DotTile>;
using Bf16Micro = RowsOf<Bf16WideTile<Bf16Weights>>;
using Fp8 = Fp8Micro<Fp8Products<Bf16WideTile>, 4, Bf16Micro::kRows>;

constexpr TierTable kTable = {
    .int8 = {int8_row_bytes, encode_offset_row, gate_up<Int8Micro>, down<Int8Micro>},
    .bf16 = {bf16_wide_row_bytes, encode_bf16_wide_row, gate_up<Bf16Micro>, down<Bf16Micro>},
    .int4 = {grouped_row_bytes, encode_grouped_row<nibble_offset>, gate_up<Int4Micro>, down<Int4Micro>},
    .int8_grouped = {grouped_row_bytes, encode_grouped_row<int8_offset>, gate_up<GroupedInt8Micro>,
                     down<GroupedInt8Micro>},
    .fp8 = {bf16_wide_row_bytes, encode_bf16_wide_row, gate_up<Fp8>, down<Fp8>},
    .combine = combine,
    .rotate = rotate,
    .quantize = quantize,
};

}  // namespace

const TierTable* avx512_vnni_table() {
  return &kTable;
}

}  // namespace kt
