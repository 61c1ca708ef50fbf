// What this CPU can do and what the operating system lets this process use.
//
// The only sources are the CPUID instruction, the XCR0 register and, for AMX, the answer of the kernel when the process
// asks for the tile state. Text such as /proc/cpuinfo can be masked, forged or out of date, and is never read.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace kt {

struct CpuFeatures {
  bool sse2 = false;
  bool avx = false;
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx_vnni = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_tile = false;
  bool amx_int8 = false;
  bool amx_bf16 = false;
  bool neon = false;

  // State components: the registers are saved on a task switch, so using them is safe.
  bool os_avx = false;     // ymm
  bool os_avx512 = false;  // zmm and masks
  bool os_amx = false;     // tiles, and this process was granted them
};

struct NamedFeature {
  const char* name;
  bool CpuFeatures::* member;
};

// Every field of CpuFeatures by its public name: instruction sets first, then the state components.
inline constexpr std::array<NamedFeature, 19> kCpuFeatures{{
    {"sse2", &CpuFeatures::sse2},
    {"avx", &CpuFeatures::avx},
    {"avx2", &CpuFeatures::avx2},
    {"fma", &CpuFeatures::fma},
    {"f16c", &CpuFeatures::f16c},
    {"avx_vnni", &CpuFeatures::avx_vnni},
    {"avx512f", &CpuFeatures::avx512f},
    {"avx512bw", &CpuFeatures::avx512bw},
    {"avx512dq", &CpuFeatures::avx512dq},
    {"avx512vl", &CpuFeatures::avx512vl},
    {"avx512_vnni", &CpuFeatures::avx512_vnni},
    {"avx512_bf16", &CpuFeatures::avx512_bf16},
    {"amx_tile", &CpuFeatures::amx_tile},
    {"amx_int8", &CpuFeatures::amx_int8},
    {"amx_bf16", &CpuFeatures::amx_bf16},
    {"neon", &CpuFeatures::neon},
    {"os_avx", &CpuFeatures::os_avx},
    {"os_avx512", &CpuFeatures::os_avx512},
    {"os_amx", &CpuFeatures::os_amx},
}};

struct CpuidRegisters {
  std::uint32_t eax = 0;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
};

// Raw answers, so that decoding can be tested with the registers of CPUs that are not here. Leaves the CPU does not
// have stay zero. On other architectures than x86 everything stays zero but `aarch64`.
struct CpuidSnapshot {
  bool aarch64 = false;
  CpuidRegisters leaf1;
  CpuidRegisters leaf7_0;
  CpuidRegisters leaf7_1;
  std::uint64_t xcr0 = 0;  // zero when the OS has not enabled XSAVE
  bool tile_permission = false;
};

// Asks the kernel for the AMX tile state of this process; true when it is granted.
using TilePermission = bool (*)();
bool request_tile_permission();

// True when CPUID has the tiles and XCR0 shows their two components: only then is it worth asking.
bool tiles_visible(const CpuidSnapshot& snapshot);

// Reads this CPU. `ask` is called once, and only when tiles_visible.
CpuidSnapshot read_cpuid(TilePermission ask = &request_tile_permission);

// Registers in, features out. No side effects.
CpuFeatures decode(const CpuidSnapshot& snapshot);

// This machine, read at the first call and kept.
const CpuFeatures& cpu_features();

// The brand string of the CPU, for people to read.
std::string cpu_name();

}  // namespace kt
