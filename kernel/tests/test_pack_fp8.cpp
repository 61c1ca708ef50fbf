// FP8 weights: codes and scales of a source kept as they are, floats quantised block by block.
#include <cmath>
#include <cstring>
#include <limits>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"
#include "pack/fp8.hpp"
#include "reference.hpp"

using kt::Format;
using kt::Fp8ExpertSource;
using kt::Fp8View;
using kt::LayerLayout;
using kt::PackedExperts;
using kt::check::e4m3_value;
using kt::check::nearest_e4m3;
using kt::check::Random;

namespace {

struct Fp8Data {
  std::size_t channels, inputs, block_channels, block_inputs;
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;

  std::size_t scale_columns() const { return (inputs + block_inputs - 1) / block_inputs; }
  float weight(std::size_t channel, std::size_t input) const {
    return static_cast<float>(e4m3_value(codes[channel * inputs + input])) *
           scales[channel / block_channels * scale_columns() + input / block_inputs];
  }
  Fp8View view() const {
    return {.codes = codes.data(),
            .channel_stride = static_cast<std::ptrdiff_t>(inputs),
            .scales = scales.data(),
            .scale_stride = static_cast<std::ptrdiff_t>(scale_columns()),
            .block_channels = block_channels,
            .block_inputs = block_inputs};
  }
};

Fp8Data random_fp8(std::size_t channels, std::size_t inputs, std::size_t block_channels, std::size_t block_inputs,
                   Random& random) {
  Fp8Data data{channels, inputs, block_channels, block_inputs, {}, {}};
  for (std::size_t i = 0; i < channels * inputs; ++i) {
    const auto code = static_cast<std::uint8_t>(random.below(256));
    data.codes.push_back((code & 0x7f) == 0x7f ? 0x80 : code);
  }
  const std::size_t rows = (channels + block_channels - 1) / block_channels;
  for (std::size_t i = 0; i < rows * data.scale_columns(); ++i)
    data.scales.push_back(0.001f + 0.01f * random.uniform());
  return data;
}

struct Unpacked {
  std::vector<float> gate, up, down;
};

Unpacked unpack(const PackedExperts& packed) {
  const std::size_t n = packed.layout().hidden * packed.layout().intermediate;
  Unpacked u{std::vector<float>(n), std::vector<float>(n), std::vector<float>(n)};
  packed.unpack(kt::check::generic(), 0, u.gate.data(), u.up.data(), u.down.data());
  return u;
}

void check_weights(const std::vector<float>& got, const Fp8Data& data) {
  std::vector<float> expected;
  for (std::size_t c = 0; c < data.channels; ++c) {
    for (std::size_t i = 0; i < data.inputs; ++i) expected.push_back(data.weight(c, i));
  }
  CHECK_SAME_BITS(got, expected, data.inputs);
}

PackedExperts packed_as_is(std::size_t hidden, std::size_t inner, const Fp8ExpertSource& source, bool gated = true,
                           bool biased = false, std::size_t threads = 2) {
  PackedExperts packed(LayerLayout(Format::kFp8, {.gated = gated, .biased = biased}, 1, hidden, inner));
  packed.pack(*kt::check::context(threads), 0, source);
  return packed;
}

Fp8Data ones(std::size_t channels, std::size_t inputs, std::size_t block_channels, std::size_t block_inputs) {
  Random random{7};
  return random_fp8(channels, inputs, block_channels, block_inputs, random);
}

void check_refused(std::size_t block_channels, std::size_t block_inputs) {
  const Fp8Data gate = ones(160, 256, block_channels, block_inputs), down = ones(256, 160, 128, 128);
  CHECK_THROWS(packed_as_is(256, 160, {gate.view(), gate.view(), down.view()}), kt::WeightsValueError, "does not fit");
}

}  // namespace

TEST("fp8 conversions: every code is its value, and every value its code") {
  for (int i = 0; i < 256; ++i) {
    const auto code = static_cast<std::uint8_t>(i);
    if ((code & 0x7f) != 0x7f) CHECK_EQ(static_cast<int>(nearest_e4m3(static_cast<float>(e4m3_value(code)))), i);
  }
}

TEST("pack fp8: block scales and channel scales of a source come back as they were, for every tail") {
  Random random{1};
  for (const std::size_t hidden : {1, 17, 64, 100, 129, 300}) {
    for (const std::size_t inner : {1, 33, 128, 130, 257}) {
      const auto make = [&](bool by_channel, std::size_t channels, std::size_t inputs) {
        return by_channel ? random_fp8(channels, inputs, 1, inputs, random)
                          : random_fp8(channels, inputs, 128, 128, random);
      };
      for (const bool by_channel : {false, true}) {
        const Fp8Data gate = make(by_channel, inner, hidden), up = make(!by_channel, inner, hidden),
                      down = make(by_channel, hidden, inner);
        const Unpacked u = unpack(packed_as_is(hidden, inner, {gate.view(), up.view(), down.view()}));
        check_weights(u.gate, gate), check_weights(u.up, up), check_weights(u.down, down);
      }
    }
  }
}

TEST("pack fp8: one scale for a matrix, and blocks of other sizes that fit") {
  Random random{2};
  for (const auto& [block_channels, block_inputs] :
       {std::pair<std::size_t, std::size_t>{1000, 1000}, {16, 128}, {32, 256}, {256, 128}, {3, 400}, {1000, 128}}) {
    const Fp8Data gate = random_fp8(200, 400, block_channels, block_inputs, random),
                  up = random_fp8(200, 400, block_channels, block_inputs, random),
                  down = random_fp8(400, 200, 128, 128, random);
    const Unpacked u = unpack(packed_as_is(400, 200, {gate.view(), up.view(), down.view()}));
    check_weights(u.gate, gate), check_weights(u.up, up), check_weights(u.down, down);
  }
}

TEST("pack fp8: blocks finer than the packed form are refused with their size") {
  for (const auto& [block_channels, block_inputs] :
       {std::pair<std::size_t, std::size_t>{1, 128}, {128, 64}, {8, 128}}) {
    check_refused(block_channels, block_inputs);
  }
}

TEST("pack fp8: up behind gate in one matrix, its blocks counted from the matrix's beginning") {
  Random random{3};
  const std::size_t inner = 80, hidden = 256;  // 80 is not a multiple of 128: a block has channels of both
  const Fp8Data both = random_fp8(2 * inner, hidden, 128, 128, random),
                down = random_fp8(hidden, inner, 128, 128, random);
  Fp8View up = both.view();
  up.codes += inner * hidden;
  up.first_channel = inner;
  const Unpacked u = unpack(packed_as_is(hidden, inner, {both.view(), up, down.view()}));
  std::vector<float> got = u.gate;
  got.insert(got.end(), u.up.begin(), u.up.end());
  check_weights(got, both);
}

TEST("pack fp8: transposed codes need no copy") {
  Random random{4};
  const Fp8Data gate = random_fp8(48, 130, 128, 128, random), down = random_fp8(130, 48, 128, 128, random);
  Fp8Data flipped = gate;
  for (std::size_t c = 0; c < 48; ++c) {
    for (std::size_t i = 0; i < 130; ++i) flipped.codes[i * 48 + c] = gate.codes[c * 130 + i];
  }
  Fp8View up = flipped.view();
  up.channel_stride = 1, up.input_stride = 48;
  const Unpacked u = unpack(packed_as_is(130, 48, {gate.view(), up, down.view()}));
  check_weights(u.up, gate);
}

TEST("pack fp8: NaN codes and scales that are not finite are refused with projection and place") {
  Random random{5};
  const Fp8Data gate = random_fp8(40, 200, 128, 128, random), down = random_fp8(200, 40, 128, 128, random);
  for (const int code : {0x7f, 0xff}) {
    Fp8Data bad = gate;
    bad.codes[33 * 200 + 150] = static_cast<std::uint8_t>(code);
    CHECK_THROWS(packed_as_is(200, 40, {gate.view(), bad.view(), down.view()}), kt::WeightsValueError,
                 "up weight at channel 33, input 150 is NaN");
  }
  Fp8Data bad = gate;
  bad.scales[1] = std::numeric_limits<float>::infinity();
  CHECK_THROWS(packed_as_is(200, 40, {bad.view(), gate.view(), down.view()}), kt::WeightsValueError,
               "gate scale of channel 0 from input 128 on is infinite");
  Fp8Data by_channel = random_fp8(200, 40, 1, 40, random);
  by_channel.scales[150] = std::nanf("");
  CHECK_THROWS(packed_as_is(200, 40, {gate.view(), gate.view(), by_channel.view()}), kt::WeightsValueError,
               "down scale of channel 150 from input 0 on is NaN");
}

TEST("pack fp8: codes are for a layer whose matrices are FP8") {
  const Fp8Data gate = ones(8, 8, 1, 8);
  PackedExperts packed(LayerLayout(Format::kInt8, {}, 1, 8, 8));
  CHECK_THROWS(packed.pack(*kt::check::context(1), 0, {gate.view(), gate.view(), gate.view()}), kt::Error, "FP8");
}

// The contract of quantising: 16 channels x 128 inputs share absmax/448, nearest code, ties to even.
TEST("pack fp8: floats are quantised in blocks of 16 channels and 128 inputs to the nearest code") {
  const std::size_t hidden = 200, inner = 21;
  kt::check::Layer layer = kt::check::make_layer({1, hidden, inner}, 6);
  layer.gate[5 * hidden + 3] = 1000.0f;                                         // a block with an outlier
  for (std::size_t i = 0; i < 16 * hidden; ++i) layer.up[i] = 0.0f;             // blocks of zeros
  for (std::size_t i = 0; i < layer.down.size(); ++i) layer.down[i] *= 1e-44f;  // scales that round to zero
  const Unpacked u = unpack(*kt::check::pack(layer, Format::kFp8));
  const auto check = [](const std::vector<float>& got, const std::vector<float>& w, std::size_t channels,
                        std::size_t inputs) {
    std::vector<float> expected(w.size());
    for (std::size_t c = 0; c < channels; ++c) {
      for (std::size_t i = 0; i < inputs; ++i) {
        float most = 0.0f;
        for (std::size_t cc = c / 16 * 16; cc < std::min(channels, c / 16 * 16 + 16); ++cc) {
          for (std::size_t ii = i / 128 * 128; ii < std::min(inputs, i / 128 * 128 + 128); ++ii) {
            most = std::max(most, std::fabs(w[cc * inputs + ii]));
          }
        }
        const float scale = most / 448.0f;
        const std::uint8_t code = scale == 0.0f ? 0 : nearest_e4m3(w[c * inputs + i] / scale);
        expected[c * inputs + i] = static_cast<float>(e4m3_value(code)) * scale;
      }
    }
    CHECK_SAME_BITS(got, expected, inputs);
  };
  check(u.gate, layer.gate, inner, hidden);
  check(u.up, layer.up, inner, hidden);
  check(u.down, layer.down, hidden, inner);
}

TEST("pack fp8: quantised floats err by 2.7 % at most, in one matrix of Gaussian weights") {
  const kt::check::Layer layer = kt::check::make_layer({1, 512, 256}, 8);
  const Unpacked u = unpack(*kt::check::pack(layer, Format::kFp8));
  CHECK(kt::check::relative_error(u.gate, {layer.gate.begin(), layer.gate.end()}) <= 0.027);
  CHECK(kt::check::relative_error(u.down, {layer.down.begin(), layer.down.end()}) <= 0.027);
}

TEST("pack fp8: same bytes however many threads lay out, biases and padding included") {
  Random random{9};
  const std::size_t hidden = 150, inner = 70;
  const Fp8Data gate = random_fp8(inner, hidden, 128, 128, random), down = random_fp8(hidden, inner, 1, inner, random);
  const std::vector<float> inner_bias = random.gaussians(inner), hidden_bias = random.gaussians(hidden);
  Fp8ExpertSource source{gate.view(), gate.view(), down.view()};
  source.gate.bias = source.up.bias = inner_bias.data();
  source.down.bias = hidden_bias.data();
  const PackedExperts one = packed_as_is(hidden, inner, source, true, true, 1);
  for (const std::size_t threads : {2, 3, 7}) {
    const PackedExperts many = packed_as_is(hidden, inner, source, true, true, threads);
    CHECK(std::memcmp(one.data(), many.data(), one.layout().bytes()) == 0);
  }
}
