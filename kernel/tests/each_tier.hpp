// Tests that run once for every tier, or every format of every tier, that this build holds and this CPU can run:
//
//   TEST_EACH_TIER("a zero row is zero") { tier.table->quantize(…); }        // "… [avx2]"
//   TEST_EACH_FORMAT("error against float64") { Kernel k(layer, c.format, *c.table); }  // "… [avx2 INT8]"
#pragma once

#include <string>
#include <vector>

#include "check.hpp"
#include "tiers/formats.hpp"
#include "tiers/registry.hpp"

namespace kt::check {

struct TierCase {
  std::string name;
  const TierTable* table;
};

struct FormatCase {
  std::string tier;
  const TierTable* table;
  Format format;
  const FormatTable& functions() const { return functions_of(*table, format); }
};

const std::vector<TierCase>& runnable_tiers();
std::vector<FormatCase> runnable_formats();
const TierTable& generic();

// One line: what is run, and what is not and why.
std::string describe_tiers();
// One line a tier: name, "compiled" or "absent", needs.
std::string list_tiers();

bool register_each_tier(const char* file, const char* title, void (*body)(const TierCase&));
bool register_each_format(const char* file, const char* title, void (*body)(const FormatCase&));

}  // namespace kt::check

#define TEST_EACH_TIER(title)                                                       \
  static void KT_JOIN(kt_test_, __LINE__)(const kt::check::TierCase&);              \
  static const bool KT_JOIN(kt_registration_, __LINE__) =                           \
      kt::check::register_each_tier(__FILE__, title, &KT_JOIN(kt_test_, __LINE__)); \
  static void KT_JOIN(kt_test_, __LINE__)([[maybe_unused]] const kt::check::TierCase& tier)

#define TEST_EACH_FORMAT(title)                                                       \
  static void KT_JOIN(kt_test_, __LINE__)(const kt::check::FormatCase&);              \
  static const bool KT_JOIN(kt_registration_, __LINE__) =                             \
      kt::check::register_each_format(__FILE__, title, &KT_JOIN(kt_test_, __LINE__)); \
  static void KT_JOIN(kt_test_, __LINE__)([[maybe_unused]] const kt::check::FormatCase& c)
