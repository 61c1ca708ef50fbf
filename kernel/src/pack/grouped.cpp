#include "pack/grouped.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "error.hpp"
#include "pack/group_search.hpp"

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"
#include "tiers/grouped-layout-inl.hpp"
#include "pack/scales-inl.hpp"

// The byte that holds input k of a group's channel, and whether in its high half.
struct Place {
  std::size_t byte;
  bool high;
};

Place place_of(const MatrixTraits& traits, std::size_t channel, std::size_t k) {
  const std::size_t panel = channel / kPanelChannels * group_panel_bytes(traits) + channel % kPanelChannels * 4;
  if (traits.format == Format::kInt8Grouped) return {panel + k / 4 * kRowBytes + k % 4, false};
  return {panel + k / 8 * kRowBytes + k % 4, k % 8 >= 4};
}

// The code of every 8-bit value, 16 for those that are none of the levels.
using Codes = std::array<std::uint8_t, 256>;

Codes codes_of(Levels levels) {
  Codes codes;
  codes.fill(16);
  // From behind, so that of two codes for one value, e2m1's zeros, the lower one stays.
  for (unsigned code = 16; code-- > 0;) {
    codes[static_cast<std::uint8_t>(nibble_value(levels, code))] = static_cast<std::uint8_t>(code);
  }
  return codes;
}

const Codes& codes(Levels levels) {
  static const std::array<Codes, 5> all = {codes_of(Levels::kInt4), codes_of(Levels::kUint4), codes_of(Levels::kE2m1),
                                           codes_of(Levels::kInt8), codes_of(Levels::kNormal4)};
  return all[static_cast<std::size_t>(levels)];
}

// A channel's 4 bytes of each panel row of a group (tiers/grouped-layout-inl.hpp).
void put_bytes(const MatrixTraits& traits, std::byte* to, const std::int8_t* values) {
  for (std::size_t k = 0; k < traits.group; k += 4, to += kRowBytes) std::memcpy(to, values + k, 4);
}

void put_nibbles(const MatrixTraits& traits, std::byte* to, const std::int8_t* values) {
  const Codes& code = codes(traits.levels);
  for (std::size_t k = 0; k < traits.group; k += 8, to += kRowBytes) {
    for (std::size_t i = 0; i < 4; ++i) {
      const auto low = static_cast<std::uint8_t>(values[k + i]), high = static_cast<std::uint8_t>(values[k + 4 + i]);
      to[i] = static_cast<std::byte>(code[low] | code[high] << 4);
    }
  }
}

void put(const MatrixTraits& traits, std::byte* group, std::size_t channel, const std::int8_t* values, GroupScale g) {
  const Place place = place_of(traits, channel, 0);
  if (traits.format == Format::kInt8Grouped) {
    put_bytes(traits, group + place.byte, values);
  } else {
    put_nibbles(traits, group + place.byte, values);
  }
  std::byte* scales = group + 2 * group_panel_bytes(traits);
  write_scale(scales, traits.scales, channel, g.scale);
  if (traits.minimums) write_scale(scales + group_scales_bytes(traits), traits.scales, channel, g.minimum);
}

std::string place_text(const char* name, const char* what, std::size_t channel, std::size_t index, const char* of) {
  return std::string(name) + " " + what + " of channel " + std::to_string(channel) + ", " + of + " " +
         std::to_string(index);
}

float checked_scale(const MatrixTraits& traits, const char* name, const char* what, std::size_t channel, std::size_t g,
                    float scale) {
  if (!std::isfinite(scale)) {
    throw WeightsValueError(place_text(name, what, channel, g, "group") + " is " +
                            (std::isnan(scale) ? "NaN" : "infinite"));
  }
  if (narrow_scale(scale, traits.scales) != scale) {
    throw WeightsValueError(place_text(name, what, channel, g, "group") + " is " + std::to_string(scale) +
                            ", which the 16-bit type chosen for it does not hold");
  }
  return scale;
}

void check_level(const MatrixTraits& traits, const char* name, std::size_t channel, std::size_t k, std::int8_t value) {
  if (traits.format == Format::kInt8Grouped || codes(traits.levels)[static_cast<std::uint8_t>(value)] < 16) return;
  throw WeightsValueError(place_text(name, "value", channel, k, "input") + " is " + std::to_string(value) +
                          ", which is none of the levels " + std::string(levels_name(traits.levels)));
}

}  // namespace

void check_groups(const MatrixTraits& traits) {
  const std::string name(format_name(traits.format));
  if (!is_grouped(traits.format)) {
    if (traits.group != 0 || traits.minimums) throw Error(name + " has no groups and no minimums");
    return;
  }
  constexpr std::size_t kGroups[] = {16, 32, 64, 128};
  if (std::find(std::begin(kGroups), std::end(kGroups), traits.group) == std::end(kGroups)) {
    throw Error(name + " has groups of 16, 32, 64 or 128 inputs, not " + std::to_string(traits.group));
  }
  if ((traits.format == Format::kInt8Grouped) != (traits.levels == Levels::kInt8)) {
    throw Error(name + " does not hold the levels " + std::string(levels_name(traits.levels)));
  }
}

std::size_t grouped_block_bytes(const MatrixTraits& traits, std::size_t k_padded) {
  return k_padded / traits.group * group_bytes(traits);
}

void pack_grouped(const MatrixLayout& matrix, const float* row, std::int8_t* values, std::byte* block,
                  std::size_t channel) {
  const MatrixTraits& traits = matrix.traits;
  // Weights and activations are both multiplied by the unnormalised H: the scale takes it back (a power of two).
  const float rotation = static_cast<float>(traits.rotation == 0 ? 1 : traits.rotation);
  const std::size_t groups = matrix.k_padded / traits.group;
  for (std::size_t first = 0; first < groups; first += kGroupsAtOnce) {
    const std::size_t some = std::min(kGroupsAtOnce, groups - first);
    GroupScale chosen[kGroupsAtOnce];
    choose_groups(traits, row + first * traits.group, some, values, chosen);
    for (std::size_t g = 0; g < some; ++g) {
      put(traits, block + (first + g) * group_bytes(traits), channel, values + g * traits.group,
          {chosen[g].scale / rotation, chosen[g].minimum / rotation});
    }
  }
}

void pack_grouped_source(const MatrixLayout& matrix, const WeightView& source, const char* name,
                         std::size_t source_channel, std::byte* block, std::size_t channel) {
  const MatrixTraits& traits = matrix.traits;
  const auto* values = static_cast<const std::int8_t*>(source.data) +
                       static_cast<std::ptrdiff_t>(source_channel) * source.channel_stride;
  const std::ptrdiff_t scales = static_cast<std::ptrdiff_t>(source_channel) * source.scale_stride;
  for (std::size_t g = 0; g < matrix.k_padded / traits.group; ++g) {
    std::int8_t group[128] = {};
    for (std::size_t k = g * traits.group; k < std::min((g + 1) * traits.group, matrix.inputs); ++k) {
      const std::int8_t value = values[static_cast<std::ptrdiff_t>(k) * source.input_stride];
      check_level(traits, name, source_channel, k, value);
      group[k % traits.group] = value;
    }
    GroupScale scale;
    if (g * traits.group < matrix.inputs) {
      const auto i = scales + static_cast<std::ptrdiff_t>(g);
      scale.scale = checked_scale(traits, name, "scale", source_channel, g, source.scales[i]);
      if (traits.minimums) {
        scale.minimum = checked_scale(traits, name, "minimum", source_channel, g, source.minimums[i]);
      }
    }
    put(traits, block + g * group_bytes(traits), channel, group, scale);
  }
}

void unpack_grouped(const MatrixLayout& matrix, const std::byte* block, std::size_t channel, float* row) {
  const MatrixTraits& traits = matrix.traits;
  for (std::size_t g = 0; g < matrix.k_padded / traits.group; ++g) {
    const std::byte* group = block + g * group_bytes(traits);
    const std::byte* scales = group + 2 * group_panel_bytes(traits);
    const float scale = read_scale(scales, traits.scales, channel);
    for (std::size_t k = 0; k < traits.group; ++k) {
      const Place place = place_of(traits, channel, k);
      const auto byte = static_cast<unsigned>(group[place.byte]);
      const int value = traits.format == Format::kInt8Grouped
                            ? static_cast<std::int8_t>(byte)
                            : nibble_value(traits.levels, place.high ? byte >> 4 : byte & 15);
      float weight = static_cast<float>(value) * scale;
      if (traits.minimums) weight += read_scale(scales + group_scales_bytes(traits), traits.scales, channel);
      row[g * traits.group + k] = weight;
    }
  }
}

}  // namespace kt
