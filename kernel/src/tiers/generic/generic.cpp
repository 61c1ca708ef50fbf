// Portable tier and oracle: GNU vector extensions of 128 bits, which SSE2 and NEON both hold in a register.
#include "tiers/generic/generic.hpp"

#include "tiers/table.hpp"

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"

constexpr std::size_t kWidth = 4;
typedef float F __attribute__((vector_size(16)));
typedef std::int32_t I __attribute__((vector_size(16)));

inline F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F v) {
  __builtin_memcpy(p, &v, sizeof v);
}
inline I load_int(const std::int32_t* p) {
  I v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline F set1(float x) {
  return F{x, x, x, x};
}
inline F add(F a, F b) {
  return a + b;
}
inline F sub(F a, F b) {
  return a - b;
}
inline F mul(F a, F b) {
  return a * b;
}
inline F div(F a, F b) {
  return a / b;
}
inline F max_of(F a, F b) {
  return a > b ? a : b;
}
inline F min_of(F a, F b) {
  return a < b ? a : b;
}
inline F to_float(I v) {
  return __builtin_convertvector(v, F);
}
inline I zero_int() {
  return I{0, 0, 0, 0};
}
inline I max_int(I a, I b) {
  return a > b ? a : b;
}
inline I abs_bits(F v) {
  return reinterpret_cast<I>(v) & 0x7fffffff;
}
inline F pow2(I n) {
  return reinterpret_cast<F>((n + 127) << 23);
}
// Adding 1.5·2^23 pushes the fraction out of the mantissa, rounding to nearest even; exact for |v| < 2^22, and |v| <=
// 128 here.
inline I round_to_int(F v) {
  return reinterpret_cast<I>(v + 12582912.0f) - 0x4b400000;
}
inline std::uint32_t largest_lane(I v) {
  std::int32_t most = v[0];
  for (int i = 1; i < 4; ++i) most = v[i] > most ? v[i] : most;
  return static_cast<std::uint32_t>(most);
}
inline void store_int8(std::int8_t* p, I v) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<std::int8_t>(v[i]);
}
inline F load_bf16(const std::uint16_t* p) {
  return F{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
inline F load_f16(const std::uint16_t* p) {
  return F{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])};
}
inline void store_bf16(std::uint16_t* p, F v) {
  for (int i = 0; i < 4; ++i) p[i] = float_to_bf16(v[i]);
}
inline void store_f16(std::uint16_t* p, F v) {
  for (int i = 0; i < 4; ++i) p[i] = float_to_f16(v[i]);
}
inline F butterflies_in_register(F v) {
  v = F{v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]};
  return F{v[0] + v[2], v[1] + v[3], v[0] - v[2], v[1] - v[3]};
}

#include "tiers/elementwise-inl.hpp"
#include "tiers/gemm-inl.hpp"

// 4 rows share each weight that is loaded; more would spill the 16 sums of a panel from the 16 SSE2 registers.
struct Int8Micro {
  using Sum = std::int32_t;
  static constexpr std::size_t kRows = 4;

  static void run(const char* rows, std::size_t row_stride, std::size_t m, const char* block, std::size_t,
                  std::size_t k_padded, Sum* sums) {
    for (std::size_t r = 0; r < m; ++r) {
      const std::int8_t* x = reinterpret_cast<const std::int8_t*>(rows + r * row_stride);
      for (std::size_t panel = 0; panel < 2; ++panel) {
        std::int32_t sum[kPanelChannels] = {};
        for (std::size_t k = 0; k < k_padded; k += 4) {
          const std::size_t row = k / 4;
          const std::int8_t* w = reinterpret_cast<const std::int8_t*>(block + row / 16 * 2 * kTileBytes +
                                                                      panel * kTileBytes + row % 16 * kRowBytes);
          for (std::size_t c = 0; c < kPanelChannels; ++c) {
            for (std::size_t j = 0; j < 4; ++j) sum[c] += std::int32_t{x[k + j]} * std::int32_t{w[4 * c + j]};
          }
        }
        __builtin_memcpy(sums + r * kBlockChannels + panel * kPanelChannels, sum, sizeof sum);
      }
    }
  }
};

// Rows are bf16 values kept as fp32. Each channel adds its products in ascending K, one multiply and one add each.
struct Bf16Micro {
  using Sum = float;
  static constexpr std::size_t kGroup = 4;
  static constexpr std::size_t kRows = kGroup;

  static void run(const char* rows, std::size_t row_stride, std::size_t m, const char* block, std::size_t block_bytes,
                  std::size_t k_padded, Sum* sums) {
    Prefetcher none(block, 1);
    passes(rows, row_stride, m, block, block_bytes, none, k_padded, sums);
  }

  // A function of its own: inlined into what becomes of the sums, GCC keeps some of them in memory (8 % slower).
  [[gnu::noinline]] static void passes(const char* rows, std::size_t row_stride, std::size_t m, const char* block,
                                       std::size_t, Prefetcher&, std::size_t k_padded, Sum* sums) {
    for (std::size_t r = 0; r < m; ++r) {
      const float* x = reinterpret_cast<const float*>(rows + r * row_stride);
      for (std::size_t panel = 0; panel < 2; ++panel) {
        float sum[kPanelChannels] = {};
        for (std::size_t k = 0; k < k_padded; k += 2) {
          const std::size_t row = k / 2;
          const char* w = block + row / 16 * 2 * kTileBytes + panel * kTileBytes + row % 16 * kRowBytes;
          for (std::size_t c = 0; c < kPanelChannels; ++c) {
            std::uint32_t pair;
            __builtin_memcpy(&pair, w + 4 * c, 4);
            sum[c] += x[k] * bits_to_float(pair << 16);
            sum[c] += x[k + 1] * bits_to_float(pair & 0xffff0000u);
          }
        }
        __builtin_memcpy(sums + r * kBlockChannels + panel * kPanelChannels, sum, sizeof sum);
      }
    }
  }
};

constexpr float kFp8Unit = 1.0f;

// 32 codes to 64 bytes of bf16, order kept.
inline void decode_e4m3(const char* codes, char* bf16) {
  for (std::size_t i = 0; i < 32; ++i) {
    // Exact: bf16 has more bits of either kind than e4m3.
    const std::uint32_t bits = float_to_bits(e4m3_to_float(static_cast<std::uint8_t>(codes[i]))) >> 16;
    const auto narrow = static_cast<std::uint16_t>(bits);
    __builtin_memcpy(bf16 + 2 * i, &narrow, 2);
  }
}

#include "tiers/fp8-inl.hpp"
#include "tiers/fp8-decode-inl.hpp"

// 60 rows: decoding takes longer than the products of a few.
using Fp8 = Fp8Micro<DecodedProducts<Bf16Micro>, 4, 60>;

std::size_t bf16_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return 4 * k_padded;
}

void encode_bf16_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits&, void* row,
                     float*, float*) {
  float* out = static_cast<float*>(row);
  load_row(x, dtype, k, k_padded, out);
  for (std::size_t i = 0; i < k; ++i) out[i] = bf16_to_float(float_to_bf16(out[i]));
}

#include "tiers/grouped-layout-inl.hpp"
#include "tiers/grouped-rows-inl.hpp"
#include "tiers/generic/grouped-inl.hpp"

constexpr TierTable kTable = {
    .int8 = {int8_row_bytes, encode_int8_row, gate_up<Int8Micro>, down<Int8Micro>},
    .bf16 = {bf16_row_bytes, encode_bf16_row, gate_up<Bf16Micro>, down<Bf16Micro>},
    .int4 = {grouped_row_bytes, encode_grouped_row<no_offset>, gate_up<GroupedMicro>, down<GroupedMicro>},
    .int8_grouped = {grouped_row_bytes, encode_grouped_row<no_offset>, gate_up<GroupedMicro>, down<GroupedMicro>},
    .fp8 = {bf16_row_bytes, encode_bf16_row, gate_up<Fp8>, down<Fp8>},
    .combine = combine,
    .rotate = rotate,
    .quantize = quantize,
};

}  // namespace

const TierTable* generic_table() {
  return &kTable;
}

}  // namespace kt
