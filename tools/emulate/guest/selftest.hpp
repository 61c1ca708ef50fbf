// What the parts of the emulator's own test share.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace selftest {

// Prints one line as kt_tests does and counts.
void check(bool passed, const std::string& name);

inline std::mt19937& random() {
  static std::mt19937 generator(1);
  return generator;
}

template <class T>
std::vector<T> random_values(std::size_t count) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(random()());
  return values;
}

inline float from_bf16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To nearest, ties to even.
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Between -2 and 2.
inline std::vector<std::uint16_t> random_bf16(std::size_t count) {
  std::vector<std::uint16_t> values(count);
  for (auto& value : values) value = to_bf16(static_cast<float>(static_cast<int>(random()() % 4001) - 2000) / 1000.0f);
  return values;
}

// Addition that wraps around, as the instructions' does.
inline std::int32_t wrapping_sum(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
}

void test_avx512();
void test_amx();

}  // namespace selftest
