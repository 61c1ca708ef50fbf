#include <immintrin.h>

#include "probe.hpp"

namespace kt::bench {
namespace {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Four accumulators, operands in place: the rate of the tile unit alone.
template <class Product>
double run(long rounds, double operations, volatile double* sink, Product product) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
  asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
  asm volatile("tilezero %tmm4\n tilezero %tmm5\n tilezero %tmm6\n tilezero %tmm7");
  for (long i = 0; i < rounds; ++i) product();
  asm volatile("tilerelease");
  *sink = static_cast<double>(rounds);
  return static_cast<double>(rounds) * 4 * operations;
}

double int8(long rounds, volatile double* sink) {
  return run(rounds / 16, 16.0 * 16 * 64 * 2, sink, [] {
    asm volatile(
        "tdpbssd %tmm6, %tmm4, %tmm0\n tdpbssd %tmm7, %tmm4, %tmm1\n tdpbssd %tmm6, %tmm5, %tmm2\n tdpbssd %tmm7, "
        "%tmm5, %tmm3");
  });
}

double bf16(long rounds, volatile double* sink) {
  return run(rounds / 16, 16.0 * 16 * 32 * 2, sink, [] {
    asm volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps "
        "%tmm7, %tmm5, %tmm3");
  });
}

}  // namespace

Probes amx_probes() {
  return {"amx", nullptr, nullptr, int8, bf16};
}

}  // namespace kt::bench
