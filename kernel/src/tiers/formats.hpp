// Every format of weights that this source tree knows: its name, and where its arithmetic stands in a tier's table.
#pragma once

#include <span>
#include <string_view>

#include "tiers/table.hpp"

namespace kt {

struct NamedFormat {
  Format format;
  std::string_view name;
  FormatTable TierTable::* functions;
};

std::span<const NamedFormat> all_formats();

std::string_view format_name(Format format);
// Throws Error that lists the formats.
Format parse_format(std::string_view name);

// "int4", "uint4", "e2m1", "int8", "normal4".
std::string_view levels_name(Levels levels);
Levels parse_levels(std::string_view name);

// Formats of scaled groups: INT4, INT8_GROUPED.
bool is_grouped(Format format);

// What weights that come as floats become.
MatrixTraits default_traits(Format format);

// Bytes of one number.
inline std::size_t float_size(DType type) {
  return type == DType::kF32 ? 4 : 2;
}

// Null pointers where the tier lacks the format.
const FormatTable& functions_of(const TierTable& table, Format format);

}  // namespace kt
