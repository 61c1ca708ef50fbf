// Small MoE layers with random weights, their inputs, and the kernel on a tier of the test's choosing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moe/moe.hpp"
#include "pack/packed_experts.hpp"
#include "random.hpp"

namespace kt::check {

struct Shape {
  std::size_t experts;
  std::size_t hidden;
  std::size_t intermediate;
};

// fp32 weights: gate and up (E, I, H), down (E, H, I), scaled so that activations keep their size.
struct Layer {
  Shape shape;
  Gate gate_formula;
  std::vector<float> gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;  // (E, I), (E, I), (E, H); empty: none

  std::size_t matrix() const { return shape.hidden * shape.intermediate; }
  ExpertSource source(std::size_t expert) const;
};

Layer make_layer(const Shape& shape, std::uint64_t seed = 0, const Gate& gate = {});
// The same with a bias on every projection, as large as what it is added to.
Layer make_biased_layer(const Shape& shape, std::uint64_t seed = 0, const Gate& gate = {});

// x (T, H), ids and weights (T, k).
struct Batch {
  std::size_t tokens;
  std::size_t k;
  std::size_t hidden;
  std::vector<float> x;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;

  // Tokens [begin, end) alone.
  Batch slice(std::size_t begin, std::size_t end) const;
};

// Random ids (repeats within a token are possible) and positive weights.
Batch make_batch(const Shape& shape, std::size_t tokens, std::size_t k, std::uint64_t seed = 0);

// Made once for each number of threads.
const std::shared_ptr<Context>& context(std::size_t threads);

std::shared_ptr<PackedExperts> pack(const Layer& layer, const MatrixTraits& gate_up, const MatrixTraits& down,
                                    bool rotate, const TierTable* table = nullptr, std::size_t threads = 1);
// Both matrices of the format's default traits.
std::shared_ptr<PackedExperts> pack(const Layer& layer, Format format, bool rotate = true,
                                    const TierTable* table = nullptr, std::size_t threads = 1);

// The layer that a packed one stands for: its weights dequantised where the format is coarse (grouped, FP8), else the
// layer itself. What remains of an error is then the activations'.
Layer as_packed(const Layer& layer, Format format);

struct Run {
  std::size_t threads = 1;
  std::size_t max_tokens = 64;
};

class Kernel {
 public:
  Kernel(const Layer& layer, Format format, const TierTable& table, const Run& run = {}, bool rotate = true)
      : Kernel(pack(layer, format, rotate), layer.gate_formula, table, run) {}
  Kernel(std::shared_ptr<const PackedExperts> packed, const Gate& gate, const TierTable& table, const Run& run = {})
      : packed_(packed), moe_(context(run.threads), packed, table, gate, 8, run.max_tokens) {}

  // fp32 in and out. The output starts as numbers that no forward leaves.
  std::vector<float> operator()(const Batch& batch);
  MoE& moe() { return moe_; }

 private:
  std::shared_ptr<const PackedExperts> packed_;
  MoE moe_;
};

ForwardArgs arguments(const Batch& batch, std::vector<float>& y);

bool same_bits(const std::vector<float>& a, const std::vector<float>& b);
// "first difference at token 3, channel 17: 1.5 (0x3fc00000) for 1.25 (0x3fa00000)", or "none".
std::string first_difference(const std::vector<float>& got, const std::vector<float>& expected, std::size_t hidden);
bool all_nan(const float* x, std::size_t n);
bool all_finite(const float* x, std::size_t n);

}  // namespace kt::check

#define CHECK_SAME_BITS(got, expected, hidden) \
  CHECK_EQ(kt::check::first_difference((got), (expected), (hidden)), std::string("none"))
