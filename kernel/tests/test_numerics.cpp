// Rotation and quantisation of every tier, by definition and bit for bit against the generic one.
#include <cmath>
#include <cstring>
#include <limits>

#include "each_tier.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::check::generic;
using kt::check::Random;

namespace {

constexpr std::size_t kBlocks[] = {64, 128, 256, 512};

std::vector<float> rotated(const kt::TierTable& table, std::vector<float> x, std::size_t block) {
  table.rotate(x.data(), x.size(), block);
  return x;
}

struct Quantised {
  std::vector<std::int8_t> q;
  float scale;
};

Quantised quantised(const kt::TierTable& table, const std::vector<float>& x) {
  Quantised result{std::vector<std::int8_t>(x.size(), 99), 0.0f};
  result.scale = table.quantize(x.data(), x.size(), result.q.data());
  return result;
}

std::vector<float> row_of(std::initializer_list<float> first) {
  std::vector<float> x(first);
  x.resize(64, 0.0f);
  return x;
}

}  // namespace

TEST_EACH_TIER("rotate: is the Hadamard matrix, exactly where the sums are exact") {
  Random random{1};
  for (const std::size_t block : kBlocks) {
    std::vector<float> x(3 * block), expected(3 * block, 0.0f);
    for (float& value : x) value = static_cast<float>(random.between(-1000, 1000));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t base = i / block * block;
      for (std::size_t j = 0; j < block; ++j) {
        expected[i] += static_cast<float>(kt::check::hadamard(i - base, j)) * x[base + j];
      }
    }
    CHECK_SAME_BITS(rotated(*tier.table, x, block), expected, block);
  }
}

TEST_EACH_TIER("rotate: additions happen in the generic tier's order") {
  Random random{2};
  for (const std::size_t block : kBlocks) {
    for (int i = 0; i < 8; ++i) {
      std::vector<float> x = random.gaussians(2 * block);
      x[random.below(block)] *= 1e4f;
      CHECK_SAME_BITS(rotated(*tier.table, x, block), rotated(generic(), x, block), block);
    }
  }
}

// Each of the 2·log2(n) additions behind a result errs by at most half a unit of a sum that is at most n·max|x|.
TEST_EACH_TIER("rotate: twice is n times the input") {
  Random random{3};
  for (const std::size_t block : kBlocks) {
    const std::vector<float> x = random.gaussians(block);
    const std::vector<float> twice = rotated(*tier.table, rotated(*tier.table, x, block), block);
    double size = 0.0, error = 0.0;
    for (std::size_t i = 0; i < block; ++i) {
      const double n = static_cast<double>(block), back = static_cast<double>(twice[i]) / n;
      size += static_cast<double>(x[i] * x[i]);
      error += (back - static_cast<double>(x[i])) * (back - static_cast<double>(x[i]));
    }
    CHECK(std::sqrt(error / size) < 0x1p-24 * 2 * std::log2(static_cast<double>(block)));
  }
}

TEST_EACH_TIER("quantise: halves go to the even neighbour") {
  std::vector<float> x(64);
  for (int i = 0; i < 63; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>(i - 31) + 0.5f;
  x[63] = 127.0f;
  const Quantised result = quantised(*tier.table, x);
  CHECK_EQ(result.scale, 1.0f);
  for (std::size_t i = 0; i < 63; ++i) {
    const int value = result.q[i];
    CHECK_EQ(value % 2, 0);
    CHECK_EQ(std::fabs(static_cast<float>(value) - x[i]), 0.5f);
  }
}

TEST_EACH_TIER("quantise: the largest magnitude becomes 127 or -127 wherever it is, and -128 never appears") {
  Random random{4};
  for (int i = 0; i < 2000; ++i) {
    const std::size_t n = 64 * (1 + random.below(9)), place = random.below(n);
    std::vector<float> x = random.gaussians(n);
    const float largest = std::ldexp(4.0f + random.uniform(), random.between(-110, 120));
    for (float& value : x) value *= largest / 4.0f;  // some magnitudes come near the largest
    for (float& value : x) value = std::min(std::max(value, -largest), largest);
    x[place] = i % 2 == 0 ? largest : -largest;
    const Quantised result = quantised(*tier.table, x);
    CHECK_EQ(result.q[place], static_cast<std::int8_t>(i % 2 == 0 ? 127 : -127));
    CHECK_EQ(result.scale, largest / 127.0f);
    for (const std::int8_t q : result.q) CHECK(q >= -127);
  }
}

TEST_EACH_TIER("quantise: same bytes and scale as the generic tier") {
  Random random{5};
  for (int i = 0; i < 3000; ++i) {
    std::vector<float> x = random.gaussians(64 * (1 + random.below(5)), std::ldexp(1.0f, random.between(-100, 100)));
    if (i % 3 == 0) x[random.below(x.size())] *= 1e4f;
    const Quantised got = quantised(*tier.table, x), expected = quantised(generic(), x);
    CHECK(got.q == expected.q);
    CHECK_EQ(got.scale, expected.scale);
  }
}

TEST_EACH_TIER("quantise: zero rows, subnormal rows and subnormal numbers in ordinary rows") {
  const float subnormal = std::numeric_limits<float>::denorm_min();
  for (const float tiny : {0.0f, -0.0f, subnormal, -1e-40f, 9.9e-36f}) {
    const Quantised result = quantised(*tier.table, row_of({0.0f, tiny, -tiny}));
    CHECK_EQ(result.scale, 0.0f);
    CHECK(!std::signbit(result.scale));
    for (const std::int8_t q : result.q) CHECK_EQ(q, std::int8_t{0});
  }
  const Quantised small = quantised(*tier.table, row_of({1.0e-35f, -5.0e-36f, subnormal}));
  CHECK_EQ(small.q[0], std::int8_t{127});
  CHECK(small.q[1] == -64 || small.q[1] == -63);
  CHECK_EQ(small.q[2], std::int8_t{0});
  CHECK_EQ(small.scale, 1.0e-35f / 127.0f);
  const Quantised huge = quantised(*tier.table, row_of({std::numeric_limits<float>::max(), -1.0f}));
  CHECK_EQ(huge.q[0], std::int8_t{127});
  CHECK_EQ(huge.q[1], std::int8_t{0});
}

TEST_EACH_TIER("quantise: a NaN or an infinity anywhere makes the scale NaN and the row zero") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {inf, -inf, nan, -nan}) {
    for (std::size_t place = 0; place < 192; ++place) {
      std::vector<float> x(192, 1.0f);
      x[place] = bad;
      const Quantised result = quantised(*tier.table, x);
      CHECK(std::isnan(result.scale));
      for (const std::int8_t q : result.q) CHECK_EQ(q, std::int8_t{0});
    }
  }
}
