#include <initializer_list>
#include <string>

#include "check.hpp"
#include "cpu/features.hpp"

namespace {

using kt::CpuFeatures;
using kt::CpuidSnapshot;

constexpr std::uint32_t bits(std::initializer_list<int> positions) {
  std::uint32_t word = 0;
  for (const int position : positions) word |= 1U << position;
  return word;
}

constexpr std::uint64_t kXcr0Sse = 0x3;
constexpr std::uint64_t kXcr0Avx = 0x7;
constexpr std::uint64_t kXcr0Avx512 = 0xE7;
constexpr std::uint64_t kXcr0Amx = 0x600E7;

CpuidSnapshot haswell() {
  CpuidSnapshot s;
  s.leaf1.edx = bits({26});
  s.leaf1.ecx = bits({12, 26, 27, 28, 29});
  s.leaf7_0.ebx = bits({5});
  s.xcr0 = kXcr0Avx;
  return s;
}

CpuidSnapshot cascade_lake() {
  CpuidSnapshot s = haswell();
  s.leaf7_0.ebx |= bits({16, 17, 30, 31});
  s.leaf7_0.ecx |= bits({11});
  s.xcr0 = kXcr0Avx512;
  return s;
}

CpuidSnapshot sapphire_rapids() {
  CpuidSnapshot s = cascade_lake();
  s.leaf7_0.edx |= bits({22, 24, 25});
  s.leaf7_1.eax |= bits({4, 5});
  s.xcr0 = kXcr0Amx;
  s.tile_permission = true;
  return s;
}

}  // namespace

TEST("features: Haswell has AVX2 with FMA and F16C and nothing wider") {
  const CpuFeatures f = kt::decode(haswell());
  CHECK(f.sse2 && f.avx && f.avx2 && f.fma && f.f16c && f.os_avx);
  CHECK(!f.avx_vnni && !f.avx512f && !f.amx_tile && !f.os_avx512 && !f.os_amx && !f.neon);
}

TEST("features: Cascade Lake has VNNI but no BF16") {
  const CpuFeatures f = kt::decode(cascade_lake());
  CHECK(f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl && f.avx512_vnni && f.os_avx512);
  CHECK(!f.avx512_bf16 && !f.avx_vnni && !f.amx_tile && !f.amx_int8 && !f.amx_bf16);
}

TEST("features: Sapphire Rapids has everything x86") {
  const CpuFeatures f = kt::decode(sapphire_rapids());
  for (const auto& [name, member] : kt::kCpuFeatures) {
    if (std::string(name) == "neon") continue;
    if (!(f.*member)) kt::check::fail(__FILE__, __LINE__, std::string(name) + " is missing");
  }
}

TEST("features: AMX is not usable when the process was refused the tile state") {
  CpuidSnapshot s = sapphire_rapids();
  s.tile_permission = false;
  const CpuFeatures f = kt::decode(s);
  CHECK(f.amx_tile && f.os_avx512);
  CHECK(!f.os_amx);
}

TEST("features: AMX is not usable when a hypervisor shows the flag without the state") {
  CpuidSnapshot s = sapphire_rapids();
  s.xcr0 = kXcr0Avx512;
  CHECK(!kt::tiles_visible(s));
  CHECK(!kt::decode(s).os_amx);
  s.xcr0 = kXcr0Avx512 | (1U << 17);  // configuration without data
  CHECK(!kt::tiles_visible(s));
}

TEST("features: state without the flag is no AMX either") {
  CpuidSnapshot s = cascade_lake();
  s.xcr0 = kXcr0Amx;
  s.tile_permission = true;
  CHECK(!kt::decode(s).os_amx);
}

TEST("features: AVX needs the operating system, whatever CPUID says") {
  CpuidSnapshot s = sapphire_rapids();
  s.xcr0 = kXcr0Sse;
  const CpuFeatures f = kt::decode(s);
  CHECK(f.avx2 && f.avx512f);
  CHECK(!f.os_avx && !f.os_avx512 && !f.os_amx);
}

TEST("features: AVX-512 state needs masks and both zmm parts") {
  for (const int component : {5, 6, 7}) {
    CpuidSnapshot s = cascade_lake();
    s.xcr0 &= ~(1ULL << component);
    CHECK(!kt::decode(s).os_avx512);
    CHECK(kt::decode(s).os_avx);
  }
}

TEST("features: an AArch64 machine has NEON and nothing of x86") {
  CpuidSnapshot s;
  s.aarch64 = true;
  const CpuFeatures f = kt::decode(s);
  for (const auto& [name, member] : kt::kCpuFeatures) CHECK_EQ(f.*member, std::string(name) == "neon");
}

TEST("features: permission is asked for only where the tiles are visible, and its answer decides") {
  static int asked = 0;
  asked = 0;
  const CpuidSnapshot refused = kt::read_cpuid([] { return ++asked, false; });
  CHECK_EQ(asked, kt::tiles_visible(refused) ? 1 : 0);
  CHECK(!kt::decode(refused).os_amx);
  const CpuidSnapshot granted = kt::read_cpuid([] { return true; });
  CHECK_EQ(kt::decode(granted).os_amx, kt::tiles_visible(granted));
}

TEST("features: this machine is read once and has its architecture's baseline") {
  const CpuFeatures& f = kt::cpu_features();
  CHECK(&f == &kt::cpu_features());
#if defined(__x86_64__)
  CHECK(f.sse2);
  CHECK(!f.neon);
#elif defined(__aarch64__)
  CHECK(f.neon);
  CHECK(!f.sse2);
#endif
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
TEST("features: the compiler's own detection agrees on this machine") {
  // __builtin_cpu_supports looks at CPUID and XCR0 too.
  const CpuFeatures& f = kt::cpu_features();
  CHECK_EQ(f.avx2 && f.os_avx, static_cast<bool>(__builtin_cpu_supports("avx2")));
  CHECK_EQ(f.fma && f.os_avx, static_cast<bool>(__builtin_cpu_supports("fma")));
  CHECK_EQ(f.avx512f && f.os_avx512, static_cast<bool>(__builtin_cpu_supports("avx512f")));
  CHECK_EQ(f.avx512_vnni && f.os_avx512, static_cast<bool>(__builtin_cpu_supports("avx512vnni")));
  CHECK_EQ(f.avx512_bf16 && f.os_avx512, static_cast<bool>(__builtin_cpu_supports("avx512bf16")));
}
#endif

TEST("features: the CPU has a name without padding") {
  const std::string name = kt::cpu_name();
  CHECK(!name.empty());
  CHECK(name.front() != ' ' && name.back() != ' ');
  CHECK(name.find('\0') == std::string::npos);
}
