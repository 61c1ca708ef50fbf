#include "tiers/formats.hpp"

#include <string>

#include "error.hpp"

namespace kt {
namespace {

constexpr NamedFormat kFormats[] = {
    {Format::kInt8, "INT8", &TierTable::int8}, {Format::kBf16, "BF16", &TierTable::bf16},
    {Format::kInt4, "INT4", &TierTable::int4}, {Format::kInt8Grouped, "INT8_GROUPED", &TierTable::int8_grouped},
    {Format::kFp8, "FP8", &TierTable::fp8},
};

constexpr std::string_view kLevels[] = {"int4", "uint4", "e2m1", "int8", "normal4"};

}  // namespace

std::span<const NamedFormat> all_formats() {
  return kFormats;
}

std::string_view format_name(Format format) {
  return kFormats[static_cast<std::size_t>(format)].name;
}

Format parse_format(std::string_view name) {
  std::string names;
  for (const NamedFormat& known : kFormats) {
    if (known.name == name) return known.format;
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  throw Error("unknown format " + std::string(name) + "; formats: " + names);
}

std::string_view levels_name(Levels levels) {
  return kLevels[static_cast<std::size_t>(levels)];
}

Levels parse_levels(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kLevels); ++i) {
    if (kLevels[i] == name) return static_cast<Levels>(i);
  }
  throw Error("unknown levels " + std::string(name) + "; levels: int4, uint4, e2m1, int8, normal4");
}

bool is_grouped(Format format) {
  return format == Format::kInt4 || format == Format::kInt8Grouped;
}

MatrixTraits default_traits(Format format) {
  MatrixTraits traits{.format = format};
  if (!is_grouped(format)) return traits;
  traits.group = 32;
  traits.levels = format == Format::kInt4 ? Levels::kNormal4 : Levels::kInt8;
  traits.scales = DType::kBf16;  // fp32's range: no scale is too small for it
  return traits;
}

const FormatTable& functions_of(const TierTable& table, Format format) {
  return table.*kFormats[static_cast<std::size_t>(format)].functions;
}

}  // namespace kt
