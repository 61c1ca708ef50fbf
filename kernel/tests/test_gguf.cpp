// Blocks of GGUF files: sizes, values worked out by hand, threads. Every bit pattern is compared with the gguf
// package's decoder in tests/kernel/test_gguf_blocks.py.
#include <cstring>
#include <vector>

#include "check.hpp"
#include "error.hpp"
#include "gguf/decode.hpp"

using kt::block_type;
using kt::BlockType;
using kt::Context;

namespace {

constexpr std::uint16_t kTwo = 0x4000, kHalf = 0x3800;  // as fp16

void put(std::vector<std::uint8_t>& block, std::size_t at, std::uint16_t half) {
  block[at] = static_cast<std::uint8_t>(half & 0xff);
  block[at + 1] = static_cast<std::uint8_t>(half >> 8);
}

std::vector<float> decoded(const BlockType& type, const std::vector<std::uint8_t>& source, std::size_t threads = 1) {
  Context context(threads);
  std::vector<float> weights(source.size() / type.bytes * type.weights);
  dequantize_blocks(context, type, source.data(), source.size() / type.bytes, weights.data());
  return weights;
}

// Bytes of a fixed sequence, none above 63, so that every half is finite.
std::vector<std::uint8_t> some_blocks(const BlockType& type, std::size_t blocks) {
  std::vector<std::uint8_t> source(blocks * type.bytes);
  std::uint32_t state = 1;
  for (std::uint8_t& byte : source) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::uint8_t>(state >> 26);
  }
  return source;
}

}  // namespace

TEST("blocks hold whole groups and fit the decoder's buffers") {
  for (const BlockType& type : kt::block_types()) {
    CHECK_EQ(type.weights % type.group, 0u);
    CHECK(type.weights == 32 || type.weights == 256);
  }
}

TEST("an unknown block type lists the known ones") {
  std::string text;
  try {
    block_type("Q9_9");
  } catch (const kt::Error& error) {
    text = error.what();
  }
  CHECK(text.find("Q9_9") != std::string::npos);
  CHECK(text.find("Q4_K") != std::string::npos);
}

TEST("Q8_0 is a scale and 32 signed bytes") {
  const BlockType& type = block_type("Q8_0");
  std::vector<std::uint8_t> block(type.bytes);
  put(block, 0, kHalf);
  block[2] = 0x80;       // -128
  block[2 + 31] = 0x7f;  // 127
  const std::vector<float> weights = decoded(type, block);
  CHECK_EQ(weights[0], -64.0f);
  CHECK_EQ(weights[1], 0.0f);
  CHECK_EQ(weights[31], 63.5f);
}

TEST("Q4_K puts the low nibbles of 32 bytes before the high ones, each with its own scale and minimum") {
  const BlockType& type = block_type("Q4_K");
  std::vector<std::uint8_t> block(type.bytes);
  put(block, 0, kTwo);
  put(block, 2, kHalf);
  block[4] = 3;           // scale 0, in 6 bits
  block[4 + 1] = 5;       // scale 1
  block[4 + 4] = 2;       // minimum 0
  block[4 + 8] = 0x19;    // scale 4: 9, minimum 4: 1, without their upper bits
  block[4] |= 2 << 6;     // upper bits of scale 4: 9 + 32
  block[16] = 0xf7;       // weight 0: 7, weight 32: 15
  block[16 + 64] = 0x01;  // weight 128: 1
  const std::vector<float> weights = decoded(type, block);
  CHECK_EQ(weights[0], 2.0f * 3 * 7 - 0.5f * 2);
  CHECK_EQ(weights[1], -1.0f);
  CHECK_EQ(weights[32], 2.0f * 5 * 15);
  CHECK_EQ(weights[128], 2.0f * 41 - 0.5f);
}

TEST("MXFP4 scales by powers of two") {
  const BlockType& type = block_type("MXFP4");
  std::vector<std::uint8_t> block(type.bytes);
  block[0] = 129;   // 2^2
  block[1] = 0xf1;  // weight 0: 0.5, weight 16: -6
  const std::vector<float> weights = decoded(type, block);
  CHECK_EQ(weights[0], 2.0f);
  CHECK_EQ(weights[16], -24.0f);
}

TEST("parts and floats of a block agree, whatever the number of threads") {
  for (const BlockType& type : kt::block_types()) {
    constexpr std::size_t kBlocks = 3000;
    const std::vector<std::uint8_t> source = some_blocks(type, kBlocks);
    const std::vector<float> weights = decoded(type, source);
    CHECK(decoded(type, source, 3) == weights);
    std::vector<std::int8_t> values(weights.size());
    std::vector<float> scales(weights.size() / type.group), minimums(scales.size());
    Context context(2);
    unpack_blocks(context, type, source.data(), kBlocks, {values.data(), scales.data(), minimums.data()});
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const float scaled = scales[i / type.group] * static_cast<float>(values[i]);
      wrong += weights[i] != (type.has_minimum ? scaled + minimums[i / type.group] : scaled);
    }
    CHECK_EQ(wrong, 0u);
  }
}
