#include "each_tier.hpp"

namespace kt::check {
namespace {

std::vector<std::string> needs(const Tier& tier) {
  std::vector<std::string> names(tier.needs_cpu.begin(), tier.needs_cpu.end());
  names.insert(names.end(), tier.needs_os.begin(), tier.needs_os.end());
  return names;
}

std::vector<std::string> lacks(const Tier& tier) {
  std::vector<std::string> names = missing(cpu_features(), tier.needs_cpu);
  for (std::string& name : missing(cpu_features(), tier.needs_os)) names.push_back(std::move(name));
  return names;
}

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

}  // namespace

const std::vector<TierCase>& runnable_tiers() {
  static const std::vector<TierCase> cases = [] {
    std::vector<TierCase> found;
    for (const Tier& tier : all_tiers()) {
      if (tier.table != nullptr && lacks(tier).empty()) found.push_back({std::string(tier.name), tier.table});
    }
    return found;
  }();
  return cases;
}

std::vector<FormatCase> runnable_formats() {
  std::vector<FormatCase> found;
  for (const TierCase& tier : runnable_tiers()) {
    for (const NamedFormat& known : all_formats()) {
      const FormatCase c{tier.name, tier.table, known.format};
      if (c.functions().gate_up != nullptr) found.push_back(c);
    }
  }
  return found;
}

const TierTable& generic() {
  return usable_table("generic");
}

std::string describe_tiers() {
  std::vector<std::string> run, skipped;
  for (const Tier& tier : all_tiers()) {
    const std::string name(tier.name);
    if (tier.table == nullptr) {
      skipped.push_back(name + " (not in this build)");
    } else if (const auto absent = lacks(tier); !absent.empty()) {
      skipped.push_back(name + " (no " + joined(absent, ", ") + ")");
    } else {
      run.push_back(name + " (" + joined(formats_of(*tier.table), ", ") + ")");
    }
  }
  return "tiers: " + joined(run, ", ") + (skipped.empty() ? "" : "; not run: " + joined(skipped, ", "));
}

std::string list_tiers() {
  std::string text;
  for (const Tier& tier : all_tiers()) {
    text +=
        std::string(tier.name) + (tier.table == nullptr ? " absent " : " compiled ") + joined(needs(tier), ",") + "\n";
  }
  return text;
}

bool register_each_tier(const char* file, const char* title, void (*body)(const TierCase&)) {
  for (const TierCase& tier : runnable_tiers()) {
    tests().push_back({file, std::string(title) + " [" + tier.name + "]", [body, tier] { body(tier); }});
  }
  return true;
}

bool register_each_format(const char* file, const char* title, void (*body)(const FormatCase&)) {
  for (const FormatCase& c : runnable_formats()) {
    const std::string name = std::string(title) + " [" + c.tier + " " + std::string(format_name(c.format)) + "]";
    tests().push_back({file, name, [body, c] { body(c); }});
  }
  return true;
}

}  // namespace kt::check
