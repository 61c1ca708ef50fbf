#include "cpu/features.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kt {
namespace {

constexpr bool bit(std::uint32_t word, int position) {
  return ((word >> position) & 1U) != 0;
}

constexpr std::uint64_t kXcr0Avx = 0x6;           // xmm, upper halves of ymm
constexpr std::uint64_t kXcr0Avx512 = 0xE6;       // the above, masks, upper halves of zmm, zmm16…31
constexpr std::uint64_t kXcr0Amx = 0x3ULL << 17;  // tile configuration, tile data

#if defined(__x86_64__)

CpuidRegisters cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  CpuidRegisters r;
  __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
  return r;
}

// Only legal when CPUID reports OSXSAVE. Assembly because the intrinsic needs -mxsave.
std::uint64_t xgetbv0() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

#endif

}  // namespace

bool request_tile_permission() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  // Kernels before 5.16, sandboxes and hypervisors answer with an error; that is an ordinary "no".
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
  return false;
#endif
}

bool tiles_visible(const CpuidSnapshot& snapshot) {
  return bit(snapshot.leaf7_0.edx, 24) && (snapshot.xcr0 & kXcr0Amx) == kXcr0Amx;
}

CpuidSnapshot read_cpuid([[maybe_unused]] TilePermission ask) {
  CpuidSnapshot snapshot;
#if defined(__x86_64__)
  const std::uint32_t leaves = cpuid(0, 0).eax;
  snapshot.leaf1 = cpuid(1, 0);
  if (leaves >= 7) {
    snapshot.leaf7_0 = cpuid(7, 0);
    if (snapshot.leaf7_0.eax >= 1) snapshot.leaf7_1 = cpuid(7, 1);
  }
  const bool osxsave = bit(snapshot.leaf1.ecx, 27);
  if (osxsave) snapshot.xcr0 = xgetbv0();
  if (tiles_visible(snapshot)) snapshot.tile_permission = ask();
#elif defined(__aarch64__)
  snapshot.aarch64 = true;
#endif
  return snapshot;
}

CpuFeatures decode(const CpuidSnapshot& snapshot) {
  CpuFeatures f;
  f.sse2 = bit(snapshot.leaf1.edx, 26);
  f.fma = bit(snapshot.leaf1.ecx, 12);
  f.avx = bit(snapshot.leaf1.ecx, 28);
  f.f16c = bit(snapshot.leaf1.ecx, 29);
  f.avx2 = bit(snapshot.leaf7_0.ebx, 5);
  f.avx512f = bit(snapshot.leaf7_0.ebx, 16);
  f.avx512dq = bit(snapshot.leaf7_0.ebx, 17);
  f.avx512bw = bit(snapshot.leaf7_0.ebx, 30);
  f.avx512vl = bit(snapshot.leaf7_0.ebx, 31);
  f.avx512_vnni = bit(snapshot.leaf7_0.ecx, 11);
  f.amx_bf16 = bit(snapshot.leaf7_0.edx, 22);
  f.amx_tile = bit(snapshot.leaf7_0.edx, 24);
  f.amx_int8 = bit(snapshot.leaf7_0.edx, 25);
  f.avx_vnni = bit(snapshot.leaf7_1.eax, 4);
  f.avx512_bf16 = bit(snapshot.leaf7_1.eax, 5);
  f.neon = snapshot.aarch64;  // part of the AArch64 baseline
  f.os_avx = (snapshot.xcr0 & kXcr0Avx) == kXcr0Avx;
  f.os_avx512 = (snapshot.xcr0 & kXcr0Avx512) == kXcr0Avx512;
  f.os_amx = tiles_visible(snapshot) && snapshot.tile_permission;
  return f;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = decode(read_cpuid());
  return features;
}

std::string cpu_name() {
#if defined(__x86_64__)
  constexpr std::uint32_t kBrandFirst = 0x80000002;
  constexpr std::uint32_t kBrandLast = 0x80000004;
  if (cpuid(0x80000000, 0).eax < kBrandLast) return "unnamed x86-64 CPU";
  char brand[3 * sizeof(CpuidRegisters) + 1] = {};
  for (std::uint32_t leaf = kBrandFirst; leaf <= kBrandLast; ++leaf) {
    const CpuidRegisters r = cpuid(leaf, 0);
    std::memcpy(brand + (leaf - kBrandFirst) * sizeof(r), &r, sizeof(r));
  }
  const std::string text(brand);
  const auto first = text.find_first_not_of(' ');
  if (first == std::string::npos) return "unnamed x86-64 CPU";
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
#elif defined(__aarch64__)
  return "AArch64 CPU";
#else
  return "unnamed CPU";
#endif
}

}  // namespace kt
