// Quantised and packed weights: what comes back out, what fills the padding, and that neither tier nor threads show.
#include <cmath>
#include <cstring>

#include "each_tier.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::Format;
using kt::PackedExperts;
using kt::check::Layer;
using kt::check::make_layer;
using kt::check::Shape;

namespace {

constexpr std::size_t kSizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 130};

struct Unpacked {
  std::vector<float> gate, up, down;
};

Unpacked unpack(const PackedExperts& packed, std::size_t expert) {
  const std::size_t n = packed.layout().hidden * packed.layout().intermediate;
  Unpacked u{std::vector<float>(n), std::vector<float>(n), std::vector<float>(n)};
  packed.unpack(kt::check::generic(), expert, u.gate.data(), u.up.data(), u.down.data());
  return u;
}

std::vector<double> part(const std::vector<float>& all, std::size_t begin, std::size_t n) {
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(n)};
}

// A quantisation step is max/127 and errs by half of it at most. Rotating back averages the errors of a block, and no
// rotated number is larger than the sum of magnitudes. A thousandth more for the roundings of fp32.
double int8_bound(const std::vector<double>& row, bool rotated) {
  double largest = 0.0, sum = 0.0;
  for (const double w : row) largest = std::max(largest, std::fabs(w)), sum += std::fabs(w);
  return (rotated ? sum : largest) / 127 / 2 * 1.001;
}

void check_rows(const std::vector<float>& got, const Layer& layer, const std::vector<float>& weights,
                std::size_t expert, std::size_t inputs, Format format, bool rotated) {
  for (std::size_t begin = 0; begin < got.size(); begin += inputs) {
    const std::vector<double> row = part(weights, expert * layer.matrix() + begin, inputs);
    const double bound = int8_bound(row, rotated);
    for (std::size_t i = 0; i < inputs; ++i) {
      const auto value = static_cast<double>(got[begin + i]);
      if (format == Format::kBf16) {
        CHECK_EQ(value, kt::check::bf16_value(kt::check::nearest_bf16(static_cast<float>(row[i]))));
      } else {
        CHECK(std::fabs(value - row[i]) <= bound);
      }
    }
  }
}

void check_round_trip(const Shape& shape, Format format, bool rotated) {
  const Layer layer = make_layer(shape, 3);
  const auto packed = kt::check::pack(layer, format, rotated);
  for (std::size_t e = 0; e < shape.experts; ++e) {
    const Unpacked u = unpack(*packed, e);
    check_rows(u.gate, layer, layer.gate, e, shape.hidden, format, rotated);
    check_rows(u.up, layer, layer.up, e, shape.hidden, format, rotated);
    check_rows(u.down, layer, layer.down, e, shape.intermediate, format, rotated);
  }
}

bool same_bytes(const PackedExperts& a, const PackedExperts& b) {
  return std::memcmp(a.data(), b.data(), a.layout().bytes()) == 0;
}

}  // namespace

TEST("pack: unpacking gives the weights back within half a step, for every size up to 130") {
  for (std::size_t n = 1; n <= 130; ++n) {
    const std::size_t other = kSizes[n % std::size(kSizes)];
    for (const bool rotated : {false, true}) {
      check_round_trip({1, n, other}, Format::kInt8, rotated);
      check_round_trip({1, other, n}, Format::kInt8, rotated);
    }
    check_round_trip({1, n, other}, Format::kBf16, false);
    check_round_trip({1, other, n}, Format::kBf16, false);
  }
}

TEST("pack: experts do not overlap") {
  for (const Format format : {Format::kInt8, Format::kBf16}) check_round_trip({5, 33, 47}, format, true);
}

TEST("pack: rotation makes an outlier cost little") {
  Layer layer = make_layer({1, 512, 16}, 4);
  for (std::size_t c = 0; c < 16; ++c) layer.gate[c * 512 + 100] *= 1e3f;
  const auto error_without_outlier = [&](bool rotated) {
    Unpacked u = unpack(*kt::check::pack(layer, Format::kInt8, rotated), 0);
    std::vector<double> expected = part(layer.gate, 0, layer.gate.size());
    for (std::size_t c = 0; c < 16; ++c) expected[c * 512 + 100] = u.gate[c * 512 + 100];
    return kt::check::relative_error(u.gate, expected);
  };
  CHECK(error_without_outlier(true) < 0.5 * error_without_outlier(false));
}

TEST("pack: the padding of channels and inputs is zero, with scale and sum zero") {
  Layer layer = make_layer({1, 37, 21}, 5);
  const auto packed = kt::check::pack(layer, Format::kInt8, false);
  const kt::LayerLayout& l = packed->layout();
  const auto check_block = [&](const std::byte* block, const kt::MatrixLayout& m, std::size_t panel, std::size_t used) {
    for (std::size_t lane = 0; lane < 16; ++lane) {
      for (std::size_t k = 0; k < m.k_padded; ++k) {
        const auto value = static_cast<int>(block[kt::word_offset(k / 4, panel, lane) + k % 4]);
        if (lane >= used || k >= m.inputs) CHECK_EQ(value, 0);
      }
      float scale;
      std::int32_t sum;
      std::memcpy(&scale, block + m.block_bytes - 256 + 4 * (16 * panel + lane), 4);
      std::memcpy(&sum, block + m.block_bytes - 128 + 4 * (16 * panel + lane), 4);
      CHECK_EQ(scale > 0.0f, lane < used);
      if (lane >= used) CHECK_EQ(sum, 0);
    }
  };
  const std::byte* last = packed->data() + l.gate_up.block_bytes;  // channels 16 … 20 of 21
  for (const std::size_t panel : {0, 1}) check_block(last, l.gate_up, panel, 5);
  const std::byte* down = packed->data() + l.down_offset(0) + l.down.block_bytes;  // channels 32 … 36 of 37
  check_block(down, l.down, 0, 5);
  check_block(down, l.down, 1, 0);
}

TEST("pack: channel sums are the sums of the stored bytes, and -128 is never stored") {
  const auto packed = kt::check::pack(make_layer({2, 200, 65}, 6), Format::kInt8, true);
  const kt::LayerLayout& l = packed->layout();
  for (std::size_t b = 0; b < l.gate_up.blocks; ++b) {
    const std::byte* block = packed->data() + l.gate_up_offset(1) + b * l.gate_up.block_bytes;
    for (std::size_t channel = 0; channel < 32; ++channel) {
      std::int32_t sum = 0, stored;
      for (std::size_t k = 0; k < l.gate_up.k_padded; ++k) {
        const std::byte byte = block[kt::word_offset(k / 4, channel / 16, channel % 16) + k % 4];
        CHECK(byte != std::byte{0x80});
        sum += static_cast<std::int8_t>(byte);
      }
      std::memcpy(&stored, block + l.gate_up.block_bytes - 128 + 4 * channel, 4);
      CHECK_EQ(stored, sum);
    }
  }
}

TEST_EACH_FORMAT("pack: same bytes whatever tier and however many threads pack") {
  for (const Shape& shape : {Shape{2, 130, 33}, Shape{1, 1, 200}, Shape{1, 513, 64}}) {
    const Layer layer = make_layer(shape, 8);
    for (const bool rotated : {false, true}) {
      const auto expected = kt::check::pack(layer, c.format, rotated);
      for (const std::size_t threads : {1, 2, 3, 7}) {
        CHECK(same_bytes(*kt::check::pack(layer, c.format, rotated, c.table, threads), *expected));
      }
    }
  }
}
