#include "pack/layout.hpp"

#include <limits>
#include <string>

#include "error.hpp"

namespace kt {
namespace {

std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

std::size_t bytes_per_weight(Format format) {
  return format == Format::kInt8 ? 1 : 2;
}

MatrixLayout make_matrix(Format format, bool biased, std::size_t inputs, std::size_t channels, std::size_t per_block) {
  MatrixLayout matrix;
  matrix.inputs = inputs;
  matrix.k_padded = round_up(inputs, kInputPadding);
  matrix.blocks = (channels + per_block - 1) / per_block;
  matrix.block_bytes = kBlockChannels * matrix.k_padded * bytes_per_weight(format) + (biased ? kBiasBytes : 0) +
                       (format == Format::kInt8 ? kTrailerBytes : 0);
  return matrix;
}

void check_sizes(Format format, std::size_t experts, std::size_t hidden, std::size_t intermediate) {
  if (experts == 0 || hidden == 0 || intermediate == 0) {
    throw Error("experts, hidden and intermediate sizes must be at least 1, got " + std::to_string(experts) + ", " +
                std::to_string(hidden) + ", " + std::to_string(intermediate));
  }
  // 2^20 inputs keep every product below 2^64; no model comes near.
  constexpr std::size_t kMost = std::size_t{1} << 20;
  const std::size_t most = format == Format::kInt8 ? kMaxInt8Inputs : kMost;
  if (experts > kMost)
    throw Error(std::to_string(experts) + " experts are more than the " + std::to_string(kMost) + " a layer holds");
  if (hidden > most || intermediate > most) {
    throw Error(std::string(format_name(format)) + " takes at most " + std::to_string(most) +
                " inputs per channel, got hidden " + std::to_string(hidden) + " and intermediate " +
                std::to_string(intermediate));
  }
}

}  // namespace

LayerLayout::LayerLayout(Format format, const LayerTraits& traits, std::size_t experts, std::size_t hidden,
                         std::size_t intermediate)
    : format(format), traits(traits), experts(experts), hidden(hidden), intermediate(intermediate) {
  check_sizes(format, experts, hidden, intermediate);
  this->traits.rotated = traits.rotated && format == Format::kInt8;
  gate_up = make_matrix(format, traits.biased, hidden, intermediate, activated_channels());
  down = make_matrix(format, traits.biased, intermediate, hidden, kBlockChannels);
  expert_bytes = gate_up.bytes() + down.bytes();
  if (expert_bytes > std::numeric_limits<std::ptrdiff_t>::max() / experts) throw std::bad_alloc();
}

std::size_t LayerLayout::rotation(const MatrixLayout& matrix) const {
  return traits.rotated ? rotation_block(matrix.k_padded) : 0;
}

std::size_t rotation_block(std::size_t k_padded) {
  std::size_t block = 512;  // larger blocks gained nothing measurable and cost a stage each
  while (k_padded % block != 0) block /= 2;
  return block;
}

std::string_view format_name(Format format) {
  return format == Format::kInt8 ? "INT8" : "BF16";
}

Format parse_format(std::string_view name) {
  if (name == "INT8") return Format::kInt8;
  if (name == "BF16") return Format::kBf16;
  throw Error("unknown format " + std::string(name) + "; formats: INT8, BF16");
}

}  // namespace kt
