// FP8's matrix products on every tier: each code's exact value, both kinds of scales, the order of additions.
#include <cmath>

#include "blocks.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::Format;
using kt::check::Blocks;
using kt::check::e4m3_value;
using kt::check::FormatCase;
using kt::check::nearest_e4m3;
using kt::check::Random;
using kt::check::Rows;
using kt::check::TierCase;

namespace {

// Ways to compute change with the number of rows: 1 and 3 are few everywhere, 60 and 256 fill one pass.
constexpr std::size_t kRowCounts[] = {1, 2, 3, 4, 5, 12, 13, 60, 61, 130, 257};

bool is_nan(std::uint8_t code) {
  return (code & 0x7f) == 0x7f;
}

FormatCase fp8_of(const TierCase& tier) {
  return {tier.name, tier.table, Format::kFp8};
}

std::vector<float> repeated(const std::vector<float>& row, std::size_t m) {
  std::vector<float> rows;
  for (std::size_t r = 0; r < m; ++r) rows.insert(rows.end(), row.begin(), row.end());
  return rows;
}

Blocks random_codes(std::size_t count, std::size_t k, Random& random) {
  Blocks blocks(Format::kFp8, count, k);
  for (std::size_t c = 0; c < blocks.channels(); ++c) {
    for (std::size_t i = 0; i < k; ++i) {
      const auto code = static_cast<std::uint8_t>(random.below(256));
      blocks.set_code(c, i, is_nan(code) ? 0 : code);
    }
    blocks.set_scale(c, 0.5f + random.uniform());
  }
  for (std::size_t c = 0; c < blocks.channels(); c += 16) {
    for (std::size_t g = 0; 128 * g < k; ++g) blocks.set_panel_scale(c, g, 0.5f + random.uniform());
  }
  return blocks;
}

}  // namespace

// Channel c holds code c at one place of K, and the activation there is 1: the output is the code's value.
TEST_EACH_TIER("fp8: each of the 254 finite codes is its exact value, at every place of a row and in every way") {
  const FormatCase c = fp8_of(tier);
  if (c.functions().gate_up == nullptr) return;
  for (const std::size_t place : {0, 1, 2, 3, 30, 31, 62, 63, 64, 127, 128, 191}) {
    Blocks blocks(Format::kFp8, 8, 192);
    std::vector<float> row(192, 0.0f), expected;
    row[place] = 1.0f;
    for (std::size_t i = 0; i < 256; ++i) {
      const auto code = static_cast<std::uint8_t>(i);
      if (!is_nan(code)) blocks.set_code(i, place, code);
      expected.push_back(is_nan(code) ? 0.0f : static_cast<float>(e4m3_value(code)));
    }
    for (const std::size_t m : {1, 3, 40}) {
      std::vector<float> got = blocks.down(Rows(c, repeated(row, m), 192), 0, m);
      for (float& value : got) value += 0.0f;  // minus zero among zeros is lost in the sum
      std::vector<float> all = repeated(expected, m);
      for (float& value : all) value += 0.0f;
      CHECK_SAME_BITS(got, all, 256);
    }
  }
}

TEST_EACH_TIER("fp8: sums of 128 inputs take their panel's scale, and the whole its channel's") {
  const FormatCase c = fp8_of(tier);
  if (c.functions().gate_up == nullptr) return;
  Blocks blocks(Format::kFp8, 2, 320);
  // Powers of two and small whole numbers: every sum is exact.
  std::vector<float> expected;
  for (std::size_t channel = 0; channel < 64; ++channel) {
    const float scale = std::ldexp(1.0f, static_cast<int>(channel % 5) - 2);
    blocks.set_scale(channel, scale);
    float sum = 0.0f;
    for (std::size_t group = 0; group < 3; ++group) {
      const float panel_scale = static_cast<float>(1 + channel / 16 + 4 * group);
      blocks.set_panel_scale(channel, group, panel_scale);
      for (std::size_t k = 128 * group; k < std::min<std::size_t>(320, 128 * group + 128); ++k) {
        const int weight = static_cast<int>((channel + 3 * k) % 17) - 8;
        blocks.set(channel, k, weight);
        sum += static_cast<float>(weight) * panel_scale * static_cast<float>(k % 3);
      }
    }
    expected.push_back(sum * scale);
  }
  std::vector<float> row(320);
  for (std::size_t k = 0; k < 320; ++k) row[k] = static_cast<float>(k % 3);
  for (const std::size_t m : kRowCounts) {
    CHECK_SAME_BITS(blocks.down(Rows(c, repeated(row, m), 320), 0, m), repeated(expected, m), 64);
  }
}

TEST_EACH_TIER("fp8: a row's bits are the same alone and among any number of others") {
  const FormatCase c = fp8_of(tier);
  if (c.functions().gate_up == nullptr) return;
  Random random{1};
  for (const std::size_t k : {64, 192, 640}) {
    const Blocks blocks = random_codes(2, k, random);
    const Rows rows(c, random.gaussians(257 * k), k);
    std::vector<float> alone;
    for (std::size_t r = 0; r < 257; ++r) {
      const std::vector<float> y = blocks.down(rows, r, 1);
      alone.insert(alone.end(), y.begin(), y.end());
    }
    for (const std::size_t m : kRowCounts) {
      const std::size_t first = 257 - m;
      CHECK_SAME_BITS(blocks.down(rows, first, m),
                      std::vector<float>(alone.begin() + static_cast<std::ptrdiff_t>(first * 64), alone.end()), 64);
    }
  }
}

// fp32 sums of at most 640 products, each within half a unit of 2^-24, against the generic tier's.
TEST_EACH_TIER("fp8: sums of random codes are the generic tier's within the rounding of fp32") {
  const FormatCase c = fp8_of(tier), oracle{"generic", &kt::check::generic(), Format::kFp8};
  if (c.functions().gate_up == nullptr) return;
  Random random{2};
  for (const std::size_t k : {64, 128, 320, 640}) {
    const Blocks blocks = random_codes(3, k, random);
    const std::vector<float> x = random.gaussians(70 * k);
    const std::vector<float> expected = blocks.down(Rows(oracle, x, k), 0, 70);
    const std::vector<double> wide(expected.begin(), expected.end());
    for (const std::size_t m : {1, 3, 4, 33, 70}) {
      const std::vector<float> got = blocks.down(Rows(c, x, k), 0, m);
      const auto end = wide.begin() + static_cast<std::ptrdiff_t>(m * 96);
      CHECK(kt::check::relative_error(got, {wide.begin(), end}) <= 2e-6);
    }
  }
}

TEST_EACH_TIER("fp8: a NaN in one row stays in that row") {
  const FormatCase c = fp8_of(tier);
  if (c.functions().gate_up == nullptr) return;
  Random random{3};
  const std::size_t k = 192;
  const Blocks blocks = random_codes(1, k, random);
  std::vector<float> x = random.gaussians(70 * k);
  const std::vector<float> clean = blocks.down(Rows(c, x, k), 0, 70);
  x[41 * k + 150] = std::nanf("");
  const std::vector<float> got = blocks.down(Rows(c, x, k), 0, 70);
  for (std::size_t r = 0; r < 70; ++r) {
    const std::vector<float> row(got.begin() + static_cast<std::ptrdiff_t>(32 * r),
                                 got.begin() + static_cast<std::ptrdiff_t>(32 * r + 32));
    if (r == 41) {
      CHECK(kt::check::all_nan(row.data(), 32));
    } else {
      CHECK_SAME_BITS(row,
                      std::vector<float>(clean.begin() + static_cast<std::ptrdiff_t>(32 * r),
                                         clean.begin() + static_cast<std::ptrdiff_t>(32 * r + 32)),
                      32);
    }
  }
}
