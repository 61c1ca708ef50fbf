#include "pack/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "error.hpp"
#include "pack/fp8.hpp"
#include "pack/grouped.hpp"

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"

inline float to_float(float x) {
  return x;
}

// bf16 and fp16 are both 16 bits wide; a type of its own tells them apart.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};
inline float to_float(Bf16 x) {
  return bf16_to_float(x.bits);
}
inline float to_float(F16 x) {
  return f16_to_float(x.bits);
}

template <class T>
void gather(const T* source, std::ptrdiff_t stride, std::size_t n, float* out) {
  if (stride == 1) {
    for (std::size_t i = 0; i < n; ++i) out[i] = to_float(source[i]);
  } else {
    for (std::size_t i = 0; i < n; ++i) out[i] = to_float(source[static_cast<std::ptrdiff_t>(i) * stride]);
  }
}

bool all_finite(const float* x, std::size_t n) {
  std::uint32_t most = 0;  // the bits of |x| order as |x| does, infinities and NaNs last
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = float_to_bits(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return most < 0x7f800000u;
}

// Scales and channel sums follow the tiles of an INT8 block.
float* scales_of(const MatrixLayout& matrix, std::byte* block) {
  return reinterpret_cast<float*>(block + matrix.block_bytes - kTrailerBytes);
}

float* biases_of(const MatrixLayout& matrix, std::byte* block) {
  const std::size_t behind = matrix.format() == Format::kInt8 ? kTrailerBytes : 0;
  return reinterpret_cast<float*>(block + matrix.block_bytes - behind - kBiasBytes);
}

std::int32_t* sums_of(const MatrixLayout& matrix, std::byte* block) {
  return reinterpret_cast<std::int32_t*>(block + matrix.block_bytes - kTrailerBytes / 2);
}

}  // namespace

void PanelPacker::load(const WeightView& source, const char* name, std::size_t channel,
                       const MatrixLayout& matrix) const {
  const std::ptrdiff_t base = static_cast<std::ptrdiff_t>(channel) * source.channel_stride;
  switch (source.dtype) {
    case DType::kF32:
      gather(static_cast<const float*>(source.data) + base, source.input_stride, matrix.inputs, row_);
      break;
    case DType::kBf16:
      gather(static_cast<const Bf16*>(source.data) + base, source.input_stride, matrix.inputs, row_);
      break;
    case DType::kF16:
      gather(static_cast<const F16*>(source.data) + base, source.input_stride, matrix.inputs, row_);
      break;
  }
  if (!all_finite(row_, matrix.inputs)) {
    std::size_t i = 0;
    while (std::isfinite(row_[i])) ++i;
    throw WeightsValueError(std::string(name) + " weight at channel " + std::to_string(channel) + ", input " +
                            std::to_string(i) + " is " + (std::isnan(row_[i]) ? "NaN" : "infinite"));
  }
  std::fill(row_ + matrix.inputs, row_ + matrix.k_padded, 0.0f);
}

void PanelPacker::place(std::byte* block, std::size_t panel, std::size_t lane, std::size_t words) const {
  const char* source = static_cast<const char*>(packed_row_);
  for (std::size_t w = 0; w < words; ++w) std::memcpy(block + word_offset(w, panel, lane), source + 4 * w, 4);
}

bool PanelPacker::pack_int8(const MatrixLayout& matrix, std::byte* block, std::size_t panel, std::size_t lane) const {
  const std::size_t rotation = matrix.traits.rotation;
  auto* q = static_cast<std::int8_t*>(packed_row_);
  // Weights and activations are both multiplied by the unnormalised H, and H·H = rotation·1: the scale takes it back (a
  // power of two).
  const float scale = table_.quantize(row_, matrix.k_padded, q) / static_cast<float>(rotation == 0 ? 1 : rotation);
  if (std::isnan(scale)) return false;
  std::int32_t sum = 0;
  for (std::size_t i = 0; i < matrix.k_padded; ++i) sum += q[i];
  place(block, panel, lane, matrix.k_padded / 4);
  scales_of(matrix, block)[panel * kPanelChannels + lane] = scale;
  sums_of(matrix, block)[panel * kPanelChannels + lane] = sum;
  return true;
}

void PanelPacker::pack_bf16(const MatrixLayout& matrix, std::byte* block, std::size_t panel, std::size_t lane) const {
  auto* out = static_cast<std::uint16_t*>(packed_row_);
  for (std::size_t i = 0; i < matrix.k_padded; ++i) out[i] = float_to_bf16(row_[i]);
  place(block, panel, lane, matrix.k_padded / 2);
}

bool PanelPacker::pack_row(const MatrixLayout& matrix, std::byte* block, std::size_t panel, std::size_t lane) const {
  if (matrix.traits.rotation != 0) table_.rotate(row_, matrix.k_padded, matrix.traits.rotation);
  switch (matrix.format()) {
    case Format::kInt8:
      return pack_int8(matrix, block, panel, lane);
    case Format::kBf16:
      pack_bf16(matrix, block, panel, lane);
      return true;
    case Format::kInt4:
    case Format::kInt8Grouped:
      if (!all_finite(row_, matrix.k_padded)) return false;
      pack_grouped(matrix, row_, static_cast<std::int8_t*>(packed_row_), block, panel * kPanelChannels + lane);
      return true;
    case Format::kFp8:
      break;  // packed a panel at a time
  }
  throw Error("rows are not packed one by one into " + std::string(format_name(matrix.format())));
}

void PanelPacker::load_or_zero(const WeightView& source, const char* name, std::size_t channel, std::size_t channels,
                               const MatrixLayout& matrix) const {
  if (channel < channels) {
    load(source, name, channel, matrix);
  } else {
    std::fill(row_, row_ + matrix.k_padded, 0.0f);
  }
}

void PanelPacker::pack_fp8(const MatrixLayout& matrix, std::byte* block, std::size_t panel, const WeightView& source,
                           const char* name, std::size_t first, std::size_t channels) const {
  Fp8Panel fp8(matrix, block, panel);
  fp8.start_measuring();
  for (std::size_t channel = first; channel < std::min(first + kPanelChannels, channels); ++channel) {
    load(source, name, channel, matrix);
    fp8.measure(row_);
  }
  fp8.finish_measuring();
  for (std::size_t lane = 0; lane < kPanelChannels; ++lane) {
    load_or_zero(source, name, first + lane, channels, matrix);
    fp8.encode(lane, row_);
  }
}

void PanelPacker::pack(const MatrixLayout& matrix, std::byte* block, std::size_t panel, const WeightView& source,
                       const char* name, std::size_t first, std::size_t channels) const {
  if (biased_) pack_biases(matrix, block, panel, source.bias, name, first, channels);
  if (matrix.format() == Format::kFp8) return pack_fp8(matrix, block, panel, source, name, first, channels);
  for (std::size_t lane = 0; lane < kPanelChannels; ++lane) {
    const std::size_t channel = first + lane;
    if (channel < channels && source.scales != nullptr) {
      pack_grouped_source(matrix, source, name, channel, block, panel * kPanelChannels + lane);
      continue;
    }
    load_or_zero(source, name, channel, channels, matrix);
    if (!pack_row(matrix, block, panel, lane)) {
      throw WeightsValueError(std::string(name) + " weights of channel " + std::to_string(channel) +
                              " are too large to rotate: sums of them overflow fp32");
    }
  }
}

void PanelPacker::pack_both(const MatrixLayout& matrix, std::byte* block, const WeightView& source, const char* name,
                            std::size_t index, std::size_t channels) const {
  for (std::size_t panel = 0; panel < 2; ++panel) {
    pack(matrix, block, panel, source, name, index * kBlockChannels + panel * kPanelChannels, channels);
  }
}

void pack_biases(const MatrixLayout& matrix, std::byte* block, std::size_t panel, const float* biases, const char* name,
                 std::size_t first, std::size_t channels) {
  for (std::size_t lane = 0; lane < kPanelChannels; ++lane) {
    const float bias = first + lane < channels ? biases[first + lane] : 0.0f;
    if (!std::isfinite(bias)) {
      throw WeightsValueError(std::string(name) + " bias of channel " + std::to_string(first + lane) + " is " +
                              (std::isnan(bias) ? "NaN" : "infinite"));
    }
    biases_of(matrix, block)[panel * kPanelChannels + lane] = bias;
  }
}

void unpack_channel(const TierTable& table, const MatrixLayout& matrix, const std::byte* block, std::size_t channel,
                    float* out) {
  const std::size_t panel = channel / kPanelChannels, lane = channel % kPanelChannels;
  std::vector<float> row(matrix.k_padded);
  if (is_grouped(matrix.format())) {
    unpack_grouped(matrix, block, channel, row.data());
  } else if (matrix.format() == Format::kFp8) {
    Fp8Panel(matrix, const_cast<std::byte*>(block), panel).decode(lane, row.data());
  } else {
    const std::size_t per_word = matrix.format() == Format::kInt8 ? 4 : 2;
    for (std::size_t i = 0; i < matrix.k_padded; ++i) {
      const std::byte* word = block + word_offset(i / per_word, panel, lane);
      if (matrix.format() == Format::kInt8) {
        row[i] = static_cast<float>(reinterpret_cast<const std::int8_t*>(word)[i % 4]);
      } else {
        std::uint16_t bits;
        std::memcpy(&bits, word + i % 2 * 2, 2);
        row[i] = bf16_to_float(bits);
      }
    }
  }
  // H is its own inverse, up to the factor in the scale.
  if (matrix.traits.rotation != 0) table.rotate(row.data(), matrix.k_padded, matrix.traits.rotation);
  if (matrix.format() == Format::kInt8) {
    const float scale = scales_of(matrix, const_cast<std::byte*>(block))[channel];
    for (float& value : row) value *= scale;
  }
  std::copy_n(row.begin(), matrix.inputs, out);
}

}  // namespace kt
