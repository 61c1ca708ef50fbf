// A linear layer: values against references, and what must not change a row's bits.
#include "linear/linear.hpp"

#include <algorithm>
#include <cmath>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::DType;
using kt::Format;
using kt::check::context;
using kt::check::Random;

namespace {

struct Matrix {
  std::size_t channels, inputs;
  std::vector<float> weights;  // (N, K)
  std::vector<float> bias;     // (N), or empty
};

Matrix make_matrix(std::size_t channels, std::size_t inputs, bool biased) {
  Random random{channels, inputs, biased};
  Matrix m{channels, inputs, random.gaussians(channels * inputs), {}};
  if (biased) m.bias = random.gaussians(channels, std::sqrt(static_cast<float>(inputs)));
  return m;
}

kt::WeightView view(const Matrix& m) {
  return {m.weights.data(), DType::kF32, static_cast<std::ptrdiff_t>(m.inputs), 1,
          m.bias.empty() ? nullptr : m.bias.data()};
}

std::shared_ptr<kt::PackedMatrix> pack(const Matrix& m, Format format, bool rotate = true) {
  auto packed =
      std::make_shared<kt::PackedMatrix>(kt::default_traits(format), rotate, !m.bias.empty(), m.channels, m.inputs);
  packed->pack(*context(1), kt::check::generic(), view(m), "linear");
  return packed;
}

// The matrix that a packed one stands for, where the format is coarser than the bound on the arithmetic.
Matrix as_packed(const Matrix& m, Format format) {
  if (format == Format::kInt8 || format == Format::kBf16) return m;
  Matrix known = m;
  pack(m, format)->unpack(kt::check::generic(), known.weights.data());
  return known;
}

std::vector<float> run(const std::shared_ptr<kt::PackedMatrix>& packed, const kt::TierTable& table,
                       const std::vector<float>& x, std::size_t threads = 1) {
  const std::size_t rows = x.size() / packed->layout().inputs;
  std::vector<float> y(rows * packed->channels(), 12345.0f);
  kt::Linear(context(threads), packed, table).forward({rows, x.data(), DType::kF32, y.data(), DType::kF32});
  return y;
}

std::vector<float> part(const std::vector<float>& rows, std::size_t begin, std::size_t end, std::size_t width) {
  return {rows.begin() + static_cast<std::ptrdiff_t>(begin * width),
          rows.begin() + static_cast<std::ptrdiff_t>(end * width)};
}

std::vector<double> float64_linear(const Matrix& m, const std::vector<float>& x, bool bf16) {
  const auto value = [&](float v) {
    return bf16 ? kt::check::bf16_value(kt::check::nearest_bf16(v)) : static_cast<double>(v);
  };
  std::vector<double> y;
  for (std::size_t r = 0; r < x.size() / m.inputs; ++r) {
    for (std::size_t c = 0; c < m.channels; ++c) {
      double sum = m.bias.empty() ? 0.0 : static_cast<double>(m.bias[c]);
      for (std::size_t i = 0; i < m.inputs; ++i) sum += value(x[r * m.inputs + i]) * value(m.weights[c * m.inputs + i]);
      y.push_back(sum);
    }
  }
  return y;
}

constexpr std::pair<std::size_t, std::size_t> kShapes[] = {{1, 1},   {33, 1},   {1, 65},   {31, 64},
                                                           {32, 63}, {97, 130}, {40, 700}, {300, 512}};

}  // namespace

TEST_EACH_TIER("linear: the bits of the INT8 contract for any shape, with and without biases and rotation") {
  for (const auto& [channels, inputs] : kShapes) {
    for (const bool biased : {false, true}) {
      const Matrix m = make_matrix(channels, inputs, biased);
      const std::vector<float> x = Random{inputs, 7}.gaussians(5 * inputs);
      for (const bool rotate : {false, true}) {
        const std::vector<float> expected = kt::check::int8_linear(m.weights, m.bias, x, inputs, rotate);
        CHECK_SAME_BITS(run(pack(m, Format::kInt8, rotate), *tier.table, x), expected, channels);
      }
    }
  }
}

TEST_EACH_FORMAT("linear: close to float64") {
  for (const auto& [channels, inputs] : kShapes) {
    const Matrix m = make_matrix(channels, inputs, true);
    const std::vector<float> x = Random{inputs, 8}.gaussians(6 * inputs);
    const bool bf16 = c.format == Format::kBf16;
    const double error =
        kt::check::relative_error(run(pack(m, c.format), *c.table, x), float64_linear(as_packed(m, c.format), x, bf16));
    CHECK(error < (bf16 ? 1e-6 : 0.02));
  }
}

TEST_EACH_FORMAT("linear: a row alone, in a batch of any size and on any number of threads gives the same bits") {
  const Matrix m = make_matrix(97, 130, true);
  const auto packed = pack(m, c.format);
  const std::size_t rows = 80;
  const std::vector<float> x = Random{9}.gaussians(rows * 130);
  const std::vector<float> all = run(packed, *c.table, x);
  for (std::size_t r = 0; r < rows; ++r) {
    CHECK_SAME_BITS(run(packed, *c.table, part(x, r, r + 1, 130)), part(all, r, r + 1, 97), 97);
  }
  for (std::size_t n = 2; n < rows; ++n) {
    CHECK_SAME_BITS(run(packed, *c.table, part(x, rows - n, rows, 130)), part(all, rows - n, rows, 97), 97);
  }
  for (const std::size_t threads : {2, 3, 7}) CHECK_SAME_BITS(run(packed, *c.table, x, threads), all, 97);
}

TEST_EACH_FORMAT("linear: rows in several tasks and chunks give the same bits") {
  const Matrix m = make_matrix(70, 33, false);
  const auto packed = pack(m, c.format);
  const std::size_t rows = 2100;  // three chunks of 1024, each of several tasks
  const std::vector<float> x = Random{10}.gaussians(rows * 33);
  const std::vector<float> all = run(packed, *c.table, x, 3);
  for (const std::size_t r : {0, 255, 256, 1023, 1024, 2047, 2048, 2099}) {
    CHECK_SAME_BITS(run(packed, *c.table, part(x, r, r + 1, 33)), part(all, r, r + 1, 70), 70);
  }
}

TEST_EACH_FORMAT("linear: more channels than a task holds") {
  const Matrix m = make_matrix(2200, 3, false);
  const auto packed = pack(m, c.format);
  const std::vector<float> x = Random{11}.gaussians(40 * 3);
  const std::vector<float> all = run(packed, *c.table, x, 2);
  CHECK_SAME_BITS(run(packed, *c.table, part(x, 39, 40, 3)), part(all, 39, 40, 2200), 2200);
  CHECK(kt::check::relative_error(all, float64_linear(as_packed(m, c.format), x, false)) < 0.02);
}

TEST_EACH_FORMAT("linear: a NaN or an infinity stays in its row") {
  const Matrix m = make_matrix(65, 100, true);
  const auto packed = pack(m, c.format);
  std::vector<float> x = Random{12}.gaussians(20 * 100);
  const std::vector<float> expected = run(packed, *c.table, x);
  x[3 * 100 + 17] = std::nanf("");
  x[11 * 100 + 99] = INFINITY;
  const std::vector<float> y = run(packed, *c.table, x);
  for (std::size_t r = 0; r < 20; ++r) {
    const std::vector<float> row = part(y, r, r + 1, 65);
    if (r == 3 || r == 11) {
      CHECK(!kt::check::all_finite(row.data(), 65));
    } else {
      CHECK_SAME_BITS(row, part(expected, r, r + 1, 65), 65);
    }
  }
}

TEST_EACH_FORMAT("linear: 16-bit inputs and outputs are the rounded fp32 ones") {
  const Matrix m = make_matrix(45, 70, true);
  const auto packed = pack(m, c.format);
  kt::Linear linear(context(2), packed, *c.table);
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const auto narrow = dtype == DType::kBf16 ? kt::check::nearest_bf16 : kt::check::nearest_f16;
    const auto value = dtype == DType::kBf16 ? kt::check::bf16_value : kt::check::f16_value;
    std::vector<float> x = Random{13}.gaussians(9 * 70);
    std::vector<std::uint16_t> in, out(9 * 45);
    for (float& v : x) in.push_back(narrow(v)), v = static_cast<float>(value(narrow(v)));
    linear.forward({9, in.data(), dtype, out.data(), dtype});
    const std::vector<float> wide = run(packed, *c.table, x);
    std::vector<std::uint16_t> expected;
    for (const float v : wide) expected.push_back(narrow(v));
    CHECK_EQ(out == expected, true);
  }
}

TEST_EACH_FORMAT("linear: no rows, nothing written") {
  const auto packed = pack(make_matrix(8, 8, false), c.format);
  kt::Linear(context(1), packed, *c.table).forward({0, nullptr, DType::kF32, nullptr, DType::kF32});
}

TEST("linear: packed bytes are the same by any tier and number of threads") {
  const Matrix m = make_matrix(75, 130, true);
  for (const Format format : {Format::kInt8, Format::kBf16}) {
    const auto expected = pack(m, format);
    for (const auto& tier : kt::check::runnable_tiers()) {
      kt::PackedMatrix other({.format = format}, true, true, 75, 130);
      other.pack(*context(3), *tier.table, view(m), "linear");
      CHECK(std::equal(other.data(), other.data() + other.layout().bytes(), expected->data()));
    }
  }
}

TEST("linear: unpacked weights are those that were packed, to the format's rounding") {
  const Matrix m = make_matrix(40, 90, true);
  for (const Format format : {Format::kInt8, Format::kBf16}) {
    std::vector<float> back(40 * 90);
    pack(m, format)->unpack(kt::check::generic(), back.data());
    const std::vector<double> wanted(m.weights.begin(), m.weights.end());
    CHECK(kt::check::relative_error(back, wanted) < (format == Format::kBf16 ? 0.003 : 0.02));
  }
}

TEST("linear: sizes, weights and biases that cannot be are refused by name") {
  const auto make = [](Format format, std::size_t channels, std::size_t inputs) {
    kt::PackedMatrix({.format = format}, true, false, channels, inputs);
  };
  CHECK_THROWS(make(Format::kInt8, 0, 5), kt::Error, "at least 1 input and 1 channel");
  CHECK_THROWS(make(Format::kBf16, 5, 0), kt::Error, "at least 1 input and 1 channel");
  CHECK_THROWS(make(Format::kInt8, 1, 65537), kt::Error, "INT8 takes at most 65536 inputs");
  Matrix m = make_matrix(40, 90, true);
  m.weights[33 * 90 + 7] = INFINITY;
  CHECK_THROWS(pack(m, Format::kInt8), kt::WeightsValueError, "linear weight at channel 33, input 7 is infinite");
  m = make_matrix(40, 90, true);
  m.bias[5] = std::nanf("");
  CHECK_THROWS(pack(m, Format::kBf16), kt::WeightsValueError, "linear bias of channel 5 is NaN");
  kt::PackedMatrix biased({.format = Format::kInt8}, true, true, 40, 90);
  m.bias.clear();
  CHECK_THROWS(biased.pack(*context(1), kt::check::generic(), view(m), "linear"), kt::Error, "needs its biases");
}
