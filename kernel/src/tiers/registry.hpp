// Every tier this source tree knows, what it needs, and whether this build holds it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/features.hpp"
#include "tiers/table.hpp"

namespace kt {

struct Tier {
  std::string_view name;
  const TierTable* table;                   // null: not in this build
  std::vector<std::string_view> needs_cpu;  // CpuFeatures names
  std::vector<std::string_view> needs_os;
};

// Lowest first; "generic" needs nothing.
std::span<const Tier> all_tiers();

// The names in `needs` that `features` lacks.
std::vector<std::string> missing(const CpuFeatures& features, std::span<const std::string_view> needs);

// The table of a tier that is compiled in and that this CPU and OS can run; throws Error saying why not.
const TierTable& usable_table(std::string_view tier);

std::vector<std::string> formats_of(const TierTable& table);

}  // namespace kt
