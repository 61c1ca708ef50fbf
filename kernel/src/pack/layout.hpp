// Where every byte of a packed layer lies. docs/architecture.md draws it; kLayoutVersion changes with any change here
// and of the numbers that packing chooses: a file packed before and weights packed today must not differ.
#pragma once

#include <cstddef>

#include "tiers/formats.hpp"

namespace kt {

inline constexpr int kLayoutVersion = 3;

// Largest INT8 dot product: 255·127·K must stay below 2^31 for the tiers that offset activations to u8.
inline constexpr std::size_t kMaxInt8Inputs = 65536;

// One weight matrix of one expert: column blocks of 32 channels.
struct MatrixLayout {
  MatrixTraits traits;
  std::size_t inputs = 0;    // K
  std::size_t k_padded = 0;  // K up to a multiple of 64 and of the group
  std::size_t blocks = 0;
  std::size_t block_bytes = 0;  // tiles, biases if there are any, INT8's scales and channel sums
  std::size_t bytes() const { return blocks * block_bytes; }
  Format format() const { return traits.format; }
};

// What a layer holds beside its sizes and its matrices.
struct LayerTraits {
  bool rotated = true;  // its INT8 and grouped matrices; not for weights that come quantised, whose grid must stay
  bool gated = true;    // false: one projection before the activation instead of gate and up
  bool biased = false;
};

// One matrix of `channels` channels, `per_block` of them to a block; `layer` says whether it is rotated and biased.
// Throws Error for sizes that are zero, overflow, or are beyond the format's exact range; `name` is that of the inputs.
MatrixLayout make_matrix(const MatrixTraits& traits, const LayerTraits& layer, const char* name, std::size_t inputs,
                         std::size_t channels, std::size_t per_block);

// One layer: E experts, each [gate_up blocks][down blocks].
struct LayerLayout {
  // Throws Error for sizes that are zero, overflow, or are beyond a format's exact range.
  LayerLayout(const MatrixTraits& gate_up, const MatrixTraits& down, const LayerTraits& traits, std::size_t experts,
              std::size_t hidden, std::size_t intermediate);
  // Both matrices alike, with default_traits.
  LayerLayout(Format format, const LayerTraits& traits, std::size_t experts, std::size_t hidden,
              std::size_t intermediate);

  LayerTraits traits;
  std::size_t experts;
  std::size_t hidden;        // H: inputs of gate/up, channels of down
  std::size_t intermediate;  // I: channels of gate/up, inputs of down
  // Block b: gate channels 16b… on the left panel, up channels 16b… on the right; without a gate as `down`.
  MatrixLayout gate_up;
  MatrixLayout down;  // block b: channels 32b…
  std::size_t expert_bytes;

  std::size_t bytes() const { return experts * expert_bytes; }
  std::size_t gate_up_offset(std::size_t expert) const { return expert * expert_bytes; }
  std::size_t down_offset(std::size_t expert) const { return expert * expert_bytes + gate_up.bytes(); }
  // Channels of the gate/up side that one gate_up block makes.
  std::size_t activated_channels() const { return traits.gated ? kPanelChannels : kBlockChannels; }
};

// The largest power of two up to 512 that divides k_padded (a multiple of 64).
std::size_t rotation_block(std::size_t k_padded);

// Byte offset, inside a block, of the 4 bytes that hold inputs [word·4/bytes_per_weight, …) of one channel.
inline std::size_t word_offset(std::size_t word, std::size_t panel, std::size_t channel) {
  return word / 16 * 2 * kTileBytes + panel * kTileBytes + word % 16 * kRowBytes + 4 * channel;
}

// Byte offset, inside an FP8 block, of one channel's code for input k. tiers/fp8-inl.hpp says why halves.
inline std::size_t fp8_offset(std::size_t k, std::size_t panel, std::size_t channel) {
  return k / 64 * 2 * kTileBytes + panel * kTileBytes + k % 64 / 2 * (kRowBytes / 2) + 2 * channel + k % 2;
}

}  // namespace kt
