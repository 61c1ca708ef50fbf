// One panel (16 channels) of float weights into its place in a block, and back.
#pragma once

#include "pack/packed_experts.hpp"

namespace kt {

class PanelPacker {
 public:
  // `row` and `packed_row` hold the padded inputs of any of the matrices as floats.
  PanelPacker(bool biased, const TierTable& table, float* row, void* packed_row)
      : biased_(biased), table_(table), row_(row), packed_row_(packed_row) {}

  // Channels [first, first + 16) of `source`; those from `channels` on are zero. `name` is for the error.
  void pack(const MatrixLayout& matrix, std::byte* block, std::size_t panel, const WeightView& source, const char* name,
            std::size_t first, std::size_t channels) const;

  // Both panels of block `index`: channels [32·index, 32·index + 32).
  void pack_both(const MatrixLayout& matrix, std::byte* block, const WeightView& source, const char* name,
                 std::size_t index, std::size_t channels) const;

 private:
  void load(const WeightView& source, const char* name, std::size_t channel, const MatrixLayout& matrix) const;
  // Zeros for a channel that is padding.
  void load_or_zero(const WeightView& source, const char* name, std::size_t channel, std::size_t channels,
                    const MatrixLayout& matrix) const;
  void place(std::byte* block, std::size_t panel, std::size_t lane, std::size_t words) const;
  // One channel, the floats in row_, as lane `lane` of a panel. False when the rotated weights overflow fp32.
  bool pack_row(const MatrixLayout& matrix, std::byte* block, std::size_t panel, std::size_t lane) const;
  bool pack_int8(const MatrixLayout& matrix, std::byte* block, std::size_t panel, std::size_t lane) const;
  void pack_bf16(const MatrixLayout& matrix, std::byte* block, std::size_t panel, std::size_t lane) const;
  void pack_fp8(const MatrixLayout& matrix, std::byte* block, std::size_t panel, const WeightView& source,
                const char* name, std::size_t first, std::size_t channels) const;

  bool biased_;
  const TierTable& table_;
  float* row_;
  void* packed_row_;
};

// Biases of channels [first, first + 16); zero from `channels` on. Throws WeightsValueError for one that is not finite.
void pack_biases(const MatrixLayout& matrix, std::byte* block, std::size_t panel, const float* biases, const char* name,
                 std::size_t first, std::size_t channels);

// The dequantised, un-rotated inputs of one of a block's 32 channels (matrix.inputs floats).
void unpack_channel(const TierTable& table, const MatrixLayout& matrix, const std::byte* block, std::size_t channel,
                    float* out);

}  // namespace kt
