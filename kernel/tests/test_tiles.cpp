// The AMX tiles of a thread are in use only inside a call: left behind, they would be saved at every task switch and
// keep the core from its deeper sleep states.
#include <cpuid.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "blocks.hpp"
#include "layers.hpp"

using kt::Format;
using kt::check::Blocks;
using kt::check::FormatCase;

namespace {

bool has_xgetbv1() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(0xD, 1, &a, &b, &c, &d) != 0 && (a & 4) != 0;
}

// The state components of this thread that are not in their initial state: bit 17 tile configuration, 18 tile data.
bool tiles_in_use() {
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return (low >> 17 & 3) != 0;
}

// Eleven rows: enough for the tiles.
std::vector<float> some_rows() {
  return kt::check::Random{5}.gaussians(11 * 64);
}

}  // namespace

TEST_EACH_FORMAT("tiles: none is left in use by a call, whatever its size") {
  if (!has_xgetbv1()) return;
  const Blocks blocks(c.format, 2, 64);
  const kt::check::Rows rows(c, some_rows(), 64);
  for (std::size_t m = 1; m <= 11; ++m) {
    blocks.down(rows, 0, m);
    CHECK(!tiles_in_use());
    blocks.gate_up(rows, 0, m, {});
    CHECK(!tiles_in_use());
  }
}

TEST_EACH_FORMAT("tiles: none is left in use on any thread, and products stay right, after a job that throws either") {
  if (!has_xgetbv1()) return;
  const Blocks blocks(c.format, 2, 64);
  const kt::check::Rows rows(c, some_rows(), 64);
  const std::vector<float> expected = blocks.down(rows, 0, 11);
  kt::Context context(3);
  std::atomic<int> used{0}, wrong{0};
  kt::Context::Session session(context);
  const auto run = [&](bool throws) {
    std::atomic<int> arrived{0};
    const kt::Phase phase{3, 1, [&](std::size_t begin, std::size_t end, std::size_t) {
                            arrived += static_cast<int>(end - begin);
                            while (arrived.load() < 3) std::this_thread::yield();
                            wrong += !kt::check::same_bits(blocks.down(rows, 0, 11), expected);
                            used += tiles_in_use();
                            if (throws) throw kt::check::show("thrown");
                          }};
    session.run({&phase, 1});
  };
  for (int i = 0; i < 10; ++i) {
    run(false);
    bool caught = false;
    try {
      run(true);
    } catch (const std::string&) {
      caught = true;
    }
    CHECK(caught);
  }
  CHECK_EQ(used.load(), 0);
  CHECK_EQ(wrong.load(), 0);
}
