// AVX2 + FMA + F16C (Haswell 2013, Zen 2017).
#include "tiers/avx2/avx2.hpp"

#include <immintrin.h>

#include "tiers/table.hpp"

namespace kt {
namespace {

// The order matters: conversions, vector type, shared numerics, loops, micro kernels.
#include "tiers/scalar-inl.hpp"
#include "tiers/avx2/vector-inl.hpp"
#include "tiers/elementwise-inl.hpp"
#include "tiers/gemm-inl.hpp"
#include "tiers/avx2/widen-inl.hpp"
#include "tiers/avx2/int8-inl.hpp"
#include "tiers/avx2/bf16-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/avx2/bytes-inl.hpp"
#include "tiers/avx2/grouped-dots-inl.hpp"
#include "tiers/grouped-inl.hpp"
#include "tiers/fp8-inl.hpp"
#include "tiers/avx2/fp8-inl.hpp"

constexpr TierTable kTable = {
    .int8 = {int8_wide_row_bytes, encode_int8_wide_row, gate_up<Int8Micro>, down<Int8Micro>},
    .bf16 = {bf16_row_bytes, encode_bf16_row, gate_up<Bf16Micro>, down<Bf16Micro>},
    .int4 = {grouped_row_bytes, encode_grouped_row<nibble_offset>, gate_up<Int4Micro>, down<Int4Micro>},
    .int8_grouped = {grouped_row_bytes, encode_grouped_row<no_offset>, gate_up<GroupedInt8Micro>,
                     down<GroupedInt8Micro>},
    .fp8 = {bf16_row_bytes, encode_bf16_row, gate_up<Fp8>, down<Fp8>},
    .combine = combine,
    .rotate = rotate,
    .quantize = quantize,
};

}  // namespace

const TierTable* avx2_table() {
  return &kTable;
}

}  // namespace kt
