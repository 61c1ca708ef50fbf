// bf16 and fp16 in and out of every tier, over all their values.
#include <cmath>
#include <cstring>
#include <limits>

#include "blocks.hpp"
#include "reference.hpp"

using kt::DType;
using kt::Format;
using kt::check::Blocks;
using kt::check::FormatCase;
using kt::check::GuardedBuffer;
using kt::check::Rows;
using kt::check::TierCase;

namespace {

constexpr std::size_t kAll = 65536;

double value_of(DType dtype, std::uint16_t bits) {
  return dtype == DType::kBf16 ? kt::check::bf16_value(bits) : kt::check::f16_value(bits);
}

std::uint16_t nearest(DType dtype, float x) {
  return dtype == DType::kBf16 ? kt::check::nearest_bf16(x) : kt::check::nearest_f16(x);
}

float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A row of numbers written by combine() as `dtype`.
std::vector<std::uint16_t> stored(const TierCase& tier, const std::vector<float>& x, DType dtype) {
  const GuardedBuffer y(2 * x.size());
  const float* row = x.data();
  const float one = 1.0f;
  tier.table->combine({&row, &one, 1, x.size(), y.as<void>(), dtype});
  return {y.as<std::uint16_t>(), y.as<std::uint16_t>() + x.size()};
}

// All upper halves of a fp32 with the lower halves at which rounding turns.
std::vector<float> turning_points() {
  std::vector<float> x;
  for (std::uint32_t high = 0; high < kAll; ++high) {
    for (const std::uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      x.push_back(from_bits(high << 16 | low));
    }
  }
  return x;
}

void check_stored(const TierCase& tier, DType dtype) {
  const std::vector<float> x = turning_points();
  const std::vector<std::uint16_t> y = stored(tier, x, dtype);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      CHECK(std::isnan(value_of(dtype, y[i])));
    } else {
      CHECK_EQ(y[i], nearest(dtype, x[i] + 0.0f));  // the sum starts at +0, which takes -0 along
    }
  }
}

// Lengths that end inside a vector.
void check_tails(const TierCase& tier, DType dtype) {
  const std::vector<float> all = turning_points();
  for (std::size_t n = 1; n <= 40; ++n) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(100000 + 997 * n);
    const std::vector<float> x(first, first + static_cast<std::ptrdiff_t>(n));
    const std::vector<std::uint16_t> y = stored(tier, x, dtype);
    for (std::size_t i = 0; i < n; ++i) CHECK_EQ(y[i], nearest(dtype, x[i] + 0.0f));
  }
}

// All 65536 numbers of a 16-bit type, zeros for what is not finite.
std::vector<std::uint16_t> all_finite_values(DType dtype) {
  std::vector<std::uint16_t> x(kAll);
  for (std::size_t i = 0; i < kAll; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    x[i] = std::isfinite(value_of(dtype, bits)) ? bits : 0;
  }
  return x;
}

void set_identity(Blocks& blocks) {
  for (std::size_t i = 0; i < 64; ++i) blocks.set(i, i, 1);
}

// What a bf16 row holds of x. The bf16 dot products of AVX-512 and AMX take subnormal numbers for zero.
void check_encoded(float got, double x) {
  const auto expected = static_cast<float>(kt::check::bf16_value(kt::check::nearest_bf16(static_cast<float>(x))));
  if (got == 0.0f && std::fabs(expected) < std::numeric_limits<float>::min()) return;
  CHECK_EQ(got, expected);
}

}  // namespace

TEST_EACH_TIER("conversions: fp32 to bf16, every upper half, rounds to nearest even and keeps NaN") {
  check_stored(tier, DType::kBf16);
  check_tails(tier, DType::kBf16);
}

TEST_EACH_TIER("conversions: fp32 to fp16, every upper half, rounds to nearest even and keeps NaN") {
  check_stored(tier, DType::kF16);
  check_tails(tier, DType::kF16);
}

TEST_EACH_TIER("conversions: every fp16 and bf16 input reaches a bf16 row as itself, rounded") {
  const FormatCase c{tier.name, tier.table, Format::kBf16};
  if (c.functions().encode_row == nullptr) return;
  Blocks identity(Format::kBf16, 2, 64);
  set_identity(identity);
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const std::vector<std::uint16_t> x = all_finite_values(dtype);
    const Rows rows(c, x.data(), dtype, kAll / 64, 64, 64);
    const std::vector<float> y = identity.down(rows, 0, rows.count);
    for (std::size_t i = 0; i < kAll; ++i) check_encoded(y[i], value_of(dtype, x[i]));
  }
}

TEST_EACH_TIER("conversions: fp32 inputs are rounded to nearest even on their way into a bf16 row") {
  const FormatCase c{tier.name, tier.table, Format::kBf16};
  if (c.functions().encode_row == nullptr) return;
  Blocks identity(Format::kBf16, 2, 64);
  set_identity(identity);
  std::vector<float> x = turning_points();
  for (float& value : x) value = std::fabs(value) < 3e38f ? value : 0.0f;  // 3.39e38 and above round to infinity
  const Rows rows(c, x, 64);
  const std::vector<float> y = identity.down(rows, 0, rows.count);
  for (std::size_t i = 0; i < x.size(); ++i) check_encoded(y[i], static_cast<double>(x[i]));
}

TEST_EACH_FORMAT("conversions: a 16-bit input is encoded like the same numbers in fp32, for every length of the tail") {
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const std::vector<std::uint16_t> x = all_finite_values(dtype);
    std::vector<float> wide;
    for (const std::uint16_t bits : x) wide.push_back(static_cast<float>(value_of(dtype, bits)));
    for (std::size_t k = 1; k <= 64; ++k) {
      const std::size_t count = 512;
      const Rows got(c, x.data(), dtype, count, k, 64), expected(c, wide.data(), DType::kF32, count, k, 64);
      CHECK(std::memcmp(got.bytes.as<char>(), expected.bytes.as<char>(), count * got.row_bytes) == 0);
      if (c.format == Format::kInt8) CHECK_EQ(got.scales, expected.scales);
    }
  }
}
