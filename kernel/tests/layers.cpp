#include "layers.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

#include "tiers/registry.hpp"

namespace kt::check {

ExpertSource Layer::source(std::size_t expert) const {
  const auto h = static_cast<std::ptrdiff_t>(shape.hidden), i = static_cast<std::ptrdiff_t>(shape.intermediate);
  const auto bias = [expert](const std::vector<float>& all, std::size_t channels) {
    return all.empty() ? nullptr : all.data() + expert * channels;
  };
  return {{gate.data() + expert * matrix(), DType::kF32, h, 1, bias(gate_bias, shape.intermediate)},
          {up.data() + expert * matrix(), DType::kF32, h, 1, bias(up_bias, shape.intermediate)},
          {down.data() + expert * matrix(), DType::kF32, i, 1, bias(down_bias, shape.hidden)}};
}

Layer make_layer(const Shape& shape, std::uint64_t seed, const Gate& gate) {
  Random random{seed, shape.experts, shape.hidden, shape.intermediate};
  const std::size_t n = shape.experts * shape.hidden * shape.intermediate;
  // Powers of two near 1/sqrt(inputs): exact on every platform.
  const auto scale = [](std::size_t inputs) { return std::ldexp(1.0f, -(std::ilogb(static_cast<float>(inputs)) / 2)); };
  Layer layer{shape, gate, {}, {}, {}, {}, {}, {}};
  layer.gate = random.gaussians(n, scale(shape.hidden));
  layer.up = random.gaussians(n, scale(shape.hidden));
  layer.down = random.gaussians(n, scale(shape.intermediate));
  return layer;
}

Layer make_biased_layer(const Shape& shape, std::uint64_t seed, const Gate& gate) {
  Layer layer = make_layer(shape, seed, gate);
  Random random{seed, shape.hidden, shape.intermediate, shape.experts};
  layer.gate_bias = random.gaussians(shape.experts * shape.intermediate);
  layer.up_bias = random.gaussians(shape.experts * shape.intermediate);
  layer.down_bias = random.gaussians(shape.experts * shape.hidden);
  return layer;
}

Batch Batch::slice(std::size_t begin, std::size_t end) const {
  const auto cut = [&](const auto& all, std::size_t width) {
    return std::vector(all.begin() + static_cast<std::ptrdiff_t>(begin * width),
                       all.begin() + static_cast<std::ptrdiff_t>(end * width));
  };
  return {end - begin, k, hidden, cut(x, hidden), cut(ids, k), cut(weights, k)};
}

Batch make_batch(const Shape& shape, std::size_t tokens, std::size_t k, std::uint64_t seed) {
  Random random{seed, tokens, k, shape.experts, shape.hidden};
  Batch batch{tokens, k, shape.hidden, random.gaussians(tokens * shape.hidden), {}, {}};
  for (std::size_t i = 0; i < tokens * k; ++i) {
    batch.ids.push_back(static_cast<std::int64_t>(random.below(shape.experts)));
    batch.weights.push_back(random.uniform() + 0.125f);
  }
  return batch;
}

const std::shared_ptr<Context>& context(std::size_t threads) {
  static std::map<std::size_t, std::shared_ptr<Context>> contexts;
  std::shared_ptr<Context>& found = contexts[threads];
  if (!found) found = std::make_shared<Context>(threads);
  return found;
}

std::shared_ptr<PackedExperts> pack(const Layer& layer, Format format, bool rotate, const TierTable* table,
                                    std::size_t threads) {
  return pack(layer, default_traits(format), default_traits(format), rotate, table, threads);
}

std::shared_ptr<PackedExperts> pack(const Layer& layer, const MatrixTraits& gate_up, const MatrixTraits& down,
                                    bool rotate, const TierTable* table, std::size_t threads) {
  const Shape& s = layer.shape;
  const LayerTraits traits{.rotated = rotate, .gated = layer.gate_formula.gated, .biased = !layer.down_bias.empty()};
  auto packed =
      std::make_shared<PackedExperts>(LayerLayout(gate_up, down, traits, s.experts, s.hidden, s.intermediate));
  for (std::size_t e = 0; e < s.experts; ++e) {
    packed->pack(*context(threads), table == nullptr ? usable_table("generic") : *table, e, layer.source(e));
  }
  return packed;
}

Layer as_packed(const Layer& layer, Format format) {
  if (!is_grouped(format) && format != Format::kFp8) return layer;
  Layer known = layer;
  const auto packed = pack(layer, format);
  for (std::size_t e = 0; e < layer.shape.experts; ++e) {
    const std::size_t at = e * layer.matrix();
    packed->unpack(usable_table("generic"), e, known.gate.data() + at, known.up.data() + at, known.down.data() + at);
  }
  return known;
}

ForwardArgs arguments(const Batch& batch, std::vector<float>& y) {
  y.assign(batch.tokens * batch.hidden, 12345.0f);
  return {batch.tokens,
          batch.k,
          batch.x.data(),
          DType::kF32,
          {batch.ids.data(), IdType::kInt64, batch.weights.data(), DType::kF32},
          y.data(),
          DType::kF32};
}

std::vector<float> Kernel::operator()(const Batch& batch) {
  std::vector<float> y;
  moe_.forward(arguments(batch, y));
  return y;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::string first_difference(const std::vector<float>& got, const std::vector<float>& expected, std::size_t hidden) {
  if (got.size() != expected.size()) return "sizes";
  for (std::size_t i = 0; i < got.size(); ++i) {
    std::uint32_t a, b;
    std::memcpy(&a, &got[i], 4);
    std::memcpy(&b, &expected[i], 4);
    if (a == b) continue;
    char text[160];
    std::snprintf(text, sizeof text, "first difference at token %zu, channel %zu: %.9g (0x%08x) for %.9g (0x%08x)",
                  i / hidden, i % hidden, static_cast<double>(got[i]), a, static_cast<double>(expected[i]), b);
    return text;
  }
  return "none";
}

bool all_nan(const float* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isnan(x[i])) return false;
  }
  return true;
}

bool all_finite(const float* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) return false;
  }
  return true;
}

}  // namespace kt::check
