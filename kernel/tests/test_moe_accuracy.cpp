// The whole layer against the slow references.
#include <cmath>

#include "each_tier.hpp"
#include "layers.hpp"
#include "reference.hpp"

using kt::Format;
using kt::Gate;
using kt::check::Batch;
using kt::check::FormatCase;
using kt::check::Kernel;
using kt::check::Layer;
using kt::check::make_batch;
using kt::check::make_layer;
using kt::check::Shape;

namespace {

constexpr Gate kGates[] = {{}, {.limit = 0.75f}, {.alpha = 1.702f, .limit = 0.75f, .up_offset = 1.0f}};

// On Gaussian data INT8 errs by about 2 % (three roundings to 1/127 of a row's largest number, and the gate multiplies
// two of them), bf16 by a third of a percent.
double bound(Format format) {
  return format == Format::kBf16 || format == Format::kFp8 ? 0.006 : 0.03;
}

void check_error(const std::vector<float>& got, const std::vector<double>& expected, double most,
                 const std::string& of) {
  const double error = kt::check::relative_error(got, expected);
  if (!(error <= most)) kt::check::fail(__FILE__, __LINE__, "relative error " + kt::check::show(error) + " of " + of);
}

std::string text(const Shape& s, std::size_t tokens) {
  return kt::check::show(std::vector<std::size_t>{s.experts, s.hidden, s.intermediate, tokens});
}

}  // namespace

TEST_EACH_FORMAT("layer: close to float64, for every gate formula") {
  for (const Gate& gate : kGates) {
    for (const Shape& shape : {Shape{4, 192, 160}, Shape{3, 320, 96}, Shape{1, 512, 256}}) {
      for (const std::size_t tokens : {1, 4, 40}) {
        const Layer layer = make_layer(shape, 1, gate);
        const Batch batch = make_batch(shape, tokens, 2);
        Kernel kernel(layer, c.format, *c.table);
        check_error(kernel(batch), kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch),
                    bound(c.format), text(shape, tokens));
      }
    }
  }
}

// Rounded weights and inputs leave only fp32 sums and now and then an activated value on the other side of a rounding.
TEST_EACH_TIER("layer: BF16 is close to the layer with rounded weights") {
  const FormatCase c{tier.name, tier.table, Format::kBf16};
  if (c.functions().gate_up == nullptr) return;
  for (const Gate& gate : kGates) {
    for (const Shape& shape : {Shape{2, 70, 33}, Shape{3, 128, 130}, Shape{1, 300, 64}}) {
      for (const std::size_t tokens : {1, 3, 37}) {
        const Layer layer = make_layer(shape, 2, gate);
        const Batch batch = make_batch(shape, tokens, 2);
        Kernel kernel(layer, c.format, *c.table);
        check_error(kernel(batch), kt::check::bf16_moe(layer, batch), 1e-3, text(shape, tokens));
      }
    }
  }
}

TEST_EACH_TIER("layer: INT8 is the contract's scalar arithmetic, bit for bit") {
  if (tier.table->int8.gate_up == nullptr) return;
  for (const Gate& gate : kGates) {
    for (const Shape& shape : {Shape{2, 70, 33}, Shape{3, 129, 64}, Shape{1, 576, 40}, Shape{2, 1, 17}}) {
      for (const bool rotated : {true, false}) {
        const Layer layer = make_layer(shape, 3, gate);
        const Batch batch = make_batch(shape, 37, 2);
        const std::vector<float> expected = kt::check::int8_moe(layer, batch, rotated);
        Kernel kernel(layer, Format::kInt8, *tier.table, {}, rotated);
        CHECK_SAME_BITS(kernel(batch), expected, shape.hidden);
        const auto last = static_cast<std::ptrdiff_t>(36 * shape.hidden);
        CHECK_SAME_BITS(kernel(batch.slice(36, 37)), std::vector<float>(expected.begin() + last, expected.end()),
                        shape.hidden);
      }
    }
  }
}

// One to three numbers a sum: what cancels in it leaves its error behind.
TEST_EACH_FORMAT("layer: the smallest sizes") {
  for (const std::size_t h : {1, 2, 3}) {
    for (const std::size_t i : {1, 2, 3}) {
      const Layer layer = make_layer({2, h, i}, 4);
      const Batch batch = make_batch(layer.shape, 33, 2);
      Kernel kernel(layer, c.format, *c.table);
      check_error(kernel(batch), kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch),
                  3 * bound(c.format), text(layer.shape, 33));
    }
  }
}

TEST_EACH_FORMAT("layer: outliers of ten thousand in the input do not drown the rest") {
  const Layer layer = make_layer({2, 256, 128}, 5);
  Batch batch = make_batch(layer.shape, 24, 2);
  for (std::size_t t = 0; t < batch.tokens; t += 2) batch.x[t * batch.hidden + 17 + t] *= 1e4f;
  const std::vector<double> expected = kt::check::float64_moe(kt::check::as_packed(layer, c.format), batch);
  const std::vector<float> got = Kernel(layer, c.format, *c.table)(batch);
  check_error(got, expected, 2 * bound(c.format), "all tokens");
  for (std::size_t t = 1; t < batch.tokens; t += 2) {  // the ordinary ones do not notice their neighbours
    const auto first = static_cast<std::ptrdiff_t>(t * batch.hidden), end = first + 256;
    check_error({got.begin() + first, got.begin() + end}, {expected.begin() + first, expected.begin() + end},
                2 * bound(c.format), "token " + std::to_string(t));
  }
}
