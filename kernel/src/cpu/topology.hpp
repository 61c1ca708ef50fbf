// How many threads this process should use: physical cores, affinity mask and cgroup quota, whichever is smallest.
//
// The file systems' roots are parameters, so that machines that are not here can be laid out as folders in a test.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt {

struct TopologyRoots {
  std::string sysfs = "/sys";
  std::string cgroup = "/sys/fs/cgroup";
  std::string proc = "/proc";
};

struct Topology {
  int logical_cpus = 1;       // online
  int physical_cores = 1;     // of the online CPUs; SMT siblings count once
  std::vector<int> affinity;  // CPUs this process may run on, ascending
  int physical_in_affinity = 1;
  std::optional<double> cgroup_quota;  // CPUs; the tightest limit from this process's cgroup up to the root
  int numa_nodes = 1;                  // nodes that have CPUs
  int default_threads = 1;
};

// cgroup v2 `cpu.max`: "50000 100000" → 0.5, "max 100000" → no limit. std::invalid_argument on anything else.
std::optional<double> parse_cpu_max(std::string_view text);

// cgroup v1 `cpu.cfs_quota_us` and `cpu.cfs_period_us`: a negative quota → no limit. std::invalid_argument on anything
// else.
std::optional<double> parse_cfs_quota(std::string_view quota, std::string_view period);

// A kernel CPU list, "0-3,8,10-11", ascending and without repeats; empty text → empty. std::invalid_argument on
// anything else.
std::vector<int> parse_cpu_list(std::string_view text);

// max(1, min(cores, floor(quota)))
int default_threads(int cores, std::optional<double> quota);

// The affinity mask of the calling thread, ascending, never empty.
std::vector<int> allowed_cpus();

// The tightest quota over v2 and v1, this process's cgroup and all its ancestors. Missing or odd files set no limit.
std::optional<double> read_cgroup_quota(const TopologyRoots& roots);

Topology read_topology(const TopologyRoots& roots = {}, std::vector<int> affinity = allowed_cpus());

}  // namespace kt
