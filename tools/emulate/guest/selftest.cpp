// The emulator's own test: AVX-512 and AMX instructions against scalar references. It has to pass before the emulator
// is believed about the kernel; Bochs as Debian ships it fails the signed int8 tile products.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "selftest.hpp"

namespace selftest {
namespace {

int checks = 0;
int failures = 0;

std::uint64_t xcr0() {
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

// The CPU has what it is to be tested for, and the process may use it.
void test_features() {
  unsigned a, b, c, d;
  const auto has = [](unsigned word, std::initializer_list<int> bits) {
    for (const int bit : bits) {
      if ((word >> bit & 1) == 0) return false;
    }
    return true;
  };
  __cpuid_count(7, 0, a, b, c, d);
  check(has(d, {22, 24, 25}), "CPUID has amx_bf16, amx_tile, amx_int8");
  check(has(b, {16, 17, 30, 31}) && has(c, {11}), "CPUID has AVX-512 F, DQ, BW, VL and VNNI");
  __cpuid_count(7, 1, a, b, c, d);
  check(has(a, {5}), "CPUID has avx512_bf16");
  check((xcr0() & 0x600e6) == 0x600e6, "XCR0 has the state of ymm, zmm and tiles");
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  check(syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0, "the tile state is granted");
}

}  // namespace

void check(bool passed, const std::string& name) {
  ++checks;
  failures += passed ? 0 : 1;
  std::printf("%s  %s\n", passed ? "ok  " : "FAIL", name.c_str());
  std::fflush(stdout);
}

int run() {
  test_features();
  if (failures == 0) {  // without the features the rest would end in an illegal instruction
    test_avx512();
    test_amx();
  }
  std::printf("%d tests, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace selftest

int main() {
  return selftest::run();
}
