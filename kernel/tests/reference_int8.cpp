// The INT8 contract of docs/architecture.md as scalar fp32 code. Compiled without contraction, like the kernel.
#include <cmath>

#include "reference.hpp"

namespace kt::check {
namespace {

std::size_t padded(std::size_t inputs) {
  return (inputs + 63) / 64 * 64;
}

// Additions in the contract's order: pairs 1 apart, then 2, 4, … within each block.
void rotate(std::vector<float>& x) {
  const std::size_t block = hadamard_size(x.size());
  for (std::size_t distance = 1; distance < block; distance *= 2) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (i / distance % 2 != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
}

struct Quantised {
  std::vector<int> q;
  float scale;
};

Quantised quantise(std::vector<float> x, bool rotated) {
  x.resize(padded(x.size()), 0.0f);
  if (rotated) rotate(x);
  float largest = 0.0f;
  bool finite = true;
  for (const float value : x) {
    finite = finite && std::isfinite(value);
    largest = std::max(largest, std::fabs(value));
  }
  Quantised result{std::vector<int>(x.size(), 0), finite ? 0.0f : std::nanf("")};
  if (!finite || largest < 1e-35f) return result;
  const float inverse = 127.0f / largest;
  for (std::size_t i = 0; i < x.size(); ++i) result.q[i] = static_cast<int>(std::nearbyint(x[i] * inverse));
  result.scale = largest / 127.0f;
  return result;
}

Quantised quantise_weights(const float* row, std::size_t inputs, bool rotated) {
  Quantised w = quantise({row, row + inputs}, rotated);
  if (rotated) w.scale /= static_cast<float>(hadamard_size(w.q.size()));
  return w;
}

float product(const Quantised& x, const Quantised& w) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < x.q.size(); ++i) sum += std::int64_t{x.q[i]} * w.q[i];
  return static_cast<float>(static_cast<std::int32_t>(sum)) * w.scale * x.scale;
}

float exponential(float x) {
  x = x > -87.0f ? x : -87.0f;
  x = x < 88.0f ? x : 88.0f;
  const float n = std::nearbyint(x * 1.44269504f);
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  return p * std::ldexp(1.0f, static_cast<int>(n));
}

float gated(const Gate& gate, float g, float u) {
  if (gate.limit > 0.0f) {
    g = g > gate.limit ? gate.limit : g;
    u = u > gate.limit ? gate.limit : u;
    u = u < -gate.limit ? -gate.limit : u;
  }
  const float silu = g / (1.0f + exponential(g * -gate.alpha));
  return silu * (gate.up_offset == 0.0f ? u : u + gate.up_offset);
}

// Every expert's quantised channels, made once.
struct QuantisedLayer {
  QuantisedLayer(const Layer& layer, bool rotated) {
    const auto [experts, h, inner] = layer.shape;
    for (std::size_t row = 0; row < experts * inner; ++row) {
      gate.push_back(quantise_weights(&layer.gate[row * h], h, rotated));
      up.push_back(quantise_weights(&layer.up[row * h], h, rotated));
    }
    for (std::size_t row = 0; row < experts * h; ++row) {
      down.push_back(quantise_weights(&layer.down[row * inner], inner, rotated));
    }
  }
  std::vector<Quantised> gate, up, down;
};

}  // namespace

std::vector<float> int8_moe(const Layer& layer, const Batch& batch, bool rotated) {
  const auto [experts, h, inner] = layer.shape;
  const QuantisedLayer q(layer, rotated);
  std::vector<float> y(batch.tokens * h, 0.0f);
  for (std::size_t t = 0; t < batch.tokens; ++t) {
    const auto* row = batch.x.data() + t * h;
    const Quantised x = quantise({row, row + h}, rotated);
    for (std::size_t s = 0; s < batch.k; ++s) {
      const std::int64_t id = batch.ids[t * batch.k + s];
      if (id < 0 || id >= static_cast<std::int64_t>(experts)) continue;
      const auto e = static_cast<std::size_t>(id);
      std::vector<float> activated(inner);
      for (std::size_t i = 0; i < inner; ++i) {
        activated[i] = gated(layer.gate_formula, product(x, q.gate[e * inner + i]), product(x, q.up[e * inner + i]));
      }
      const Quantised a = quantise(activated, rotated);
      for (std::size_t i = 0; i < h; ++i)
        y[t * h + i] += product(a, q.down[e * h + i]) * batch.weights[t * batch.k + s];
    }
  }
  return y;
}

std::vector<float> int8_linear(const std::vector<float>& weights, const std::vector<float>& biases,
                               const std::vector<float>& x, std::size_t inputs, bool rotated) {
  std::vector<Quantised> channels;
  for (std::size_t c = 0; c < weights.size() / inputs; ++c) {
    channels.push_back(quantise_weights(&weights[c * inputs], inputs, rotated));
  }
  std::vector<float> y;
  for (std::size_t r = 0; r < x.size() / inputs; ++r) {
    const Quantised row = quantise({&x[r * inputs], &x[r * inputs] + inputs}, rotated);
    for (std::size_t c = 0; c < channels.size(); ++c) {
      y.push_back(product(row, channels[c]) + (biases.empty() ? 0.0f : biases[c]));
    }
  }
  return y;
}

}  // namespace kt::check
