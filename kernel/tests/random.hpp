// Random test data: the same numbers on every platform and library, since stored hashes depend on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace kt::check {

// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  // Different lists give unrelated streams.
  Random(std::initializer_list<std::uint64_t> seeds) : state_(0) {
    for (const std::uint64_t seed : seeds) state_ = next() ^ seed;
  }

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }

  // 0 … n-1
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }

  // lowest … highest
  int between(int lowest, int highest) {
    return lowest + static_cast<int>(below(static_cast<std::size_t>(highest - lowest) + 1));
  }

  // [0, 1), a multiple of 2^-24.
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }

  // Mean 0, variance 1, |x| < 3.5: four uniform numbers added as integers, so that no library's rounding matters.
  float gaussian() {
    const std::uint64_t bits = next();
    std::int32_t sum = -2 * 65535;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>((bits >> (16 * i)) & 0xffff);
    return static_cast<float>(sum) * 2.6429e-5f;  // sqrt(3) / 65536
  }

  std::vector<float> gaussians(std::size_t n, float scale = 1.0f) {
    std::vector<float> x(n);
    for (float& value : x) value = gaussian() * scale;
    return x;
  }

 private:
  std::uint64_t state_;
};

}  // namespace kt::check
