// The gate formulas of every tier, with any fp32 number for the gate: an INT8 block whose every sum is 1 leaves its
// channel scales as the sums.
#include <cmath>
#include <limits>

#include "blocks.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::Format;
using kt::Gate;
using kt::check::Blocks;
using kt::check::FormatCase;
using kt::check::TierCase;

namespace {

// gate(g[i], u[i]), numbers a multiple of 16.
std::vector<float> through_gate(const kt::TierTable& table, const Gate& gate, const std::vector<float>& g,
                                const std::vector<float>& u) {
  const FormatCase c{"", &table, Format::kInt8};
  std::vector<float> x(64, 0.0f);
  x[0] = 1.0f;
  x[1] = 127.0f;  // makes the scale 1; its weights are 0
  const kt::check::Rows row(c, x, 64);
  std::vector<float> y;
  constexpr std::size_t kAtOnce = 16 * 64;  // a few blocks at a time keeps the memory small
  for (std::size_t first = 0; first < g.size(); first += kAtOnce) {
    const std::size_t n = std::min(kAtOnce, g.size() - first);
    Blocks blocks(Format::kInt8, n / 16, 64);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t left = i / 16 * 32 + i % 16, right = left + 16;
      blocks.set(left, 0, 1);
      blocks.set(right, 0, 1);
      blocks.set_scale(left, g[first + i]);
      blocks.set_scale(right, u[first + i]);
    }
    const std::vector<float> part = blocks.gate_up(row, 0, 1, gate);
    y.insert(y.end(), part.begin(), part.end());
  }
  return y;
}

// The sigmoid of numbers below -88 is held at this instead of falling on to 0.
constexpr double kHeldSigmoid = 1e-38;
// A silu below the subnormal numbers is 0.
constexpr double kSmallest = 1.5e-45;

constexpr Gate kSilu{};

// -110 … 110, dense around zero.
std::vector<float> grid() {
  std::vector<float> x;
  for (int i = -70400; i < 70400; ++i) x.push_back(static_cast<float>(i) * 0x1p-10f + 0x1p-12f);
  for (int i = -70400; i < 70400; i += 2) x.push_back(static_cast<float>(i) * 0x1p-9f * 0.8f);
  while (x.size() % 16 != 0) x.push_back(0.0f);
  return x;
}

const std::vector<float> kExtremes = {0.0f,   -0.0f,  1e-45f, -1e-45f, 1e-38f, -1e-38f, 6.9999f, 7.0f,
                                      7.001f, -6.99f, -7.0f,  -7.01f,  1e4f,   -1e4f,   3e38f,   -3e38f};

// Every pair of extremes.
void pairs(std::vector<float>& g, std::vector<float>& u) {
  for (const float a : kExtremes) {
    for (const float b : kExtremes) {
      g.push_back(a);
      u.push_back(b);
    }
  }
}

const std::vector<Gate> kGates = {
    kSilu,
    {.limit = 7.0f},
    {.limit = 0.0f},
    {.alpha = 1.702f, .limit = 7.0f, .up_offset = 1.0f},
    {.alpha = 1.0f, .limit = 0.0f, .up_offset = 1.0f},
};

}  // namespace

// exp's polynomial ends 5e-9 early and the operations round about ten times: 4e-7 leaves room for both. Below -87 the
// exponential is held at e^87 and the result, less than 1e-36 of the gate, is only bounded.
TEST_EACH_TIER("gate: silu is within 4e-7 of the exact function") {
  const std::vector<float> g = grid(), ones(g.size(), 1.0f);
  const std::vector<float> y = through_gate(*tier.table, kSilu, g, ones);
  double worst = 0.0;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const auto x = static_cast<double>(g[i]), exact = x / (1.0 + std::exp(-x));
    if (x < -87.0) {
      CHECK(std::fabs(y[i]) < 2e-36f && y[i] <= 0.0f);
    } else if (x != 0.0) {
      worst = std::max(worst, std::fabs(static_cast<double>(y[i]) - exact) / std::fabs(exact));
    }
  }
  if (worst >= 4e-7) kt::check::fail(__FILE__, __LINE__, "relative error " + kt::check::show(worst));
}

TEST_EACH_TIER("gate: every formula has the generic tier's bits, on a dense grid and at the extremes") {
  std::vector<float> g = grid(), u(g.rbegin(), g.rend());
  pairs(g, u);
  for (const Gate& gate : kGates) {
    CHECK_SAME_BITS(through_gate(*tier.table, gate, g, u), through_gate(kt::check::generic(), gate, g, u), 16);
  }
}

TEST_EACH_TIER("gate: clamps bite on large values and leave others alone") {
  std::vector<float> g, u;
  pairs(g, u);
  for (const Gate& gate : kGates) {
    const std::vector<float> y = through_gate(*tier.table, gate, g, u);
    for (std::size_t i = 0; i < g.size(); ++i) {
      const auto a = static_cast<double>(g[i]), b = static_cast<double>(u[i]);
      const double exact = kt::check::gate_float64(gate, a, b);
      const double bound = 1e-6 * std::fabs(exact) + (kHeldSigmoid * std::fabs(a) + kSmallest) * (std::fabs(b) + 1.0);
      if (std::fabs(exact) + bound > 3.4e38) {
        CHECK(!std::isnan(y[i]));  // fp32 has no such number: infinite or near
      } else {
        CHECK(std::fabs(static_cast<double>(y[i]) - exact) <= bound);
      }
    }
  }
}

TEST_EACH_TIER("gate: a NaN gate or up survives the clamps") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> g(32, 1.0f), u(32, 1.0f);
  g[3] = nan;
  u[21] = nan;
  for (const Gate& gate : kGates) {
    const std::vector<float> y = through_gate(*tier.table, gate, g, u);
    for (std::size_t i = 0; i < 32; ++i) CHECK_EQ(std::isnan(y[i]), i == 3 || i == 21);
  }
}
