// GGUF blocks of a whole tensor, decoded by all threads.
#pragma once

#include "cpu/context.hpp"
#include "gguf/blocks.hpp"

namespace kt {

// `blocks` blocks from `source` into parts that lie one after the other. `minimums` may be null for types without.
void unpack_blocks(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks,
                   const BlockParts& out);

// The weights as fp32: scale·value, plus minimum, each step rounded. What the `gguf` package computes, bit for bit.
void dequantize_blocks(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks,
                       float* out);

// The same, rounded to bf16 (nearest even).
void dequantize_blocks(Context& context, const BlockType& type, const std::uint8_t* source, std::size_t blocks,
                       std::uint16_t* out);

}  // namespace kt
