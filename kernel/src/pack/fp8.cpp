#include "pack/fp8.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "error.hpp"

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"

constexpr float kLargest = 448.0f;  // of e4m3

float finite_scale(float scale, const char* name, std::size_t channel, std::size_t input) {
  if (std::isfinite(scale)) return scale;
  throw WeightsValueError(std::string(name) + " scale of channel " + std::to_string(channel) + " from input " +
                          std::to_string(input) + " on is " + (std::isnan(scale) ? "NaN" : "infinite"));
}

float scale_at(const Fp8View& source, std::size_t channel, std::size_t input) {
  const std::size_t row = (source.first_channel + channel) / source.block_channels;
  return source.scales[static_cast<std::ptrdiff_t>(row) * source.scale_stride +
                       static_cast<std::ptrdiff_t>(input / source.block_inputs)];
}

// One scale for all inputs of a channel.
bool scales_channels(const Fp8View& source, std::size_t inputs) {
  return source.block_inputs >= inputs;
}

}  // namespace

Fp8Panel::Fp8Panel(const MatrixLayout& matrix, std::byte* block, std::size_t panel)
    : matrix_(matrix), block_(block), panel_(panel) {}

float& Fp8Panel::channel_scale(std::size_t lane) const {
  return reinterpret_cast<float*>(block_ + kBlockChannels * matrix_.k_padded)[panel_ * kPanelChannels + lane];
}

float& Fp8Panel::panel_scale(std::size_t group) const {
  return reinterpret_cast<float*>(block_ + kBlockChannels * matrix_.k_padded +
                                  kFp8ChannelScaleBytes)[2 * group + panel_];
}

std::uint8_t& Fp8Panel::code(std::size_t lane, std::size_t k) const {
  return *reinterpret_cast<std::uint8_t*>(block_ + fp8_offset(k, panel_, lane));
}

std::size_t Fp8Panel::groups() const {
  return (matrix_.k_padded + kFp8Inputs - 1) / kFp8Inputs;
}

void Fp8Panel::clear_panel_scales() {
  constexpr std::size_t kGroupsOfLine = kRowBytes / (2 * sizeof(float));
  const std::size_t stored = (groups() + kGroupsOfLine - 1) / kGroupsOfLine * kGroupsOfLine;
  for (std::size_t g = 0; g < stored; ++g) panel_scale(g) = 0.0f;
}

void Fp8Panel::start_measuring() {
  clear_panel_scales();
}

void Fp8Panel::measure(const float* row) {
  for (std::size_t g = 0; g < groups(); ++g) {
    float most = panel_scale(g);
    const std::size_t end = std::min(matrix_.k_padded, (g + 1) * kFp8Inputs);
    for (std::size_t k = g * kFp8Inputs; k < end; ++k) most = std::max(most, std::fabs(row[k]));
    panel_scale(g) = most;
  }
}

void Fp8Panel::finish_measuring() {
  for (std::size_t g = 0; g < groups(); ++g) panel_scale(g) /= kLargest;
}

void Fp8Panel::encode(std::size_t lane, const float* row) {
  for (std::size_t k = 0; k < matrix_.k_padded; ++k) {
    const float scale = panel_scale(k / kFp8Inputs);
    code(lane, k) = scale == 0.0f ? std::uint8_t{0} : float_to_e4m3(row[k] / scale);
  }
  channel_scale(lane) = 1.0f;
}

void Fp8Panel::copy(const Fp8View& source, const char* name, std::size_t first, std::size_t channels) {
  const bool by_channel = scales_channels(source, matrix_.inputs);
  clear_panel_scales();
  // Errors name a block's first channel, whichever of its panels found it: they are packed side by side.
  const std::size_t in_block = (source.first_channel + first) % source.block_channels;
  const std::size_t block_first = first - std::min(first, in_block);
  for (std::size_t g = 0; g < groups() && first < channels; ++g) {
    const std::size_t input = g * kFp8Inputs;  // always a real one: less than 64 are padding
    panel_scale(g) = by_channel ? 1.0f : finite_scale(scale_at(source, first, input), name, block_first, input);
  }
  for (std::size_t lane = 0; lane < kPanelChannels; ++lane) {
    const std::size_t channel = first + lane;
    if (channel < channels) {
      copy_channel(source, name, lane, channel);
      channel_scale(lane) = by_channel ? finite_scale(scale_at(source, channel, 0), name, channel, 0) : 1.0f;
    } else {
      for (std::size_t k = 0; k < matrix_.k_padded; ++k) code(lane, k) = 0;
      channel_scale(lane) = 0.0f;
    }
  }
}

void Fp8Panel::copy_channel(const Fp8View& source, const char* name, std::size_t lane, std::size_t channel) {
  const std::uint8_t* from = source.codes + static_cast<std::ptrdiff_t>(channel) * source.channel_stride;
  for (std::size_t k = 0; k < matrix_.inputs; ++k) {
    const std::uint8_t value = from[static_cast<std::ptrdiff_t>(k) * source.input_stride];
    if ((value & 0x7f) == 0x7f) {
      throw WeightsValueError(std::string(name) + " weight at channel " + std::to_string(channel) + ", input " +
                              std::to_string(k) + " is NaN (e4m3 code " + (value == 0x7f ? "0x7f" : "0xff") + ")");
    }
    code(lane, k) = value;
  }
  for (std::size_t k = matrix_.inputs; k < matrix_.k_padded; ++k) code(lane, k) = 0;
}

void Fp8Panel::decode(std::size_t lane, float* row) const {
  for (std::size_t k = 0; k < matrix_.k_padded; ++k) {
    row[k] = e4m3_to_float(code(lane, k)) * panel_scale(k / kFp8Inputs) * channel_scale(lane);
  }
}

void check_fp8_blocks(const Fp8View& source, const char* name, std::size_t channels, std::size_t inputs) {
  if (source.block_channels == 0 || source.block_inputs == 0) throw Error(std::string(name) + ": blocks of no weights");
  if (scales_channels(source, inputs)) return;
  const bool whole_panels = source.first_channel % source.block_channels + channels <= source.block_channels ||
                            (source.block_channels % kPanelChannels == 0 && source.first_channel % kPanelChannels == 0);
  if (source.block_inputs % kFp8Inputs == 0 && whole_panels) return;
  throw WeightsValueError(
      std::string(name) + ": a scale for " + std::to_string(source.block_channels) + " x " +
      std::to_string(source.block_inputs) +
      " weights does not fit FP8's packed form, which has one for each channel, or one for a multiple of 16 "
      "channels x a multiple of 128 inputs: pass their floats");
}

}  // namespace kt
