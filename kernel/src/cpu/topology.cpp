#include "cpu/topology.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>

#include <cerrno>
#endif

namespace kt {
namespace {

namespace fs = std::filesystem;

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

template <typename T>
std::optional<T> to_number(std::string_view text) {
  text = trim(text);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::string> read_text(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

std::optional<int> read_int(const fs::path& path) {
  const auto text = read_text(path);
  return text ? to_number<int>(*text) : std::nullopt;
}

// A list that is absent or not a list tells nothing.
std::vector<int> read_cpu_list(const fs::path& path) {
  const auto text = read_text(path);
  if (!text) return {};
  try {
    return parse_cpu_list(*text);
  } catch (const std::invalid_argument&) {
    return {};
  }
}

double quota_in_cpus(std::string_view quota, std::string_view period, std::string_view shown) {
  const auto microseconds = to_number<long long>(quota);
  const auto interval = to_number<long long>(period);
  if (!microseconds || !interval || *microseconds <= 0 || *interval <= 0) {
    throw std::invalid_argument("not a CPU quota: '" + std::string(shown) + "'");
  }
  return static_cast<double>(*microseconds) / static_cast<double>(*interval);
}

// Identity of a physical core. Siblings share the smallest CPU of their list; where lists are missing, package and core
// number serve; where those are missing too, a CPU is a core of its own.
std::pair<int, int> core_of(int cpu, const fs::path& cpus) {
  constexpr int kBySiblings = -1;
  constexpr int kByItself = -2;
  const fs::path topology = cpus / ("cpu" + std::to_string(cpu)) / "topology";
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {
    const std::vector<int> siblings = read_cpu_list(topology / name);
    if (!siblings.empty()) return {kBySiblings, std::min(cpu, siblings.front())};
  }
  if (const auto core = read_int(topology / "core_id"); core && *core >= 0) {
    return {std::max(0, read_int(topology / "physical_package_id").value_or(0)), *core};
  }
  return {kByItself, cpu};
}

int count_cores(const std::vector<int>& cpus, const fs::path& root) {
  std::set<std::pair<int, int>> cores;
  for (const int cpu : cpus) cores.insert(core_of(cpu, root));
  return std::max<int>(1, static_cast<int>(cores.size()));
}

struct Membership {
  std::string controllers;  // "" for cgroup v2
  std::string path;
};

// Lines of /proc/self/cgroup: "hierarchy:controllers:path".
std::vector<Membership> memberships(const fs::path& proc) {
  std::vector<Membership> found;
  std::istringstream lines(read_text(proc / "self" / "cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    found.push_back({line.substr(first + 1, second - first - 1), line.substr(second + 1)});
  }
  return found;
}

bool manages_cpu(std::string_view controllers) {
  while (!controllers.empty()) {
    const auto comma = controllers.find(',');
    if (controllers.substr(0, comma) == "cpu") return true;
    controllers = comma == std::string_view::npos ? std::string_view{} : controllers.substr(comma + 1);
  }
  return false;
}

// The root, then every folder on the way down to `path`. A container may see a path that is not under its own mount;
// those folders do not exist here and tell nothing. ".." means that the cgroup lies outside this namespace: only the
// root is seen.
std::vector<fs::path> ancestors(const fs::path& root, std::string_view path) {
  std::vector<fs::path> folders{root};
  for (const fs::path& part : fs::path(path).relative_path()) {
    if (part == "..") return {root};
    if (!part.empty()) folders.push_back(folders.back() / part);
  }
  return folders;
}

class Tightest {
 public:
  template <typename Parse>
  void consider(Parse&& parse) {
    try {
      const std::optional<double> quota = parse();
      if (quota && (!value_ || *quota < *value_)) value_ = quota;
    } catch (const std::invalid_argument&) {
      // A file in a form nobody knows sets no limit.
    }
  }
  std::optional<double> value() const { return value_; }

 private:
  std::optional<double> value_;
};

}  // namespace

std::optional<double> parse_cpu_max(std::string_view text) {
  const std::string_view line = trim(text);
  const auto gap = line.find_first_of(" \t");
  const std::string_view quota = line.substr(0, gap);
  // The kernel's default period; a lone quota is what may be written to the file.
  const std::string_view period = gap == std::string_view::npos ? "100000" : line.substr(gap);
  if (quota == "max") {
    quota_in_cpus("1", period, text);
    return std::nullopt;
  }
  return quota_in_cpus(quota, period, line);
}

std::optional<double> parse_cfs_quota(std::string_view quota, std::string_view period) {
  if (const auto microseconds = to_number<long long>(quota); microseconds && *microseconds < 0) return std::nullopt;
  return quota_in_cpus(quota, period, std::string(trim(quota)) + " / " + std::string(trim(period)));
}

std::vector<int> parse_cpu_list(std::string_view text) {
  std::set<int> cpus;
  std::string_view rest = trim(text);
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const std::string_view range = rest.substr(0, comma);
    const auto dash = range.find('-');
    const auto first = to_number<int>(range.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : to_number<int>(range.substr(dash + 1));
    constexpr int kMostCpus = 1 << 20;
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostCpus) {
      throw std::invalid_argument("not a CPU list: '" + std::string(trim(text)) + "'");
    }
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.insert(cpu);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
  }
  return {cpus.begin(), cpus.end()};
}

int default_threads(int cores, std::optional<double> quota) {
  int threads = cores;
  // The tolerance keeps a whole number of CPUs whole after the division.
  if (quota) threads = std::min(threads, static_cast<int>(std::floor(std::min(*quota, 1e6) + 1e-9)));
  return std::max(1, threads);
}

std::vector<int> allowed_cpus() {
#if defined(__linux__)
  // The call fails with EINVAL while the mask is shorter than the kernel's.
  for (int capacity = CPU_SETSIZE; capacity <= (1 << 20); capacity *= 2) {
    std::vector<cpu_set_t> mask(CPU_ALLOC_SIZE(capacity) / sizeof(cpu_set_t));
    const std::size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) == 0) {
      std::vector<int> cpus;
      for (int cpu = 0; cpu < capacity; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, mask.data())) cpus.push_back(cpu);
      }
      if (!cpus.empty()) return cpus;
    }
    if (errno != EINVAL) break;
  }
#endif
  std::vector<int> all(std::max(1U, std::thread::hardware_concurrency()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::optional<double> read_cgroup_quota(const TopologyRoots& roots) {
  const fs::path root(roots.cgroup);
  Tightest tightest;
  const auto v2 = [&](const fs::path& folder) {
    if (const auto text = read_text(folder / "cpu.max")) tightest.consider([&] { return parse_cpu_max(*text); });
  };
  const auto v1 = [&](const fs::path& folder) {
    const auto quota = read_text(folder / "cpu.cfs_quota_us");
    const auto period = read_text(folder / "cpu.cfs_period_us");
    if (quota && period) tightest.consider([&] { return parse_cfs_quota(*quota, *period); });
  };
  std::vector<Membership> groups = memberships(fs::path(roots.proc));
  // Where the list is missing, the mount points themselves still tell.
  groups.push_back({"", "/"});
  groups.push_back({"cpu", "/"});
  for (const auto& [controllers, path] : groups) {
    if (controllers.empty()) {
      for (const fs::path& mount : {root, root / "unified"}) std::ranges::for_each(ancestors(mount, path), v2);
    } else if (manages_cpu(controllers)) {
      for (const fs::path& mount : {root / controllers, root / "cpu", root / "cpu,cpuacct"}) {
        std::ranges::for_each(ancestors(mount, path), v1);
      }
    }
  }
  return tightest.value();
}

Topology read_topology(const TopologyRoots& roots, std::vector<int> affinity) {
  const fs::path devices = fs::path(roots.sysfs) / "devices" / "system";
  Topology topology;
  std::vector<int> online = read_cpu_list(devices / "cpu" / "online");
  if (online.empty()) online = affinity;
  topology.logical_cpus = std::max<int>(1, static_cast<int>(online.size()));
  topology.physical_cores = count_cores(online, devices / "cpu");
  topology.physical_in_affinity = count_cores(affinity, devices / "cpu");
  topology.affinity = std::move(affinity);
  topology.cgroup_quota = read_cgroup_quota(roots);
  std::vector<int> nodes = read_cpu_list(devices / "node" / "has_cpu");
  if (nodes.empty()) nodes = read_cpu_list(devices / "node" / "online");
  topology.numa_nodes = std::max<int>(1, static_cast<int>(nodes.size()));
  topology.default_threads = default_threads(topology.physical_in_affinity, topology.cgroup_quota);
  return topology;
}

}  // namespace kt
