// Each tier's matrix products against whole numbers, which every order of additions gives exactly.
#include <algorithm>

#include "blocks.hpp"
#include "layers.hpp"

using kt::Format;
using kt::Gate;
using kt::check::Blocks;
using kt::check::FormatCase;
using kt::check::Random;
using kt::check::Rows;

namespace {

constexpr int kLargest = 127;

// Whole numbers small enough that fp32 sums over K stay exact. Where rows are quantised, each 32 inputs of them hold a
// 127 so that their scales are 1.
int input_limit(Format format) {
  return format == Format::kBf16 || format == Format::kFp8 ? 40 : kLargest;
}

int weight_limit(Format format) {
  switch (format) {
    case Format::kInt4:
      return 7;
    case Format::kInt8Grouped:
      return 60;
    case Format::kBf16:
      return 40;
    case Format::kFp8:
      return 16;
    default:
      return kLargest;
  }
}

std::vector<float> whole_numbers(Format format, std::size_t rows, std::size_t k, Random& random) {
  const int limit = input_limit(format);
  std::vector<float> x(rows * k);
  for (float& value : x) value = static_cast<float>(random.between(-limit, limit));
  for (std::size_t i = 0; i < x.size(); i += 32) x[i + random.below(32)] = static_cast<float>(limit);
  return x;
}

Blocks random_blocks(Format format, std::size_t count, std::size_t k, Random& random) {
  Blocks blocks(format, count, k);
  const int limit = weight_limit(format);
  for (std::size_t c = 0; c < blocks.channels(); ++c) {
    for (std::size_t i = 0; i < k; ++i) blocks.set(c, i, random.between(-limit, limit));
  }
  return blocks;
}

std::vector<float> exact(const Blocks& blocks, const float* x, std::size_t m) {
  std::vector<float> y;
  for (std::size_t r = 0; r < m; ++r) {
    for (std::size_t c = 0; c < blocks.channels(); ++c) {
      y.push_back(static_cast<float>(blocks.product(c, x + r * blocks.k_padded())));
    }
  }
  return y;
}

}  // namespace

TEST_EACH_FORMAT("gemm: every number of rows from 1 to 130 gives the exact sums") {
  Random random{1};
  for (const std::size_t k : {64, 192, 576}) {
    const std::vector<float> x = whole_numbers(c.format, 130, k, random);
    const Blocks blocks = random_blocks(c.format, 2, k, random);
    const Rows rows(c, x, k);
    const std::vector<float> all = exact(blocks, x.data(), 130);
    for (std::size_t m = 1; m <= 130; m += k == 64 ? 1 : 9) {
      const std::size_t first = 130 - m;  // the rows end where their memory ends
      const std::vector<float> expected(all.begin() + static_cast<std::ptrdiff_t>(first * blocks.channels()),
                                        all.end());
      CHECK_SAME_BITS(blocks.down(rows, first, m), expected, blocks.channels());
    }
  }
}

TEST_EACH_FORMAT("gemm: one block, many blocks, short and long K") {
  Random random{2};
  for (const std::size_t k : {64, 128, 320, 512, 640, 1088, 2048}) {
    for (const std::size_t count : {1, 3, 8}) {
      for (const std::size_t m : {1, 5, 33}) {
        const std::vector<float> x = whole_numbers(c.format, m, k, random);
        const Blocks blocks = random_blocks(c.format, count, k, random);
        CHECK_SAME_BITS(blocks.down(Rows(c, x, k), 0, m), exact(blocks, x.data(), m), blocks.channels());
      }
    }
  }
}

TEST_EACH_FORMAT("gemm: gate and up of every number of rows are the generic tier's bits") {
  const FormatCase oracle{"generic", &kt::check::generic(), c.format};
  Random random{3};
  const std::size_t k = 128;
  const std::vector<float> x = whole_numbers(c.format, 130, k, random);
  const Blocks blocks = random_blocks(c.format, 3, k, random);
  const Rows rows(c, x, k), expected_rows(oracle, x, k);
  for (const Gate& gate : {Gate{}, Gate{.alpha = 1.702f, .limit = 7.0f, .up_offset = 1.0f}}) {
    for (std::size_t m = 1; m <= 130; ++m) {
      CHECK_SAME_BITS(blocks.gate_up(rows, 130 - m, m, gate), blocks.gate_up(expected_rows, 130 - m, m, gate),
                      blocks.channels() / 2);
    }
  }
}

// Row r holds the activation r-127 at one place of K, channel c the weight c-127 there: 255 x 255 products a place.
TEST_EACH_TIER("gemm: int8 products of every two bytes at every place of a word") {
  const FormatCase c{tier.name, tier.table, Format::kInt8};
  for (const std::size_t place : {0, 1, 2, 3, 29, 63}) {
    const std::size_t other = (place + 7) % 64;
    Blocks blocks(Format::kInt8, 8, 64);
    std::vector<float> x(255 * 64, 0.0f), expected(255 * 256, 0.0f);
    for (int i = 0; i < 255; ++i) {
      const auto row = static_cast<std::size_t>(i);
      blocks.set(row, place, i - 127);
      x[row * 64 + place] = static_cast<float>(i - 127);
      x[row * 64 + other] = 127.0f;  // makes the row's scale 1; its weights are 0
      for (int j = 0; j < 255; ++j) {
        expected[row * 256 + static_cast<std::size_t>(j)] = static_cast<float>((i - 127) * (j - 127));
      }
    }
    const Rows rows(c, x, 64);
    CHECK_SAME_BITS(blocks.down(rows, 0, 255), expected, 256);
    for (const std::size_t m : {1, 2, 3, 4, 7, 15}) {  // the ways for few rows
      for (std::size_t first = 0; first + m <= 255; first += m) {
        const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(first * 256);
        const std::vector<float> part(begin, begin + static_cast<std::ptrdiff_t>(m * 256));
        CHECK_SAME_BITS(blocks.down(rows, first, m), part, 256);
      }
    }
  }
}

// Where 16-bit pairs would saturate, and where 32-bit sums come nearest to their limit.
TEST_EACH_TIER("gemm: int8 sums of the largest magnitudes up to the longest K") {
  const FormatCase c{tier.name, tier.table, Format::kInt8};
  for (const std::size_t k : {std::size_t{64}, std::size_t{512}, std::size_t{4096}, kt::kMaxInt8Inputs}) {
    Blocks blocks(Format::kInt8, 1, k);
    for (std::size_t i = 0; i < k; ++i) {
      blocks.set(0, i, kLargest);
      blocks.set(1, i, -kLargest);
      blocks.set(17, i, i % 2 == 0 ? kLargest : -kLargest);
      blocks.set(31, i, i < k / 2 ? kLargest : -kLargest);
    }
    std::vector<float> x(20 * k);
    for (std::size_t r = 0; r < 20; ++r) {
      for (std::size_t i = 0; i < k; ++i) {
        const bool negative = r % 4 == 1 || (r % 4 == 2 && i % 2 == 1) || (r % 4 == 3 && i >= k / 2);
        x[r * k + i] = static_cast<float>(negative ? -kLargest : kLargest);
      }
    }
    const Rows rows(c, x, k);
    // Every fourth row is the same one: the reference, which is slow, needs only four.
    std::vector<float> expected = exact(blocks, x.data(), 4);
    for (std::size_t i = 0; i < 16 * 32; ++i) expected.push_back(expected[i]);
    CHECK_EQ(*std::max_element(expected.begin(), expected.end()), static_cast<float>(k) * 16129.0f);
    CHECK_SAME_BITS(blocks.down(rows, 0, 20), expected, 32);
    for (std::size_t r = 0; r < 4; ++r) {
      const std::vector<float> row(expected.begin() + static_cast<std::ptrdiff_t>(32 * r),
                                   expected.begin() + static_cast<std::ptrdiff_t>(32 * (r + 1)));
      CHECK_SAME_BITS(blocks.down(rows, r, 1), row, 32);
    }
  }
}

TEST_EACH_TIER("gemm: int8 sums are scaled by the channel first and the row second") {
  const FormatCase c{tier.name, tier.table, Format::kInt8};
  Random random{4};
  const std::size_t k = 64;
  std::vector<float> x = random.gaussians(40 * k);
  Blocks blocks = random_blocks(Format::kInt8, 1, k, random);
  std::vector<float> scales = random.gaussians(32);
  for (std::size_t i = 0; i < 32; ++i) blocks.set_scale(i, scales[i]);
  const Rows rows(c, x, k);
  std::vector<float> expected, q(k);
  for (std::size_t r = 0; r < 40; ++r) {
    alignas(64) std::int8_t bytes[k];
    const float row_scale = tier.table->quantize(x.data() + r * k, k, bytes);
    CHECK_EQ(row_scale, rows.scales[r]);
    for (std::size_t i = 0; i < k; ++i) q[i] = static_cast<float>(bytes[i]);
    for (std::size_t i = 0; i < 32; ++i) {
      expected.push_back(static_cast<float>(blocks.product(i, q.data())) * scales[i] * row_scale);
    }
  }
  CHECK_SAME_BITS(blocks.down(rows, 0, 40), expected, 32);
  CHECK_SAME_BITS(blocks.down(rows, 39, 1), std::vector<float>(expected.end() - 32, expected.end()), 32);
}
