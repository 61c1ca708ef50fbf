// Floats to a group of a grouped matrix: the scale (and minimum) with the least squared error among a few.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tiers/table.hpp"

namespace kt {

struct GroupScale {
  float scale = 0.0f;
  float minimum = 0.0f;  // 0 where the matrix has none
};

// Chooses for x[0…group): values[i] is one of the levels, scale and minimum are exact in the matrix's dtype of scales.
// x is finite. A group of zeros, or of numbers too small to tell from it, gets scale 0.
GroupScale choose_group(const MatrixTraits& traits, const float* x, std::int8_t* values);

}  // namespace kt
