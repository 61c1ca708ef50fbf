// One panel (16 channels) of FP8 weights in its place in a block: codes, and scales of either kind.
#pragma once

#include <cstdint>

#include "pack/packed_experts.hpp"

namespace kt {

class Fp8Panel {
 public:
  Fp8Panel(const MatrixLayout& matrix, std::byte* block, std::size_t panel);

  // Floats, padded to k_padded: a block of 16 channels x 128 inputs shares a scale, its largest magnitude / 448. So
  // every channel is measured first, then encoded. No scale rounds to nothing: what it would serve is zero.
  void start_measuring();
  void measure(const float* row);
  void finish_measuring();
  void encode(std::size_t lane, const float* row);

  // A source's own codes and scales, unchanged. Channels from `channels` on are zero. Throws WeightsValueError for a
  // NaN code and for a scale that is NaN or infinite.
  void copy(const Fp8View& source, const char* name, std::size_t first, std::size_t channels);

  // k_padded floats, dequantised.
  void decode(std::size_t lane, float* row) const;

  float& channel_scale(std::size_t lane) const;
  // Of 128 inputs from 128·group on.
  float& panel_scale(std::size_t group) const;

 private:
  std::uint8_t& code(std::size_t lane, std::size_t k) const;
  std::size_t groups() const;
  // All of them zero, with those that only fill the last cache line.
  void clear_panel_scales();
  void copy_channel(const Fp8View& source, const char* name, std::size_t lane, std::size_t channel);

  const MatrixLayout& matrix_;
  std::byte* block_;
  std::size_t panel_;
};

// Throws WeightsValueError unless each scale of the source serves whole channels, or whole panels of 16 channels x 128
// inputs.
void check_fp8_blocks(const Fp8View& source, const char* name, std::size_t channels, std::size_t inputs);

}  // namespace kt
