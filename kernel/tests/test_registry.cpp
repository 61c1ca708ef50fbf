// Which tier a CPU gets.
#include <string>
#include <vector>

#include "check.hpp"
#include "error.hpp"
#include "tiers/formats.hpp"
#include "tiers/registry.hpp"

using kt::CpuFeatures;
using kt::Tier;

namespace {

// A CPU with all features of the names, and the state components that its OS would enable.
CpuFeatures cpu(const std::vector<std::string>& names) {
  CpuFeatures features;
  for (const std::string& name : names) {
    bool found = false;
    for (const kt::NamedFeature& feature : kt::kCpuFeatures) {
      if (feature.name == name) features.*feature.member = found = true;
    }
    if (!found) throw std::runtime_error("no feature " + name);
  }
  return features;
}

std::vector<std::string> with(std::vector<std::string> base, const std::vector<std::string>& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

// The highest tier whose needs are met, whether this build holds it or not.
std::string highest(const std::vector<std::string>& names) {
  const CpuFeatures features = cpu(names);
  std::string name = "none";
  for (const Tier& tier : kt::all_tiers()) {
    if (kt::missing(features, tier.needs_cpu).empty() && kt::missing(features, tier.needs_os).empty()) name = tier.name;
  }
  return name;
}

const std::vector<std::string> kHaswell = {"sse2", "avx", "avx2", "fma", "f16c", "os_avx"};
const std::vector<std::string> kSkylakeServer =
    with(kHaswell, {"avx512f", "avx512bw", "avx512dq", "avx512vl", "os_avx512"});
const std::vector<std::string> kIceLake = with(kSkylakeServer, {"avx512_vnni"});
const std::vector<std::string> kZen4 = with(kIceLake, {"avx512_bf16"});
const std::vector<std::string> kSapphireRapids =
    with(kZen4, {"avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "os_amx"});

std::vector<std::string> without(std::vector<std::string> names, const std::string& name) {
  std::erase(names, name);
  return names;
}

}  // namespace

TEST("registry: known CPUs get the tier they should") {
  CHECK_EQ(highest({"sse2"}), "generic");
  CHECK_EQ(highest({"neon"}), "generic");
  CHECK_EQ(highest({"sse2", "avx", "f16c", "os_avx"}), "generic");  // Ivy Bridge
  CHECK_EQ(highest(kHaswell), "avx2");                              // and Zen 1 to 3
  CHECK_EQ(highest(with(kHaswell, {"avx_vnni"})), "avx_vnni");      // Alder Lake
  CHECK_EQ(highest(kSkylakeServer), "avx512");
  CHECK_EQ(highest(kIceLake), "avx512_vnni");
  CHECK_EQ(highest(kZen4), "avx512_bf16");  // a server with AVX-512 and no AMX must not fall to scalar code
  CHECK_EQ(highest(kSapphireRapids), "amx");
}

TEST("registry: a CPU that lacks one of the things a tier uses gets the next lower one") {
  CHECK_EQ(highest(without(kHaswell, "fma")), "generic");
  CHECK_EQ(highest(without(kHaswell, "f16c")), "generic");
  CHECK_EQ(highest(without(kIceLake, "avx512vl")), "avx2");
  CHECK_EQ(highest(without(kSapphireRapids, "amx_bf16")), "avx512_bf16");
  CHECK_EQ(highest(without(kSapphireRapids, "amx_int8")), "avx512_bf16");
}

TEST("registry: an operating system that does not save a state takes its tiers away") {
  CHECK_EQ(highest(without(kHaswell, "os_avx")), "generic");
  CHECK_EQ(highest(without(kSapphireRapids, "os_amx")), "avx512_bf16");
  CHECK_EQ(highest(without(without(kSapphireRapids, "os_amx"), "os_avx512")), "avx_vnni");
  CHECK_EQ(highest(without(kIceLake, "os_avx512")), "avx2");
}

TEST("registry: generic comes first, is always in the build and needs nothing") {
  const Tier& lowest = kt::all_tiers().front();
  CHECK_EQ(lowest.name, "generic");
  CHECK(lowest.table != nullptr && lowest.needs_cpu.empty() && lowest.needs_os.empty());
  CHECK_EQ(kt::formats_of(*lowest.table), std::vector<std::string>{"INT8", "BF16", "INT4", "INT8_GROUPED", "FP8"});
}

TEST("registry: every need is the name of a feature") {
  for (const Tier& tier : kt::all_tiers()) {
    for (const auto& needs : {tier.needs_cpu, tier.needs_os}) cpu({needs.begin(), needs.end()});
  }
}

TEST("registry: every table in the build is whole") {
  for (const Tier& tier : kt::all_tiers()) {
    if (tier.table == nullptr) continue;
    CHECK(tier.table->combine != nullptr && tier.table->rotate != nullptr && tier.table->quantize != nullptr);
    for (const kt::NamedFormat& known : kt::all_formats()) {
      const kt::FormatTable& f = tier.table->*known.functions;
      const int pointers =
          (f.row_bytes != nullptr) + (f.encode_row != nullptr) + (f.gate_up != nullptr) + (f.down != nullptr);
      CHECK(pointers == 0 || pointers == 4);
    }
  }
}

TEST("registry: a tier that cannot be used says why") {
  CHECK_THROWS(kt::usable_table("avx3"), kt::Error, "avx3");
  for (const Tier& tier : kt::all_tiers()) {
    const bool runs = kt::missing(kt::cpu_features(), tier.needs_cpu).empty() &&
                      kt::missing(kt::cpu_features(), tier.needs_os).empty();
    if (tier.table == nullptr) {
      CHECK_THROWS(kt::usable_table(tier.name), kt::Error, "not in this build");
    } else if (!runs) {
      CHECK_THROWS(kt::usable_table(tier.name), kt::Error, "cannot run here: no");
    } else {
      CHECK(&kt::usable_table(tier.name) == tier.table);
    }
  }
}
