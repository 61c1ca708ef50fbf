#include "tiers/registry.hpp"

#include "error.hpp"
#include "tiers/generic/generic.hpp"
#if KT_TIER_AVX2
#include "tiers/avx2/avx2.hpp"
#endif

namespace kt {
namespace {

using Names = std::vector<std::string_view>;

std::vector<Tier> make_tiers() {
  const Names avx2 = {"avx", "avx2", "fma", "f16c"};
  std::vector<Tier> tiers;
  tiers.push_back({"generic", generic_table(), {}, {}});
#if KT_TIER_AVX2
  tiers.push_back({"avx2", avx2_table(), avx2, {"os_avx"}});
#else
  tiers.push_back({"avx2", nullptr, avx2, {"os_avx"}});
#endif
  return tiers;
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
  if (table.int8.gate_up != nullptr) formats.emplace_back("INT8");
  if (table.bf16.gate_up != nullptr) formats.emplace_back("BF16");
  return formats;
}

}  // namespace kt
