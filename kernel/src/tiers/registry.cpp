#include "tiers/registry.hpp"

#include "error.hpp"
#include "tiers/formats.hpp"
#include "tiers/generic/generic.hpp"
#include "tiers/avx2/avx2.hpp"
#include "tiers/avx_vnni/avx_vnni.hpp"
#include "tiers/avx512/avx512.hpp"
#include "tiers/avx512_vnni/avx512_vnni.hpp"
#include "tiers/avx512_bf16/avx512_bf16.hpp"
#include "tiers/amx/amx.hpp"

namespace kt {
namespace {

using Names = std::vector<std::string_view>;

Names operator+(Names names, const Names& more) {
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

// The build defines KT_TIER_<NAME> for each tier it holds.
#if KT_TIER_AVX2
constexpr auto kAvx2 = &avx2_table;
#else
constexpr const TierTable* (*kAvx2)() = nullptr;
#endif
#if KT_TIER_AVX_VNNI
constexpr auto kAvxVnni = &avx_vnni_table;
#else
constexpr const TierTable* (*kAvxVnni)() = nullptr;
#endif
#if KT_TIER_AVX512
constexpr auto kAvx512 = &avx512_table;
#else
constexpr const TierTable* (*kAvx512)() = nullptr;
#endif
#if KT_TIER_AVX512_VNNI
constexpr auto kAvx512Vnni = &avx512_vnni_table;
#else
constexpr const TierTable* (*kAvx512Vnni)() = nullptr;
#endif
#if KT_TIER_AVX512_BF16
constexpr auto kAvx512Bf16 = &avx512_bf16_table;
#else
constexpr const TierTable* (*kAvx512Bf16)() = nullptr;
#endif
#if KT_TIER_AMX
constexpr auto kAmx = &amx_table;
#else
constexpr const TierTable* (*kAmx)() = nullptr;
#endif

std::vector<Tier> make_tiers() {
  const auto table = [](const TierTable* (*get)()) { return get == nullptr ? nullptr : get(); };
  const Names avx2 = {"avx", "avx2", "fma", "f16c"};
  const Names avx512 = avx2 + Names{"avx512f", "avx512bw", "avx512dq", "avx512vl"};
  const Names vnni = avx512 + Names{"avx512_vnni"};
  const Names bf16 = vnni + Names{"avx512_bf16"};
  return {
      {"generic", generic_table(), {}, {}},
      {"avx2", table(kAvx2), avx2, {"os_avx"}},
      {"avx_vnni", table(kAvxVnni), avx2 + Names{"avx_vnni"}, {"os_avx"}},
      {"avx512", table(kAvx512), avx512, {"os_avx", "os_avx512"}},
      {"avx512_vnni", table(kAvx512Vnni), vnni, {"os_avx", "os_avx512"}},
      {"avx512_bf16", table(kAvx512Bf16), bf16, {"os_avx", "os_avx512"}},
      {"amx", table(kAmx), bf16 + Names{"amx_tile", "amx_int8", "amx_bf16"}, {"os_avx", "os_avx512", "os_amx"}},
  };
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::span<const Tier> all_tiers() {
  static const std::vector<Tier> tiers = make_tiers();
  return tiers;
}

std::vector<std::string> missing(const CpuFeatures& features, std::span<const std::string_view> needs) {
  std::vector<std::string> names;
  for (const std::string_view need : needs) {
    bool found = false;
    for (const NamedFeature& feature : kCpuFeatures)
      found = found || (feature.name == need && features.*feature.member);
    if (!found) names.emplace_back(need);
  }
  return names;
}

const TierTable& usable_table(std::string_view name) {
  for (const Tier& tier : all_tiers()) {
    if (tier.name != name) continue;
    if (tier.table == nullptr) throw Error("tier " + std::string(name) + " is not in this build");
    std::vector<std::string> absent = missing(cpu_features(), tier.needs_cpu);
    for (std::string& os : missing(cpu_features(), tier.needs_os)) absent.push_back(std::move(os));
    if (!absent.empty()) throw Error("tier " + std::string(name) + " cannot run here: no " + joined(absent));
    return *tier.table;
  }
  throw Error("unknown tier " + std::string(name));
}

std::vector<std::string> formats_of(const TierTable& table) {
  std::vector<std::string> formats;
  for (const NamedFormat& known : all_formats()) {
    if ((table.*known.functions).gate_up != nullptr) formats.emplace_back(known.name);
  }
  return formats;
}

}  // namespace kt
