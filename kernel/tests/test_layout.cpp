#include <new>

#include "check.hpp"
#include "error.hpp"
#include "pack/packed_experts.hpp"

using kt::Format;
using kt::LayerLayout;

TEST("layout: sizes and places of a small INT8 layer") {
  // Gate and up: 3 blocks of 16 + 16 channels over 128 padded inputs. Down: 4 blocks of 32 channels over 64.
  const LayerLayout l(Format::kInt8, {.rotated = true}, 5, 100, 40);
  CHECK_EQ(l.gate_up.k_padded, 128u);
  CHECK_EQ(l.gate_up.blocks, 3u);
  CHECK_EQ(l.gate_up.block_bytes, 32u * 128 + 256);
  CHECK_EQ(l.down.k_padded, 64u);
  CHECK_EQ(l.down.blocks, 4u);
  CHECK_EQ(l.down.block_bytes, 32u * 64 + 256);
  CHECK_EQ(l.expert_bytes, 3u * 4352 + 4 * 2304);
  CHECK_EQ(l.bytes(), 5 * l.expert_bytes);
  CHECK_EQ(l.gate_up_offset(2), 2 * l.expert_bytes);
  CHECK_EQ(l.down_offset(2), 2 * l.expert_bytes + 3 * 4352);
}

TEST("layout: BF16 has two bytes a weight, no trailer and no rotation") {
  const LayerLayout l(Format::kBf16, {.rotated = true}, 1, 64, 16);
  CHECK_EQ(l.gate_up.block_bytes, 32u * 64 * 2);
  CHECK_EQ(l.down.block_bytes, 32u * 64 * 2);
  CHECK(!l.traits.rotated);
  CHECK_EQ(l.gate_up.traits.rotation, 0u);
}

TEST("layout: FP8 has a byte a weight, 32 channel scales, and two scales for each 128 inputs on whole cache lines") {
  const LayerLayout l(Format::kFp8, {.rotated = true}, 3, 60, 64 * 17);
  CHECK_EQ(l.gate_up.block_bytes, 32u * 64 + 128 + 64);
  CHECK_EQ(l.down.block_bytes, 32u * 64 * 17 + 128 + 128);  // 9 groups
  CHECK(!l.traits.rotated);
}

TEST("layout: every block starts on a cache line, whatever the sizes") {
  for (const Format format : {Format::kInt8, Format::kBf16, Format::kInt4, Format::kInt8Grouped}) {
    for (std::size_t h = 1; h <= 130; ++h) {
      for (std::size_t i = 1; i <= 130; ++i) {
        const LayerLayout l(format, {.rotated = true}, 3, h, i);
        CHECK(l.gate_up.block_bytes % 64 == 0 && l.down.block_bytes % 64 == 0 && l.expert_bytes % 64 == 0);
        CHECK(l.gate_up.k_padded >= h && l.gate_up.k_padded < h + 64 && l.gate_up.k_padded % 64 == 0);
        CHECK(l.gate_up.blocks * 16 >= i && l.gate_up.blocks * 16 < i + 16);
        CHECK(l.down.blocks * 32 >= h && l.down.blocks * 32 < h + 32);
      }
    }
  }
}

TEST("layout: no two words of a block share a place, and together they fill the tiles") {
  constexpr std::size_t kWords = 48;  // 192 INT8 inputs
  std::vector<int> taken(kWords * 2 * 64, 0);
  for (std::size_t word = 0; word < kWords; ++word) {
    for (std::size_t panel = 0; panel < 2; ++panel) {
      for (std::size_t channel = 0; channel < 16; ++channel) {
        const std::size_t offset = kt::word_offset(word, panel, channel);
        CHECK(offset + 4 <= taken.size());
        for (std::size_t byte = 0; byte < 4; ++byte) ++taken[offset + byte];
      }
    }
  }
  for (const int times : taken) CHECK_EQ(times, 1);
}

TEST("layout: offsets of layers beyond 4 GiB do not wrap") {
  // 256 experts of 7168 x 2048, as in the largest models: 11 GiB in INT8.
  const LayerLayout l(Format::kInt8, {.rotated = true}, 256, 7168, 2048);
  const std::size_t gate_up = 128 * (std::size_t{32} * 7168 + 256), down = 224 * (std::size_t{32} * 2048 + 256);
  CHECK_EQ(l.bytes(), 256 * (gate_up + down));
  CHECK(l.bytes() > std::size_t{10} << 30);
  CHECK_EQ(l.down_offset(255), 255 * (gate_up + down) + gate_up);
  const LayerLayout huge(Format::kBf16, {.rotated = false}, 1024, std::size_t{1} << 20, 4096);
  CHECK_EQ(huge.expert_bytes, std::size_t{3} * 2 * 4096 * (std::size_t{1} << 20));
  CHECK_EQ(huge.down_offset(1023), 1023 * huge.expert_bytes + huge.gate_up.bytes());
}

TEST("layout: the Hadamard block is the largest power of two that divides the padded inputs, at most 512") {
  CHECK_EQ(kt::rotation_block(64), 64u);
  CHECK_EQ(kt::rotation_block(128), 128u);
  CHECK_EQ(kt::rotation_block(192), 64u);
  CHECK_EQ(kt::rotation_block(7168), 512u);
  CHECK_EQ(kt::rotation_block(1408), 128u);
  CHECK_EQ(kt::rotation_block(65536), 512u);
  const LayerLayout l(Format::kInt8, {.rotated = true}, 1, 192, 128);
  CHECK_EQ(l.gate_up.traits.rotation, 64u);
  CHECK_EQ(l.down.traits.rotation, 128u);
  const LayerLayout plain(Format::kInt8, {.rotated = false}, 1, 192, 128);
  CHECK_EQ(plain.gate_up.traits.rotation, 0u);
}

TEST("layout: sizes that cannot be are refused with the numbers given") {
  const auto make = [](Format format, std::size_t e, std::size_t h, std::size_t i) {
    LayerLayout(format, {.rotated = true}, e, h, i);
  };
  CHECK_THROWS(make(Format::kInt8, 0, 8, 9), kt::Error, "0, 8, 9");
  CHECK_THROWS(make(Format::kInt8, 1, 0, 9), kt::Error, "at least 1");
  CHECK_THROWS(make(Format::kBf16, 1, 8, 0), kt::Error, "at least 1");
  make(Format::kInt8, 1, 65536, 65536);  // the longest exact INT8 sums
  CHECK_THROWS(make(Format::kInt8, 1, 65537, 8), kt::Error, "hidden 65537");
  CHECK_THROWS(make(Format::kInt8, 1, 8, 65537), kt::Error, "intermediate 65537");
  make(Format::kBf16, 1, 65537, 8);
  CHECK_THROWS(make(Format::kBf16, 1, (std::size_t{1} << 20) + 1, 8), kt::Error, "1048576");
  CHECK_THROWS(make(Format::kBf16, ~std::size_t{0}, 8, 8), kt::Error, "experts");
}

TEST("layout: the largest layer of all has a size that fits, and memory for it is refused") {
  constexpr std::size_t kMost = std::size_t{1} << 20;
  const LayerLayout l(Format::kBf16, {.rotated = false}, kMost, kMost, kMost);
  CHECK_EQ(l.bytes(), std::size_t{3} << 61);
  CHECK_THROWS(kt::PackedExperts(l), std::bad_alloc);
}

TEST("layout: formats by name") {
  CHECK(kt::parse_format("INT8") == Format::kInt8);
  CHECK(kt::parse_format("BF16") == Format::kBf16);
  CHECK_EQ(kt::format_name(Format::kInt8), "INT8");
  CHECK_EQ(kt::format_name(Format::kBf16), "BF16");
  CHECK_THROWS(kt::parse_format("INT5"), kt::Error, "INT8, BF16");
}
