#include "pack/layout.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "cpu/aligned_buffer.hpp"
#include "error.hpp"
#include "pack/grouped.hpp"

namespace kt {
namespace {

// 2^20 experts and inputs keep every product below 2^64; no model comes near.
constexpr std::size_t kMost = std::size_t{1} << 20;

// Bytes of a block without its biases.
std::size_t weight_bytes(const MatrixTraits& traits, std::size_t k_padded) {
  switch (traits.format) {
    case Format::kInt8:
      return kBlockChannels * k_padded + kTrailerBytes;
    case Format::kBf16:
      return kBlockChannels * k_padded * 2;
    case Format::kInt4:
    case Format::kInt8Grouped:
      return grouped_block_bytes(traits, k_padded);
    case Format::kFp8:  // two scales a group; the next block starts on a cache line
      return kBlockChannels * k_padded + kFp8ChannelScaleBytes +
             round_up(round_up(k_padded, kFp8Inputs) / kFp8Inputs * 2 * sizeof(float), kRowBytes);
  }
  throw Error("no packed layout for " + std::string(format_name(traits.format)));
}

// Formats whose activations are quantised too: rotating spreads outliers along K.
bool can_rotate(Format format) {
  return format == Format::kInt8 || is_grouped(format);
}

void check_inputs(const MatrixTraits& traits, const char* name, std::size_t inputs) {
  const std::size_t most = traits.format == Format::kInt8 ? kMaxInt8Inputs : kMost;
  if (inputs <= most) return;
  throw Error(std::string(format_name(traits.format)) + " takes at most " + std::to_string(most) +
              " inputs per channel, got " + name + " " + std::to_string(inputs));
}

}  // namespace

MatrixLayout make_matrix(const MatrixTraits& traits, const LayerTraits& layer, const char* name, std::size_t inputs,
                         std::size_t channels, std::size_t per_block) {
  if (inputs == 0 || channels == 0) {
    throw Error("a matrix has at least 1 input and 1 channel, got " + std::to_string(inputs) + " and " +
                std::to_string(channels));
  }
  check_inputs(traits, name, inputs);
  MatrixLayout matrix;
  matrix.traits = traits;
  matrix.inputs = inputs;
  check_groups(traits);
  matrix.k_padded = round_up(inputs, std::max(kInputPadding, traits.group));
  matrix.traits.rotation = layer.rotated && can_rotate(traits.format) ? rotation_block(matrix.k_padded) : 0;
  matrix.blocks = channels / per_block + (channels % per_block != 0);  // a sum could wrap around
  matrix.block_bytes = weight_bytes(traits, matrix.k_padded) + (layer.biased ? kBiasBytes : 0);
  if (matrix.block_bytes > std::numeric_limits<std::ptrdiff_t>::max() / matrix.blocks) throw std::bad_alloc();
  return matrix;
}

namespace {

void check_sizes(std::size_t experts, std::size_t hidden, std::size_t intermediate) {
  if (experts == 0 || hidden == 0 || intermediate == 0) {
    throw Error("experts, hidden and intermediate sizes must be at least 1, got " + std::to_string(experts) + ", " +
                std::to_string(hidden) + ", " + std::to_string(intermediate));
  }
  if (experts > kMost)
    throw Error(std::to_string(experts) + " experts are more than the " + std::to_string(kMost) + " a layer holds");
}

}  // namespace

LayerLayout::LayerLayout(const MatrixTraits& gate_up_traits, const MatrixTraits& down_traits, const LayerTraits& layer,
                         std::size_t experts, std::size_t hidden, std::size_t intermediate)
    : traits(layer), experts(experts), hidden(hidden), intermediate(intermediate) {
  check_sizes(experts, hidden, intermediate);
  gate_up = make_matrix(gate_up_traits, layer, "hidden", hidden, intermediate, activated_channels());
  down = make_matrix(down_traits, layer, "intermediate", intermediate, hidden, kBlockChannels);
  traits.rotated = gate_up.traits.rotation != 0 || down.traits.rotation != 0;
  expert_bytes = gate_up.bytes() + down.bytes();
  if (expert_bytes > std::numeric_limits<std::ptrdiff_t>::max() / experts) throw std::bad_alloc();
}

LayerLayout::LayerLayout(Format format, const LayerTraits& layer, std::size_t experts, std::size_t hidden,
                         std::size_t intermediate)
    : LayerLayout(default_traits(format), default_traits(format), layer, experts, hidden, intermediate) {}

std::size_t rotation_block(std::size_t k_padded) {
  std::size_t block = 512;  // larger blocks gained nothing measurable and cost a stage each
  while (k_padded % block != 0) block /= 2;
  return block;
}

}  // namespace kt
