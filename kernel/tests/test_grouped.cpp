// Weights that come quantised in groups: packed without a change of value, multiplied by the contract's arithmetic.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"
#include "pack/group_search.hpp"

using kt::DType;
using kt::Format;
using kt::Gate;
using kt::LayerLayout;
using kt::Levels;
using kt::MatrixTraits;
using kt::PackedExperts;
using kt::check::Batch;
using kt::check::Random;

namespace {

constexpr std::size_t kGroups[] = {16, 32, 64, 128};

// The whole numbers of each kind of levels, written down again.
std::vector<int> numbers_of(Levels levels) {
  switch (levels) {
    case Levels::kInt4:
      return {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    case Levels::kUint4:
      return {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    case Levels::kE2m1:
      return {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12};
    case Levels::kNormal4:
      return {-35, -29, -22, -17, -13, -9, -6, -3, 0, 3, 6, 9, 13, 17, 22, 28};
    case Levels::kInt8:
      break;
  }
  std::vector<int> all;
  for (int v = -128; v < 128; ++v) all.push_back(v);
  return all;
}

// values (N, K), scales and minimums (N, ceil(K / group)).
struct Source {
  MatrixTraits traits;
  std::size_t channels, inputs, groups;
  std::vector<std::int8_t> values;
  std::vector<float> scales, minimums;

  Source(const MatrixTraits& traits, std::size_t channels, std::size_t inputs, Random& random)
      : traits(traits), channels(channels), inputs(inputs), groups((inputs + traits.group - 1) / traits.group) {
    const std::vector<int> numbers = numbers_of(traits.levels);
    for (std::size_t i = 0; i < channels * inputs; ++i) {
      values.push_back(static_cast<std::int8_t>(numbers[random.below(numbers.size())]));
    }
    for (std::size_t i = 0; i < channels * groups; ++i) scales.push_back(a_scale(random));
    if (!traits.minimums) return;
    for (std::size_t i = 0; i < channels * groups; ++i) minimums.push_back(-8.0f * a_scale(random));
  }

  // With as many bits as the dtype has.
  float a_scale(Random& random) const {
    const int bits = traits.scales == DType::kF32 ? 24 : traits.scales == DType::kF16 ? 11 : 8;
    const float x = static_cast<float>(random.between(1 << (bits - 1), (1 << bits) - 1));
    return std::ldexp(x, -bits - 4) * (random.below(5) == 0 ? -1.0f : 1.0f);
  }

  float weight(std::size_t n, std::size_t k) const {
    const std::size_t g = n * groups + k / traits.group;
    const float scaled = static_cast<float>(values[n * inputs + k]) * scales[g];
    return traits.minimums ? scaled + minimums[g] : scaled;
  }

  kt::WeightView view() const {
    kt::WeightView view;
    view.data = values.data();
    view.channel_stride = static_cast<std::ptrdiff_t>(inputs);
    view.scales = scales.data();
    view.minimums = traits.minimums ? minimums.data() : nullptr;
    view.scale_stride = static_cast<std::ptrdiff_t>(groups);
    return view;
  }
};

std::shared_ptr<PackedExperts> pack(const Source& up, const Source& down, std::size_t threads = 1) {
  auto packed = std::make_shared<PackedExperts>(
      LayerLayout(up.traits, down.traits, {.rotated = false, .gated = false}, 1, up.inputs, up.channels));
  packed->pack(*kt::check::context(threads), kt::check::generic(), 0, {{}, up.view(), down.view()});
  return packed;
}

// One row times a matrix, by the contract: 8-bit activations a segment, exact sums, then one rounding an operation.
std::vector<float> product(const Source& w, const std::vector<float>& x) {
  const std::size_t segment = std::min<std::size_t>(w.traits.group, 32);
  std::vector<float> y(w.channels, 0.0f);
  for (std::size_t first = 0; first < w.inputs; first += w.traits.group) {
    float minimum_factor = 0.0f;
    for (std::size_t s = first; s < std::min(first + w.traits.group, w.inputs); s += segment) {
      const std::size_t end = std::min(s + segment, w.inputs);
      float most = 0.0f;
      for (std::size_t k = s; k < end; ++k) most = std::max(most, std::fabs(x[k]));
      std::vector<int> q(end - s, 0);
      if (most >= 1e-35f) {
        const float inverse = 127.0f / most;
        for (std::size_t k = s; k < end; ++k) q[k - s] = static_cast<int>(std::nearbyint(x[k] * inverse));
      }
      const float row_scale = most >= 1e-35f ? most / 127.0f : 0.0f;
      int total = 0;
      for (const int value : q) total += value;
      minimum_factor += static_cast<float>(total) * row_scale;
      for (std::size_t n = 0; n < w.channels; ++n) {
        int sum = 0;
        for (std::size_t k = s; k < end; ++k) sum += q[k - s] * w.values[n * w.inputs + k];
        y[n] += static_cast<float>(sum) * w.scales[n * w.groups + s / w.traits.group] * row_scale;
      }
    }
    if (!w.traits.minimums) continue;
    for (std::size_t n = 0; n < w.channels; ++n) {
      y[n] += w.minimums[n * w.groups + first / w.traits.group] * minimum_factor;
    }
  }
  return y;
}

std::vector<MatrixTraits> all_traits() {
  std::vector<MatrixTraits> all;
  for (const Levels levels : {Levels::kInt4, Levels::kUint4, Levels::kE2m1, Levels::kInt8, Levels::kNormal4}) {
    for (const std::size_t group : kGroups) {
      // No two properties go together.
      const DType scales = std::array{DType::kF32, DType::kBf16, DType::kF16}[all.size() % 3];
      const Format format = levels == Levels::kInt8 ? Format::kInt8Grouped : Format::kInt4;
      const bool minimums = (all.size() / 2) % 2 == 1 || levels == Levels::kUint4;
      all.push_back({.format = format, .group = group, .levels = levels, .minimums = minimums, .scales = scales});
    }
  }
  return all;
}

}  // namespace

TEST("grouped: what comes quantised unpacks to exactly its values, on any number of threads") {
  Random random{1};
  for (const MatrixTraits& traits : all_traits()) {
    for (const std::size_t inputs : {1, 16, 63, 200, 256}) {
      const Source up(traits, 37, inputs, random), down(traits, inputs, 37, random);
      const auto packed = pack(up, down, 1 + inputs % 3);
      std::vector<float> got_up(37 * inputs), got_down(37 * inputs), none;
      packed->unpack(kt::check::generic(), 0, none.data(), got_up.data(), got_down.data());
      for (std::size_t i = 0; i < got_up.size(); ++i) {
        CHECK_EQ(got_up[i], up.weight(i / inputs, i % inputs));
        CHECK_EQ(got_down[i], down.weight(i / 37, i % 37));
      }
    }
  }
}

TEST_EACH_TIER("grouped: products are the contract's scalar arithmetic, bit for bit") {
  Random random{2};
  for (const MatrixTraits& traits : all_traits()) {
    const Source up(traits, 40, 136, random), down(traits, 136, 40, random);
    const Gate gate{.activation = kt::Activation::kRelu, .gated = false};
    kt::check::Kernel kernel(pack(up, down), gate, *tier.table, {1, 100});
    Batch batch = kt::check::make_batch({1, 136, 40}, 70, 1);
    for (float& weight : batch.weights) weight = 1.0f;
    std::vector<float> expected;
    for (std::size_t t = 0; t < batch.tokens; ++t) {
      const auto first = batch.x.begin() + static_cast<std::ptrdiff_t>(t * 136);
      std::vector<float> inner = product(up, {first, first + 136});
      for (float& value : inner) value = value > 0.0f ? value : 0.0f;
      const std::vector<float> y = product(down, inner);
      expected.insert(expected.end(), y.begin(), y.end());
    }
    for (const std::size_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 59, 60, 61, 70}) {  // every way for few and many
      const auto begin = expected.end() - static_cast<std::ptrdiff_t>(tokens * 136);
      CHECK_SAME_BITS(kernel(batch.slice(70 - tokens, 70)), std::vector<float>(begin, expected.end()), 136);
    }
  }
}

TEST_EACH_TIER("grouped: more inputs than are unpacked at once, for few and for many rows") {
  Random random{4};
  for (const MatrixTraits& traits : all_traits()) {
    const Source up(traits, 33, 1100, random), down(traits, 1100, 33, random);
    const Gate gate{.activation = kt::Activation::kRelu, .gated = false};
    kt::check::Kernel kernel(pack(up, down), gate, *tier.table), oracle(pack(up, down), gate, kt::check::generic());
    for (const std::size_t tokens : {1, 3, 8, 21, 40}) {
      const Batch batch = kt::check::make_batch({1, 1100, 33}, tokens, 1);
      CHECK_SAME_BITS(kernel(batch), oracle(batch), 1100);
    }
  }
}

TEST_EACH_TIER("grouped: the largest products of every levels do not saturate") {
  for (const MatrixTraits& traits : all_traits()) {
    Random random{3};
    Source up(traits, 33, 256, random), down(traits, 256, 33, random);
    const std::vector<int> numbers = numbers_of(traits.levels);
    for (std::size_t i = 0; i < up.values.size(); ++i) {
      const bool low = i / 256 % 2 == 0 || (i / 256 % 3 == 0 && i % 2 == 0);
      up.values[i] = static_cast<std::int8_t>(low ? numbers.front() : numbers.back());
    }
    const Gate gate{.activation = kt::Activation::kRelu, .gated = false};
    Batch batch = kt::check::make_batch({1, 256, 33}, 12, 1);
    for (std::size_t i = 0; i < batch.x.size(); ++i) {
      batch.x[i] = i / 256 % 3 == 0 || (i / 256 % 3 == 1 && i % 2 == 0) ? 1.0f : -1.0f;
    }
    kt::check::Kernel kernel(pack(up, down), gate, *tier.table);
    kt::check::Kernel oracle(pack(up, down), gate, kt::check::generic());
    const std::vector<float> expected = oracle(batch);
    CHECK_SAME_BITS(kernel(batch), expected, 256);
    for (std::size_t t = 0; t < 3; ++t) {
      const auto first = expected.begin() + static_cast<std::ptrdiff_t>(t * 256);
      CHECK_SAME_BITS(kernel(batch.slice(t, t + 1)), std::vector<float>(first, first + 256), 256);
    }
  }
}

TEST("grouped: a source that is not what the layout says is refused, with its place") {
  const MatrixTraits int4{.format = Format::kInt4, .group = 32, .levels = Levels::kInt4, .scales = DType::kBf16};
  Random random{4};
  const Source good(int4, 40, 64, random), down(int4, 64, 40, random);
  const auto refused = [&](const auto& change, const char* words) {
    Source bad = good;
    change(bad);
    CHECK_THROWS(pack(bad, down), kt::WeightsValueError, words);
  };
  refused([](Source& s) { s.values[33 * 64 + 5] = 8; }, "up value of channel 33, input 5 is 8");
  refused([](Source& s) { s.values[0] = -9; }, "none of the levels int4");
  refused([](Source& s) { s.scales[39 * 2 + 1] = std::nanf(""); }, "up scale of channel 39, group 1 is NaN");
  refused([](Source& s) { s.scales[0] = std::numeric_limits<float>::infinity(); }, "group 0 is infinite");
  refused([](Source& s) { s.scales[4] = 1.00001f; }, "up scale of channel 2, group 0 is 1.00001");
  CHECK(pack(good, down) != nullptr);
}

TEST("grouped: a quantised source is never quantised a second time") {
  const MatrixTraits int4{.format = Format::kInt4, .group = 32, .levels = Levels::kInt4};
  Random random{5};
  const Source up(int4, 32, 64, random), down(int4, 64, 32, random);
  const auto into = [&](const MatrixTraits& traits, bool rotated) {
    PackedExperts packed(LayerLayout(traits, traits, {.rotated = rotated, .gated = false}, 1, 64, 32));
    packed.pack(*kt::check::context(1), kt::check::generic(), 0, {{}, up.view(), down.view()});
  };
  CHECK_THROWS(into(kt::default_traits(Format::kInt8), false), kt::Error, "up comes quantised; the layout is INT8");
  CHECK_THROWS(into(int4, true), kt::Error, "INT4, rotated");
  MatrixTraits with_minimums = int4;
  with_minimums.minimums = true;
  CHECK_THROWS(into(with_minimums, false), kt::Error, "disagree on whether there are minimums");
}

TEST("grouped: traits that no layout has") {
  const auto make = [](Format format, std::size_t group, Levels levels) {
    const MatrixTraits traits{.format = format, .group = group, .levels = levels};
    LayerLayout(traits, traits, {}, 1, 64, 64);
  };
  CHECK_THROWS(make(Format::kInt4, 0, Levels::kInt4), kt::Error, "groups of 16, 32, 64 or 128 inputs, not 0");
  CHECK_THROWS(make(Format::kInt4, 48, Levels::kInt4), kt::Error, "not 48");
  CHECK_THROWS(make(Format::kInt4, 32, Levels::kInt8), kt::Error, "INT4 does not hold the levels int8");
  CHECK_THROWS(make(Format::kInt8Grouped, 32, Levels::kUint4), kt::Error, "INT8_GROUPED does not hold");
  for (const Format format : {Format::kInt8, Format::kBf16, Format::kFp8}) {
    CHECK_THROWS(make(format, 1000, Levels::kInt4), kt::Error, "has no groups and no minimums");
  }
  const MatrixTraits traits;
  CHECK_THROWS(LayerLayout(traits, traits, {}, 1, 64, std::numeric_limits<std::size_t>::max()), std::bad_alloc,
               "bad_alloc");
}

MatrixTraits nibbles(bool minimums, kt::DType scales) {
  return {.format = Format::kInt4,
          .group = 32,
          .levels = minimums ? Levels::kUint4 : Levels::kNormal4,
          .minimums = minimums,
          .scales = scales};
}

// Some groups of weights as they are read back.
std::vector<float> as_chosen(const MatrixTraits& traits, const std::vector<float>& weights) {
  std::vector<std::int8_t> values(weights.size());
  kt::GroupScale chosen[kt::kGroupsAtOnce];
  kt::choose_groups(traits, weights.data(), weights.size() / traits.group, values.data(), chosen);
  std::vector<float> packed;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const kt::GroupScale g = chosen[i / traits.group];
    packed.push_back(static_cast<float>(values[i]) * g.scale + g.minimum);
  }
  return packed;
}

std::vector<float> group_as_packed(const std::vector<float>& weights, bool minimums) {
  return as_chosen(nibbles(minimums, kt::DType::kBf16), weights);
}

double squared_error(const std::vector<float>& weights, const std::vector<float>& packed) {
  double error = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    error += std::pow(static_cast<double>(packed[i]) - static_cast<double>(weights[i]), 2);
  }
  return error;
}

TEST("grouped: a group is packed the same beside any others, and alone") {
  Random random{8};
  for (const bool minimums : {false, true}) {
    const MatrixTraits traits = nibbles(minimums, kt::DType::kF32);
    std::vector<std::vector<float>> groups;
    std::vector<float> all;
    for (std::size_t g = 0; g < kt::kGroupsAtOnce; ++g) {
      std::vector<float> weights = random.gaussians(32, std::ldexp(1.0f, 20 * static_cast<int>(g) - 40));
      if (g == 2) std::fill(weights.begin(), weights.end(), 0.0f);
      all.insert(all.end(), weights.begin(), weights.end());
      groups.push_back(weights);
    }
    std::vector<float> alone;
    for (const auto& weights : groups) {
      const std::vector<float> packed = as_chosen(traits, weights);
      alone.insert(alone.end(), packed.begin(), packed.end());
    }
    CHECK(as_chosen(traits, all) == alone);
    all.resize(64);
    alone.resize(64);
    CHECK(as_chosen(traits, all) == alone);
  }
}

// The best of 200 scales, each weight at the nearest level.
double least_error(const std::vector<float>& weights) {
  float most = 0;
  for (const float w : weights) most = std::fabs(w) > std::fabs(most) ? w : most;
  double least = HUGE_VAL;
  for (int step = 0; step < 200; ++step) {
    const float scale = most / -35.0f * (0.7f + 0.004f * static_cast<float>(step));
    std::vector<float> packed;
    for (const float w : weights) {
      float best = 0;
      for (const int v : numbers_of(Levels::kNormal4)) {
        const float level = static_cast<float>(v) * scale;
        if (std::fabs(level - w) < std::fabs(best - w)) best = level;
      }
      packed.push_back(best);
    }
    least = std::min(least, squared_error(weights, packed));
  }
  return least;
}

TEST("grouped: the scale that is chosen errs little more than the best one") {
  Random random{9};
  double chosen = 0, least = 0;
  for (int g = 0; g < 200; ++g) {
    const std::vector<float> weights = random.gaussians(32);
    chosen += squared_error(weights, as_chosen(nibbles(false, kt::DType::kF32), weights));
    least += least_error(weights);
  }
  CHECK(chosen < 1.05 * least);
}

TEST("grouped: weights far from 0 keep their differences where there are minimums") {
  std::vector<float> weights(32), far(32);
  for (std::size_t i = 0; i < 32; ++i) weights[i] = std::sin(static_cast<float>(i)), far[i] = 4096.0f + weights[i];
  const std::vector<float> packed = as_chosen(nibbles(true, kt::DType::kF32), far);
  // Half of a fifteenth of the range, and what fp32 adds at 4096.
  for (std::size_t i = 0; i < 32; ++i) CHECK(std::fabs(packed[i] - far[i]) < 0.07f);
}

TEST("grouped: weights whose squares leave fp32 are packed as others are") {
  std::vector<float> weights(32), large(32);
  for (std::size_t i = 0; i < 32; ++i) weights[i] = std::sin(static_cast<float>(i)), large[i] = weights[i] * 1e30f;
  const std::vector<float> packed = group_as_packed(large, false);
  for (std::size_t i = 0; i < 32; ++i) {
    // Half of the largest step between two levels, 7 where the furthest level is 29, and what a scale in bf16 adds.
    CHECK(std::fabs(packed[i] / 1e30f - weights[i]) < 0.125f);
  }
}

TEST("grouped: a group of one number is that number where there are minimums") {
  CHECK(group_as_packed(std::vector<float>(32, 3.0f), true) == std::vector<float>(32, 3.0f));
}

// Rotated weights are near to normally distributed, whatever they were before: about 7.5 % in groups of 32.
TEST("grouped: INT4 of floats errs by less than 8 % of normal weights, and of weights with outliers") {
  kt::check::Layer layer = kt::check::make_layer({1, 512, 256}, 6);
  for (const bool outliers : {false, true}) {
    if (outliers) {
      for (std::size_t i = 0; i < layer.up.size(); i += 97) layer.up[i] *= 8.0f;
    }
    const kt::check::Layer known = kt::check::as_packed(layer, Format::kInt4);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < layer.up.size(); ++i) {
      error += std::pow(static_cast<double>(known.up[i]) - static_cast<double>(layer.up[i]), 2);
      norm += std::pow(static_cast<double>(layer.up[i]), 2);
    }
    CHECK(std::sqrt(error / norm) < 0.08);
    CHECK(std::sqrt(error / norm) > 0.05);
  }
}

TEST("grouped: groups of zeros and of vanishing numbers become zeros") {
  kt::check::Layer layer = kt::check::make_layer({1, 64, 64}, 7);
  for (std::size_t i = 0; i < 64; ++i) layer.up[i] = i < 32 ? 0.0f : 1e-42f;
  for (const Format format : {Format::kInt4, Format::kInt8Grouped}) {
    const auto packed = kt::check::pack(layer, format, false);
    std::vector<float> gate(64 * 64), up(64 * 64), down(64 * 64);
    packed->unpack(kt::check::generic(), 0, gate.data(), up.data(), down.data());
    for (std::size_t i = 0; i < 64; ++i) CHECK_EQ(up[i], 0.0f);
    CHECK(up[64] != 0.0f);
  }
}
