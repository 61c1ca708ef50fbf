// Formats: ggml-common.h of llama.cpp (block_q4_0 … block_mxfp4), which the `gguf` package repeats in quants.py. Every
// product here – a half-precision scale times a whole number of at most 8 bits – is exact in fp32.
#include "gguf/blocks.hpp"

#include <array>
#include <cstring>
#include <string>

#include "error.hpp"

namespace kt {
namespace {

#include "tiers/scalar-inl.hpp"

constexpr std::size_t kBlock = 32;        // weights of a plain block
constexpr std::size_t kSuperBlock = 256;  // weights of a "K" block, QK_K in ggml

// Codebook of IQ4_NL and IQ4_XS, and of MXFP4 (values of e2m1, doubled).
constexpr std::array<std::int8_t, 16> kNonLinear = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                    1,    13,   25,  38,  53,  69,  89,  113};
constexpr std::array<std::int8_t, 16> kE2m1 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

std::uint16_t u16(const std::uint8_t* p) {
  return static_cast<std::uint16_t>(p[0] | p[1] << 8);
}

float half(const std::uint8_t* p) {
  return f16_to_float(u16(p));
}

// 16 bytes hold 32 codes: the low nibbles come first, then the high ones.
template <class Map>
void nibbles(const std::uint8_t* packed, std::size_t bytes, std::int8_t* values, Map map) {
  for (std::size_t i = 0; i < bytes; ++i) values[i] = map(i, packed[i] & 15);
  for (std::size_t i = 0; i < bytes; ++i) values[bytes + i] = map(bytes + i, packed[i] >> 4);
}

std::int8_t plain(std::size_t, int code) {
  return static_cast<std::int8_t>(code);
}

// Codes of 5 bits whose highest bit is bit i of a 32-bit word.
struct WithFifthBit {
  std::uint32_t bits;
  int offset;
  std::int8_t operator()(std::size_t i, int code) const {
    return static_cast<std::int8_t>((code | static_cast<int>(bits >> i & 1) << 4) - offset);
  }
};

std::uint32_t u32(const std::uint8_t* p) {
  return u16(p) | static_cast<std::uint32_t>(u16(p + 2)) << 16;
}

void unpack_q4_0(const std::uint8_t* block, const BlockParts& parts) {
  parts.scales[0] = half(block);
  nibbles(block + 2, 16, parts.values, [](std::size_t, int code) { return static_cast<std::int8_t>(code - 8); });
}

void unpack_q4_1(const std::uint8_t* block, const BlockParts& parts) {
  parts.scales[0] = half(block);
  parts.minimums[0] = half(block + 2);
  nibbles(block + 4, 16, parts.values, plain);
}

void unpack_q5_0(const std::uint8_t* block, const BlockParts& parts) {
  parts.scales[0] = half(block);
  nibbles(block + 6, 16, parts.values, WithFifthBit{u32(block + 2), 16});
}

void unpack_q5_1(const std::uint8_t* block, const BlockParts& parts) {
  parts.scales[0] = half(block);
  parts.minimums[0] = half(block + 2);
  nibbles(block + 8, 16, parts.values, WithFifthBit{u32(block + 4), 0});
}

void unpack_q8_0(const std::uint8_t* block, const BlockParts& parts) {
  parts.scales[0] = half(block);
  std::memcpy(parts.values, block + 2, kBlock);
}

// 16 scales and minimums of 4 bits, then codes of 2 bits: each 32 bytes hold 128 of them, 32 at each pair of bits.
void unpack_q2_k(const std::uint8_t* block, const BlockParts& parts) {
  const std::uint8_t* codes = block + 16;
  const float scale = half(block + 80), minimum = half(block + 82);
  for (std::size_t g = 0; g < 16; ++g) {
    parts.scales[g] = scale * static_cast<float>(block[g] & 15);
    parts.minimums[g] = -(minimum * static_cast<float>(block[g] >> 4));
  }
  for (std::size_t i = 0; i < kSuperBlock; ++i)
    parts.values[i] = static_cast<std::int8_t>(codes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3);
}

// Codes as in Q2_K with a third bit apart, which counts 4 downwards where it is not set; 16 scales of 6 bits.
void unpack_q3_k(const std::uint8_t* block, const BlockParts& parts) {
  const std::uint8_t *high = block, *codes = block + 32, *scales = block + 96;
  const float scale = half(block + 108);
  for (std::size_t g = 0; g < 16; ++g) {
    const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    const int top = scales[8 + g % 4] >> (g / 4 * 2) & 3;
    parts.scales[g] = scale * static_cast<float>((low | top << 4) - 32);
  }
  for (std::size_t i = 0; i < kSuperBlock; ++i) {
    const int low = codes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    parts.values[i] = static_cast<std::int8_t>(low - (high[i % 32] >> (i / 32) & 1 ? 0 : 4));
  }
}

// The scales and minimums that Q4_K and Q5_K share: 8 pairs of 6 bits in 12 bytes, the first four pairs in 6 bits of a
// byte, the other four split over nibbles and the two bits left.
void unpack_k_scales(const std::uint8_t* block, const BlockParts& parts) {
  const float scale = half(block), minimum = half(block + 2);
  const std::uint8_t* packed = block + 4;
  for (std::size_t g = 0; g < 4; ++g) {
    parts.scales[g] = scale * static_cast<float>(packed[g] & 63);
    parts.minimums[g] = -(minimum * static_cast<float>(packed[4 + g] & 63));
    parts.scales[4 + g] = scale * static_cast<float>((packed[8 + g] & 15) | (packed[g] >> 6 << 4));
    parts.minimums[4 + g] = -(minimum * static_cast<float>((packed[8 + g] >> 4) | (packed[4 + g] >> 6 << 4)));
  }
}

void unpack_q4_k(const std::uint8_t* block, const BlockParts& parts) {
  unpack_k_scales(block, parts);
  for (std::size_t c = 0; c < 4; ++c) nibbles(block + 16 + c * 32, 32, parts.values + c * 64, plain);
}

void unpack_q5_k(const std::uint8_t* block, const BlockParts& parts) {
  unpack_k_scales(block, parts);
  const std::uint8_t* high = block + 16;
  for (std::size_t c = 0; c < 4; ++c) {
    nibbles(block + 48 + c * 32, 32, parts.values + c * 64, [high, c](std::size_t i, int code) {
      return static_cast<std::int8_t>(code | (high[i % 32] >> (2 * c + i / 32) & 1) << 4);
    });
  }
}

// 4 low bits of 128 weights in 64 bytes, their 2 high bits in 32; 16 signed scales.
void unpack_q6_k(const std::uint8_t* block, const BlockParts& parts) {
  const std::uint8_t* high = block + 128;
  const float scale = half(block + 208);
  for (std::size_t g = 0; g < 16; ++g)
    parts.scales[g] = scale * static_cast<float>(static_cast<std::int8_t>(block[192 + g]));
  for (std::size_t c = 0; c < 2; ++c) {
    nibbles(block + c * 64, 64, parts.values + c * 128, [high, c](std::size_t i, int code) {
      return static_cast<std::int8_t>((code | (high[c * 32 + i % 32] >> (i / 32 * 2) & 3) << 4) - 32);
    });
  }
}

void unpack_iq4_nl(const std::uint8_t* block, const BlockParts& parts) {
  parts.scales[0] = half(block);
  nibbles(block + 2, 16, parts.values,
          [](std::size_t, int code) { return kNonLinear[static_cast<std::size_t>(code)]; });
}

void unpack_iq4_xs(const std::uint8_t* block, const BlockParts& parts) {
  const float scale = half(block);
  const int high = u16(block + 2);
  for (std::size_t g = 0; g < 8; ++g) {
    const int low = block[4 + g / 2] >> (g % 2 * 4) & 15;
    parts.scales[g] = scale * static_cast<float>((low | (high >> 2 * g & 3) << 4) - 32);
    nibbles(block + 8 + g * 16, 16, parts.values + g * 32,
            [](std::size_t, int code) { return kNonLinear[static_cast<std::size_t>(code)]; });
  }
}

// The scale is a power of two, halved because the codebook is doubled: 2^(e - 128).
void unpack_mxfp4(const std::uint8_t* block, const BlockParts& parts) {
  const std::uint32_t exponent = block[0];
  parts.scales[0] = bits_to_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
  nibbles(block + 1, 16, parts.values, [](std::size_t, int code) { return kE2m1[static_cast<std::size_t>(code)]; });
}

constexpr std::array<BlockType, 13> kBlockTypes = {{
    {"Q4_0", kBlock, 18, 32, "int4", false, unpack_q4_0},
    {"Q4_1", kBlock, 20, 32, "uint4", true, unpack_q4_1},
    {"Q5_0", kBlock, 22, 32, "int8", false, unpack_q5_0},
    {"Q5_1", kBlock, 24, 32, "int8", true, unpack_q5_1},
    {"Q8_0", kBlock, 34, 32, "int8", false, unpack_q8_0},
    {"Q2_K", kSuperBlock, 84, 16, "uint4", true, unpack_q2_k},
    {"Q3_K", kSuperBlock, 110, 16, "int4", false, unpack_q3_k},
    {"Q4_K", kSuperBlock, 144, 32, "uint4", true, unpack_q4_k},
    {"Q5_K", kSuperBlock, 176, 32, "int8", true, unpack_q5_k},
    {"Q6_K", kSuperBlock, 210, 16, "int8", false, unpack_q6_k},
    {"IQ4_NL", kBlock, 18, 32, "int8", false, unpack_iq4_nl},
    {"IQ4_XS", kSuperBlock, 136, 32, "int8", false, unpack_iq4_xs},
    {"MXFP4", kBlock, 17, 32, "e2m1", false, unpack_mxfp4},
}};

}  // namespace

std::span<const BlockType> block_types() {
  return kBlockTypes;
}

const BlockType& block_type(std::string_view name) {
  std::string known;
  for (const BlockType& type : kBlockTypes) {
    if (type.name == name) return type;
    known += (known.empty() ? "" : ", ") + std::string(type.name);
  }
  throw Error("unknown GGUF block type " + std::string(name) + "; block types: " + known);
}

}  // namespace kt
