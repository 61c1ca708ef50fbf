#include "reference.hpp"

#include <bit>
#include <cmath>

namespace kt::check {
namespace {

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

using Vector = std::vector<double>;

double dot(const float* weights, const Vector& x) {
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(weights[i]) * x[i];
  return sum;
}

double bias(const std::vector<float>& all, std::size_t i) {
  return all.empty() ? 0.0 : static_cast<double>(all[i]);
}

// One expert on one token; `rounded` is applied to the activated values.
template <class Round>
Vector expert(const Layer& layer, std::size_t e, const Vector& x, const Round& rounded) {
  const auto [experts, h, inner] = layer.shape;
  Vector activated(inner), out(h);
  for (std::size_t i = 0; i < inner; ++i) {
    const std::size_t row = e * layer.matrix() + i * h;
    const double g = dot(&layer.gate[row], x) + bias(layer.gate_bias, e * inner + i);
    const double u = dot(&layer.up[row], x) + bias(layer.up_bias, e * inner + i);
    activated[i] = rounded(gate_float64(layer.gate_formula, g, u));
  }
  for (std::size_t i = 0; i < h; ++i) {
    out[i] = dot(&layer.down[e * layer.matrix() + i * inner], activated) + bias(layer.down_bias, e * h + i);
  }
  return out;
}

template <class Round>
Vector moe(const Layer& layer, const Batch& batch, const Round& rounded) {
  const std::size_t h = batch.hidden;
  Vector y(batch.tokens * h, 0.0);
  for (std::size_t t = 0; t < batch.tokens; ++t) {
    Vector x(h);
    for (std::size_t i = 0; i < h; ++i) x[i] = rounded(static_cast<double>(batch.x[t * h + i]));
    for (std::size_t s = 0; s < batch.k; ++s) {
      const std::int64_t id = batch.ids[t * batch.k + s];
      if (id < 0 || id >= static_cast<std::int64_t>(layer.shape.experts)) continue;
      const Vector out = expert(layer, static_cast<std::size_t>(id), x, rounded);
      const auto weight = static_cast<double>(batch.weights[t * batch.k + s]);
      for (std::size_t i = 0; i < h; ++i) y[t * h + i] += weight * out[i];
    }
  }
  return y;
}

double to_bf16(double x) {
  return bf16_value(nearest_bf16(static_cast<float>(x)));
}

// Nearest to |x| with `mantissa` bits and smallest exponent `lowest`, by counting units in the last place.
double rounded_to(double x, int mantissa, int lowest) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), lowest);
  return std::ldexp(std::nearbyint(std::ldexp(x, mantissa - exponent)), exponent - mantissa);
}

}  // namespace

double activation_float64(const Gate& gate, double x) {
  switch (gate.activation) {
    case Activation::kSilu:
      return x * sigmoid(static_cast<double>(gate.alpha) * x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return x * sigmoid(2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kReluSquared:
      return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return 0.0;
}

double gate_float64(const Gate& gate, double g, double u) {
  if (!gate.gated) return activation_float64(gate, u);
  const auto limit = static_cast<double>(gate.limit);
  if (limit > 0.0) {
    if (!gate.limit_after) g = std::min(g, limit);
    u = std::max(std::min(u, limit), -limit);
  }
  double a = activation_float64(gate, g);
  if (limit > 0.0 && gate.limit_after) a = std::min(a, limit);
  return a * (u + static_cast<double>(gate.up_offset));
}

std::vector<double> float64_moe(const Layer& layer, const Batch& batch) {
  return moe(layer, batch, [](double x) { return x; });
}

std::vector<double> bf16_moe(const Layer& layer, const Batch& batch) {
  Layer rounded = layer;
  for (std::vector<float>* matrix : {&rounded.gate, &rounded.up, &rounded.down}) {
    for (float& w : *matrix) w = static_cast<float>(to_bf16(static_cast<double>(w)));
  }
  return moe(rounded, batch, to_bf16);
}

double relative_error(const std::vector<float>& got, const std::vector<double>& expected) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = static_cast<double>(got[i]) - expected[i];
    difference += d * d;
    size += expected[i] * expected[i];
  }
  return difference == 0.0 ? 0.0 : std::sqrt(difference / size);
}

std::size_t hadamard_size(std::size_t k_padded) {
  return std::min<std::size_t>(512, k_padded & (~k_padded + 1));
}

int hadamard(std::size_t i, std::size_t j) {
  return std::popcount(i & j) % 2 == 0 ? 1 : -1;
}

double bf16_value(std::uint16_t bits) {
  const int sign = bits >> 15 ? -1 : 1, exponent = bits >> 7 & 0xff, mantissa = bits & 0x7f;
  if (exponent == 0xff) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  return std::copysign(exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134), sign);
}

double f16_value(std::uint16_t bits) {
  const int sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  return std::copysign(exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25), sign);
}

double e4m3_value(std::uint8_t code) {
  const int sign = code >> 7 ? -1 : 1, exponent = code >> 3 & 0xf, mantissa = code & 0x7;
  if (exponent == 0xf && mantissa == 0x7) return std::nan("");
  return std::copysign(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10), sign);
}

std::uint16_t nearest_bf16(float x) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (std::isnan(x)) return sign | 0x7fc0;
  const double magnitude = std::fabs(rounded_to(static_cast<double>(x), 7, -126));
  if (magnitude >= 0x1p128) return sign | 0x7f80;
  if (magnitude < 0x1p-126) return static_cast<std::uint16_t>(sign | static_cast<int>(std::ldexp(magnitude, 133)));
  const int exponent = std::ilogb(magnitude);
  const int mantissa = static_cast<int>(std::ldexp(magnitude, 7 - exponent)) - 128;
  return static_cast<std::uint16_t>(sign | ((exponent + 127) << 7) | mantissa);
}

std::uint8_t nearest_e4m3(float x) {
  const auto sign = static_cast<std::uint8_t>(std::signbit(x) ? 0x80 : 0);
  if (std::isnan(x)) return sign | 0x7f;
  const double magnitude = std::min(std::fabs(rounded_to(static_cast<double>(x), 3, -6)), 448.0);
  if (magnitude < 0x1p-6) return static_cast<std::uint8_t>(sign | static_cast<int>(std::ldexp(magnitude, 9)));
  const int exponent = std::ilogb(magnitude);
  const int mantissa = static_cast<int>(std::ldexp(magnitude, 3 - exponent)) - 8;
  return static_cast<std::uint8_t>(sign | ((exponent + 7) << 3) | mantissa);
}

std::uint16_t nearest_f16(float x) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (std::isnan(x)) return sign | 0x7e00;
  const double magnitude = std::fabs(rounded_to(static_cast<double>(x), 10, -14));
  if (magnitude >= 0x1p16) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return static_cast<std::uint16_t>(sign | static_cast<int>(std::ldexp(magnitude, 24)));
  const int exponent = std::ilogb(magnitude);
  const int mantissa = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}

}  // namespace kt::check
