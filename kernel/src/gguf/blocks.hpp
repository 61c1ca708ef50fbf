// The quantised block types of GGUF files, taken apart into whole numbers, scales and minimums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kt {

// Where the parts of one block go: weight i = scales[i / group]·values[i] + minimums[i / group].
struct BlockParts {
  std::int8_t* values;
  float* scales;
  float* minimums;  // written by types that have them only
};

struct BlockType {
  std::string_view name;    // as ggml spells it
  std::size_t weights;      // in a block
  std::size_t bytes;        // of a block
  std::size_t group;        // weights that share a scale
  std::string_view levels;  // what values may be, as kt_kernel.quantized.LEVELS names it
  bool has_minimum;
  void (*unpack)(const std::uint8_t* block, const BlockParts& parts);
};

// Every type known here.
std::span<const BlockType> block_types();

// By name; Error that lists the known ones.
const BlockType& block_type(std::string_view name);

}  // namespace kt
