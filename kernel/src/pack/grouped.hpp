// One channel of a grouped matrix into its place in a block, and back.
#pragma once

#include <string>

#include "pack/packed_experts.hpp"

namespace kt {

// Throws Error for a group, levels, minimums and format that do not go together.
void check_groups(const MatrixTraits& traits);

// Bytes of a block's codes, scales and minimums.
std::size_t grouped_block_bytes(const MatrixTraits& traits, std::size_t k_padded);

// `row`: k_padded floats, quantised. `values`: scratch for as many.
void pack_grouped(const MatrixLayout& matrix, const float* row, std::int8_t* values, std::byte* block,
                  std::size_t channel);

// Channel `source_channel` of a matrix that comes quantised. Throws WeightsValueError that begins with `name` for a
// value that is none of the levels, and a scale or minimum that is NaN, infinite, or not exact in the matrix's dtype.
void pack_grouped_source(const MatrixLayout& matrix, const WeightView& source, const char* name,
                         std::size_t source_channel, std::byte* block, std::size_t channel);

// Dequantised, k_padded floats.
void unpack_grouped(const MatrixLayout& matrix, const std::byte* block, std::size_t channel, float* row);

}  // namespace kt
