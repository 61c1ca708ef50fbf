// Floats to the groups of a grouped matrix: each group's scale (and minimum) with the least squared error among a few.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tiers/table.hpp"

namespace kt {

struct GroupScale {
  float scale = 0.0f;
  float minimum = 0.0f;  // 0 where the matrix has none
};

// Groups that are searched side by side.
inline constexpr std::size_t kGroupsAtOnce = 4;

// Chooses for `groups` neighbouring groups, kGroupsAtOnce at most, of x[0…groups·traits.group): values[i] is one of the
// levels, chosen[g] is exact in the matrix's dtype of scales. x is finite. A group of zeros, or of numbers too small to
// tell from it, gets scale 0.
void choose_groups(const MatrixTraits& traits, const float* x, std::size_t groups, std::int8_t* values,
                   GroupScale* chosen);

}  // namespace kt
