// One packed weight matrix on its own: blocks as an expert's `down` has them.
#pragma once

#include "cpu/aligned_buffer.hpp"
#include "cpu/context.hpp"
#include "pack/layout.hpp"
#include "pack/packed_experts.hpp"

namespace kt {

class PackedMatrix {
 public:
  // N channels of K inputs. Throws Error for sizes that are zero or beyond the format's exact range.
  PackedMatrix(const MatrixTraits& traits, bool rotated, bool biased, std::size_t channels, std::size_t inputs);

  const MatrixLayout& layout() const { return layout_; }
  std::size_t channels() const { return channels_; }
  bool biased() const { return biased_; }
  const std::byte* data() const { return buffer_.data(); }

  // Quantises (N, K) on the context's threads; `table` serves only speed. `name` is for the error.
  // Throws WeightsValueError for a NaN or infinite weight, and the matrix must then not be used.
  void pack(Context& context, const TierTable& table, const WeightView& source, const char* name);

  // Dequantised and un-rotated: (N, K), contiguous fp32.
  void unpack(const TierTable& table, float* weights) const;

 private:
  MatrixLayout layout_;
  std::size_t channels_;
  bool biased_;
  AlignedBuffer buffer_;
};

}  // namespace kt
