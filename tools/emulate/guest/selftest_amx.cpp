// The AMX instructions: all signs, partial tiles, odd strides, several threads.
#include <immintrin.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "selftest.hpp"

#define AMX __attribute__((target("amx-tile,amx-int8,amx-bf16")))
// GCC's tile intrinsics do not say which memory they read.
#define TILES_READ_MEMORY() __asm__ volatile("" ::: "memory")

namespace selftest {
namespace {

struct Shape {
  int m, n, k_bytes;
};

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tile 0: sums, 1: A, 2: B.
AMX void configure(const Shape& s) {
  TileConfig config;
  config.rows[0] = config.rows[1] = static_cast<std::uint8_t>(s.m);
  config.rows[2] = static_cast<std::uint8_t>(s.k_bytes / 4);
  config.row_bytes[0] = config.row_bytes[2] = static_cast<std::uint16_t>(4 * s.n);
  config.row_bytes[1] = static_cast<std::uint16_t>(s.k_bytes);
  TILES_READ_MEMORY();
  _tile_loadconfig(&config);
}

AMX void release() {
  _tile_release();
}

struct Product {
  const char* name;
  bool a_signed, b_signed;
  void (*run)();
};

AMX void ssd() {
  _tile_dpbssd(0, 1, 2);
}
AMX void sud() {
  _tile_dpbsud(0, 1, 2);
}
AMX void usd() {
  _tile_dpbusd(0, 1, 2);
}
AMX void uud() {
  _tile_dpbuud(0, 1, 2);
}
AMX void bf16() {
  _tile_dpbf16ps(0, 1, 2);
}

constexpr Product kProducts[] = {{"tdpbssd", true, true, ssd},
                                 {"tdpbsud", true, false, sud},
                                 {"tdpbusd", false, true, usd},
                                 {"tdpbuud", false, false, uud}};

AMX void multiply(void (*run)(), const void* a, int a_stride, const void* b, int b_stride, void* c, int c_stride) {
  TILES_READ_MEMORY();
  _tile_loadd(0, c, c_stride);
  _tile_loadd(1, a, a_stride);
  _tile_loadd(2, b, b_stride);
  run();
  _tile_stored(0, c, c_stride);
  TILES_READ_MEMORY();
}

int value(std::uint8_t byte, bool is_signed) {
  return is_signed ? static_cast<std::int8_t>(byte) : byte;
}

bool int8_is_right(const Product& product, const Shape& s) {
  const int a_stride = s.k_bytes + 8, b_stride = 4 * s.n + 4, c_stride = 4 * s.n + 12;
  const auto a = random_values<std::uint8_t>(16 * a_stride), b = random_values<std::uint8_t>(16 * b_stride);
  auto c = random_values<std::int32_t>(16 * c_stride / 4 + 1);
  auto expected = c;
  for (int i = 0; i < s.m; ++i) {
    for (int j = 0; j < s.n; ++j) {
      std::int32_t& sum = expected[i * c_stride / 4 + j];
      for (int k = 0; k < s.k_bytes; ++k) {
        const std::uint8_t y = b[k / 4 * b_stride + 4 * j + k % 4];
        sum = wrapping_sum(sum, value(a[i * a_stride + k], product.a_signed) * value(y, product.b_signed));
      }
    }
  }
  configure(s);
  multiply(product.run, a.data(), a_stride, b.data(), b_stride, c.data(), c_stride);
  return c == expected;
}

double bf16_error(const Shape& s) {
  const auto a = random_bf16(16 * 32), b = random_bf16(16 * 32);
  std::vector<float> c(16 * 16, 0.25f);
  configure(s);
  multiply(bf16, a.data(), 64, b.data(), 64, c.data(), 64);
  double worst = 0;
  for (int i = 0; i < s.m; ++i) {
    for (int j = 0; j < s.n; ++j) {
      double sum = 0.25;
      for (int k = 0; k < s.k_bytes / 2; ++k) {
        sum += double{from_bf16(a[i * 32 + k])} * from_bf16(b[k / 2 * 32 + 2 * j + k % 2]);
      }
      worst = std::fmax(worst, std::fabs(sum - c[i * 16 + j]));
    }
  }
  return worst;
}

std::string name_of(const char* instruction, const Shape& s) {
  return std::string(instruction) + " " + std::to_string(s.m) + "x" + std::to_string(s.n) + "x" +
         std::to_string(s.k_bytes) + " bytes";
}

// One product a thread, again and again, giving way to the others in between.
bool threads_keep_their_tiles() {
  const auto a = random_values<std::uint8_t>(1024), b = random_values<std::uint8_t>(1024);
  std::vector<std::int32_t> expected(256);
  configure({16, 16, 64});
  multiply(ssd, a.data(), 64, b.data(), 64, expected.data(), 64);
  release();
  std::atomic<bool> right = true;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 10; ++round) {
        std::vector<std::int32_t> c(256);
        configure({16, 16, 64});
        multiply(ssd, a.data(), 64, b.data(), 64, c.data(), 64);
        release();
        if (c != expected) right = false;
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return right;
}

}  // namespace

void test_amx() {
  for (const Product& product : kProducts) {
    for (const Shape& shape : {Shape{16, 16, 64}, Shape{5, 7, 12}, Shape{16, 3, 64}, Shape{1, 16, 4}}) {
      check(int8_is_right(product, shape), name_of(product.name, shape));
    }
  }
  for (const Shape& shape : {Shape{16, 16, 64}, Shape{9, 5, 28}}) {
    check(bf16_error(shape) < 2e-5, name_of("tdpbf16ps", shape));
  }
  release();
  check(threads_keep_their_tiles(), "tiles on four threads");
}

}  // namespace selftest
