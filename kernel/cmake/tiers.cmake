# One object library per ISA tier: its own flags, one exported function, never -march=native.
# A tier is built when the processor family matches, the option allows it and the compiler can emit it.
include(CheckCXXSourceCompiles)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" kt_processor)

# After the -O3 of a build that is measured: sanitized micro kernels take the compiler minutes at that level. Only lines
# for the reports (-g1): following every variable through them takes more than half of the time that is left.
if(KT_SANITIZE)
  set(kt_sanitize_flags -fsanitize=${KT_SANITIZE} -fno-omit-frame-pointer -g1 -O1)
endif()

# kt_tier(<target> <name> <option> <flags> <intrinsic> <sources>...)
# The intrinsic is the newest that the tier uses: a compiler may know the flag, and its headers or assembler may not.
function(kt_tier target name option flags intrinsic)
  if(NOT kt_processor MATCHES "^(x86_64|amd64|i[3-6]86)$" OR NOT ${option})
    return()
  endif()
  string(MAKE_C_IDENTIFIER "KT_CXX_HAS_${name}" probe)
  set(CMAKE_REQUIRED_FLAGS "${flags}")
  check_cxx_source_compiles("#include <immintrin.h>\nint main() { ${intrinsic} return 0; }" ${probe})
  if(NOT ${probe})
    message(STATUS "tier ${name}: the compiler cannot emit ${flags}, left out")
    return()
  endif()
  separate_arguments(flag_list UNIX_COMMAND "${flags}")
  string(TOUPPER "${name}" upper)
  add_library(kt_tier_${name} OBJECT ${ARGN})
  target_include_directories(kt_tier_${name} PRIVATE src)
  target_compile_options(kt_tier_${name} PRIVATE ${flag_list} -ffp-contract=off -O3 -Wall -Wextra -fno-exceptions -fno-rtti
                         ${kt_sanitize_flags})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:kt_tier_${name}>)
  target_compile_definitions(${target} PRIVATE KT_TIER_${upper}=1)
endfunction()

function(kt_add_tiers target)
  add_library(kt_tier_generic OBJECT src/tiers/generic/generic.cpp)
  target_include_directories(kt_tier_generic PRIVATE src)
  target_compile_options(kt_tier_generic PRIVATE -ffp-contract=off -O3 -Wall -Wextra -fno-exceptions -fno-rtti
                         ${kt_sanitize_flags})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:kt_tier_generic>)

  set(avx2 "-mavx2 -mfma -mf16c")
  # GCC 12's AVX-512 headers read variables that they mean to leave undefined.
  set(avx512 "${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-uninitialized -Wno-maybe-uninitialized")
  kt_tier(${target} avx2 KTRANSFORMERS_CPU_USE_AVX2 "${avx2}"
          "volatile auto x = _mm256_madd_epi16(__m256i{}, __m256i{});" src/tiers/avx2/avx2.cpp)
  kt_tier(${target} avx_vnni KTRANSFORMERS_CPU_USE_AVX2 "${avx2} -mavxvnni"
          "volatile auto x = _mm256_dpbusd_avx_epi32(__m256i{}, __m256i{}, __m256i{});" src/tiers/avx_vnni/avx_vnni.cpp)
  kt_tier(${target} avx512 KTRANSFORMERS_CPU_USE_AVX512 "${avx512}"
          "volatile auto x = _mm512_madd_epi16(__m512i{}, __m512i{});" src/tiers/avx512/avx512.cpp)
  kt_tier(${target} avx512_vnni KTRANSFORMERS_CPU_USE_AVX512 "${avx512} -mavx512vnni"
          "volatile auto x = _mm512_dpbusd_epi32(__m512i{}, __m512i{}, __m512i{});" src/tiers/avx512_vnni/avx512_vnni.cpp)
  kt_tier(${target} avx512_bf16 KTRANSFORMERS_CPU_USE_AVX512 "${avx512} -mavx512vnni -mavx512bf16"
          "volatile auto x = _mm512_dpbf16_ps(__m512{}, __m512bh{}, __m512bh{});" src/tiers/avx512_bf16/avx512_bf16.cpp)
  kt_tier(${target} amx KTRANSFORMERS_CPU_USE_AMX
          "${avx512} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16"
          "_tile_zero(0); _tile_dpbssd(0, 1, 2); _tile_dpbf16ps(0, 1, 2); _tile_release();" src/tiers/amx/amx.cpp)
endfunction()
