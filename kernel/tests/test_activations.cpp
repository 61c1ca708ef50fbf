// Activations, clamps behind them, biases and experts without a gate: the formula, then whole layers.
#include <cmath>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::Activation;
using kt::Format;
using kt::Gate;
using kt::check::Batch;
using kt::check::Kernel;
using kt::check::Layer;
using kt::check::make_batch;
using kt::check::make_biased_layer;
using kt::check::make_layer;
using kt::check::Shape;

namespace {

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
                                       Activation::kReluSquared};

std::vector<Gate> formulas() {
  std::vector<Gate> all;
  for (const Activation activation : kActivations) {
    all.push_back({.activation = activation});
    all.push_back({.activation = activation, .gated = false});
    all.push_back({.activation = activation, .limit = 0.75f, .limit_after = true});
    all.push_back({.activation = activation, .limit = 0.75f, .up_offset = 1.0f});
  }
  all.push_back({.alpha = 1.702f, .limit = 1.5f, .up_offset = 1.0f});
  return all;
}

// One channel whose activated value reaches the output untouched: x·1 → activation → ·1, in BF16 with exact numbers.
double through(const kt::TierTable& table, const Gate& gate, float x) {
  Layer layer{{1, 1, 1}, gate, {1.0f}, {1.0f}, {1.0f}, {}, {}, {}};
  const Batch batch{1, 1, 1, {x}, {0}, {1.0f}};
  return static_cast<double>(Kernel(layer, Format::kBf16, table)(batch)[0]);
}

// About 2 % for INT8's roundings, a third of one for bf16's; squares and sums of like size double them.
double bound(Format format) {
  return format == Format::kBf16 ? 0.01 : 0.04;
}

void check_layer(const kt::check::FormatCase& c, const Layer& layer, const std::string& of) {
  const auto packed = kt::check::pack(layer, c.format);
  Kernel kernel(packed, layer.gate_formula, *c.table), oracle(packed, layer.gate_formula, kt::check::generic());
  const Layer known = kt::check::as_packed(layer, c.format);
  for (const std::size_t tokens : {1, 5, 40}) {
    const Batch batch = make_batch(layer.shape, tokens, 2, 3);
    const std::vector<float> y = kernel(batch);
    const double error = kt::check::relative_error(y, kt::check::float64_moe(known, batch));
    if (!(error <= bound(c.format))) kt::check::fail(__FILE__, __LINE__, of + ": error " + kt::check::show(error));
    if (c.format != Format::kBf16 && c.format != Format::kFp8) CHECK_SAME_BITS(y, oracle(batch), layer.shape.hidden);
  }
}

std::string text(const Gate& g) {
  return "activation " + kt::check::show(static_cast<int>(g.activation)) + (g.gated ? " gated" : " alone") + " limit " +
         kt::check::show(g.limit) + (g.limit_after ? " after" : "") + " offset " + kt::check::show(g.up_offset);
}

}  // namespace

TEST_EACH_TIER("activation: every function is right to bf16, also where it vanishes") {
  for (const Activation activation : kActivations) {
    const Gate gate{.activation = activation, .gated = false};
    for (int i = -192; i <= 192; ++i) {
      const float x = static_cast<float>(i) / 32.0f;  // exact in bf16
      const double expected = kt::check::activation_float64(gate, static_cast<double>(x));
      CHECK(std::fabs(through(*tier.table, gate, x) - expected) <= 0.004 * std::fabs(expected) + 2e-7);
    }
  }
}

TEST_EACH_FORMAT(
    "activation: layers of every formula are close to float64, quantised formats with the generic tier's bits") {
  for (const Gate& gate : formulas()) {
    check_layer(c, make_layer({2, 64, 32}, 1, gate), text(gate));
    check_layer(c, make_layer({3, 70, 33}, 1, gate), text(gate));
  }
}

TEST_EACH_FORMAT("bias: layers with biases are close to float64, quantised formats with the generic tier's bits") {
  for (const Gate& gate : {Gate{}, Gate{.gated = false}, Gate{.alpha = 1.702f, .limit = 7.0f, .up_offset = 1.0f}}) {
    check_layer(c, make_biased_layer({3, 128, 96}, 1, gate), text(gate));
    check_layer(c, make_biased_layer({2, 33, 7}, 1, gate), text(gate));
  }
}

TEST_EACH_FORMAT("bias: a token alone has the bits it has in a batch") {
  const Layer layer = make_biased_layer({3, 100, 72}, 2, {.alpha = 1.702f, .limit = 7.0f, .up_offset = 1.0f});
  const Batch batch = make_batch(layer.shape, 40, 2);
  Kernel kernel(layer, c.format, *c.table);
  const std::vector<float> all = kernel(batch);
  for (const std::size_t t : {0, 17, 39}) {
    const std::vector<float> alone = kernel(batch.slice(t, t + 1));
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(t * 100);
    CHECK_SAME_BITS(alone, std::vector<float>(first, first + 100), 100);
  }
}

TEST("bias: a NaN is found at packing, with projection and channel") {
  Layer layer = make_biased_layer({2, 33, 40});
  layer.up_bias[40 + 21] = std::nanf("");
  CHECK_THROWS(kt::check::pack(layer, Format::kInt8), kt::WeightsValueError, "up bias of channel 21");
}
