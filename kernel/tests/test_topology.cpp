#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "cpu/topology.hpp"

namespace {

namespace fs = std::filesystem;
using kt::default_threads;
using kt::parse_cfs_quota;
using kt::parse_cpu_list;
using kt::parse_cpu_max;

using Cpus = std::vector<int>;
using Quota = std::optional<double>;

// A machine laid out as folders, removed at the end of the test.
class Machine {
 public:
  Machine() {
    std::string pattern = (fs::temp_directory_path() / "kt-machine-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = pattern;
  }
  ~Machine() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  Machine& file(const std::string& path, const std::string& text) {
    const fs::path full = root_ / path;
    fs::create_directories(full.parent_path());
    std::ofstream(full) << text;
    return *this;
  }
  Machine& cpu(int number, const std::string& file_name, const std::string& text) {
    return file("sys/devices/system/cpu/cpu" + std::to_string(number) + "/topology/" + file_name, text);
  }
  Machine& online(const std::string& list) { return file("sys/devices/system/cpu/online", list + "\n"); }

  kt::TopologyRoots roots() const {
    return {(root_ / "sys").string(), (root_ / "cgroup").string(), (root_ / "proc").string()};
  }
  kt::Topology read(Cpus affinity) const { return kt::read_topology(roots(), std::move(affinity)); }
  Quota quota() const { return kt::read_cgroup_quota(roots()); }

 private:
  fs::path root_;
};

}  // namespace

TEST("topology: cpu.max texts") {
  CHECK_EQ(parse_cpu_max("max 100000\n"), Quota{});
  CHECK_EQ(parse_cpu_max("max"), Quota{});
  CHECK_EQ(parse_cpu_max("50000 100000\n"), Quota(0.5));
  CHECK_EQ(parse_cpu_max("765000 100000"), Quota(7.65));
  CHECK_EQ(parse_cpu_max("200000"), Quota(2.0));
  CHECK_EQ(parse_cpu_max("  300000\t100000  "), Quota(3.0));
  for (const char* bad :
       {"", "two 100000", "100000 0", "-1 100000", "0 100000", "1 2 3", "1.5 100000", "max 0", "max x"}) {
    CHECK_THROWS(parse_cpu_max(bad), std::invalid_argument, "CPU quota");
  }
}

TEST("topology: cfs quota texts") {
  CHECK_EQ(parse_cfs_quota("-1\n", "100000\n"), Quota{});
  CHECK_EQ(parse_cfs_quota("50000", "100000"), Quota(0.5));
  CHECK_EQ(parse_cfs_quota("400000\n", "100000\n"), Quota(4.0));
  CHECK_THROWS(parse_cfs_quota("", "100000"), std::invalid_argument);
  CHECK_THROWS(parse_cfs_quota("100000", "0"), std::invalid_argument, "100000 / 0");
  CHECK_THROWS(parse_cfs_quota("lots", "100000"), std::invalid_argument);
}

TEST("topology: quota rounds down and never below one thread") {
  CHECK_EQ(default_threads(16, 7.65), 7);
  CHECK_EQ(default_threads(16, 0.5), 1);
  CHECK_EQ(default_threads(16, std::nullopt), 16);
  CHECK_EQ(default_threads(4, 64.0), 4);
  CHECK_EQ(default_threads(4, 1e18), 4);
  CHECK_EQ(default_threads(16, 300000.0 / 100000.0), 3);
  CHECK_EQ(default_threads(16, 0.1 * 30), 3);
  CHECK_EQ(default_threads(0, std::nullopt), 1);
}

TEST("topology: CPU lists") {
  CHECK_EQ(parse_cpu_list("0-3,8,10-11\n"), Cpus{0, 1, 2, 3, 8, 10, 11});
  CHECK_EQ(parse_cpu_list("5"), Cpus{5});
  CHECK_EQ(parse_cpu_list("3,1,1-2"), Cpus{1, 2, 3});
  CHECK_EQ(parse_cpu_list("\n"), Cpus{});
  for (const char* bad : {"a", "1-", "-1", "3-1", "1,,2", "1 2", "0-99999999"}) {
    CHECK_THROWS(parse_cpu_list(bad), std::invalid_argument, "CPU list");
  }
}

TEST("topology: SMT siblings count once, on two packages") {
  Machine machine;
  machine.online("0-7");
  for (int cpu = 0; cpu < 8; ++cpu) {
    const int first = cpu % 4;  // CPU n and n + 4 share a core, as Linux numbers them
    machine.cpu(cpu, "thread_siblings_list", std::to_string(first) + "," + std::to_string(first + 4) + "\n");
    machine.cpu(cpu, "core_id", std::to_string(first % 2)).cpu(cpu, "physical_package_id", std::to_string(first / 2));
  }
  const kt::Topology t = machine.read({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK_EQ(t.logical_cpus, 8);
  CHECK_EQ(t.physical_cores, 4);
  CHECK_EQ(t.physical_in_affinity, 4);
  CHECK_EQ(t.default_threads, 4);
}

TEST("topology: an affinity mask of both siblings is one core") {
  Machine machine;
  machine.online("0-3");
  for (int cpu = 0; cpu < 4; ++cpu) machine.cpu(cpu, "core_cpus_list", cpu < 2 ? "0-1\n" : "2-3\n");
  CHECK_EQ(machine.read({0, 1}).default_threads, 1);
  CHECK_EQ(machine.read({1, 2}).default_threads, 2);
  CHECK_EQ(machine.read({1, 2}).physical_cores, 2);
}

TEST("topology: offline CPUs and holes in the numbering") {
  Machine machine;
  machine.online("0,2,6-7");
  machine.cpu(0, "core_cpus_list", "0").cpu(2, "core_cpus_list", "2");
  machine.cpu(6, "core_cpus_list", "6-7").cpu(7, "core_cpus_list", "6-7");
  const kt::Topology t = machine.read({2, 7});
  CHECK_EQ(t.logical_cpus, 4);
  CHECK_EQ(t.physical_cores, 3);
  CHECK_EQ(t.physical_in_affinity, 2);
}

TEST("topology: without sibling lists package and core number decide") {
  Machine machine;
  machine.online("0-3");
  for (int cpu = 0; cpu < 4; ++cpu) {
    machine.cpu(cpu, "core_id", "0\n").cpu(cpu, "physical_package_id", std::to_string(cpu / 2) + "\n");
  }
  CHECK_EQ(machine.read({0, 1, 2, 3}).physical_cores, 2);
}

TEST("topology: a machine without any of the files still has threads") {
  const Machine machine;
  const kt::Topology t = machine.read({0, 1, 5});
  CHECK_EQ(t.logical_cpus, 3);
  CHECK_EQ(t.physical_cores, 3);
  CHECK_EQ(t.numa_nodes, 1);
  CHECK_EQ(t.cgroup_quota, Quota{});
  CHECK_EQ(t.default_threads, 3);
}

TEST("topology: garbage in sysfs is survived") {
  Machine machine;
  machine.online("every one").cpu(0, "core_cpus_list", "??").cpu(0, "core_id", "-1");
  machine.file("sys/devices/system/node/has_cpu", "none");
  const kt::Topology t = machine.read({0, 1});
  CHECK_EQ(t.logical_cpus, 2);
  CHECK_EQ(t.physical_cores, 2);
  CHECK_EQ(t.numa_nodes, 1);
}

TEST("topology: NUMA nodes that hold only memory do not count") {
  Machine machine;
  machine.file("sys/devices/system/node/has_cpu", "0-1\n").file("sys/devices/system/node/online", "0-2\n");
  CHECK_EQ(machine.read({0}).numa_nodes, 2);
}

TEST("cgroup: the tightest limit between the process and the root wins") {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/pod/box/job\n");
  machine.file("cgroup/pod/cpu.max", "300000 100000").file("cgroup/pod/box/cpu.max", "max 100000");
  machine.file("cgroup/pod/box/job/cpu.max", "800000 100000");
  CHECK_EQ(machine.quota(), Quota(3.0));
  machine.file("cgroup/pod/box/job/cpu.max", "150000 100000");
  CHECK_EQ(machine.quota(), Quota(1.5));
  CHECK_EQ(machine.read({0, 1, 2, 3}).default_threads, 1);
}

TEST("cgroup: a neighbour's limit does not count") {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/mine\n");
  machine.file("cgroup/other/cpu.max", "100000 100000").file("cgroup/mine/cpu.max", "400000 100000");
  CHECK_EQ(machine.quota(), Quota(4.0));
}

TEST("cgroup: inside a container the mount is the cgroup though the path names the host's folders") {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/docker/4b6b634e\n").file("cgroup/cpu.max", "200000 100000");
  CHECK_EQ(machine.quota(), Quota(2.0));
  machine.file("proc/self/cgroup", "0::/../../outside\n");
  CHECK_EQ(machine.quota(), Quota(2.0));
}

TEST("cgroup: version 1, with the controllers mounted together or alone") {
  for (const char* mount : {"cpu,cpuacct", "cpu"}) {
    Machine machine;
    machine.file("proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/\n0::/\n");
    const std::string folder = std::string("cgroup/") + mount;
    machine.file(folder + "/docker/a/cpu.cfs_quota_us", "-1\n")
        .file(folder + "/docker/a/cpu.cfs_period_us", "100000\n");
    machine.file(folder + "/docker/cpu.cfs_quota_us", "250000\n")
        .file(folder + "/docker/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(machine.quota(), Quota(2.5));
  }
}

TEST("cgroup: the cpuset and cpuacct controllers are not the cpu controller") {
  Machine machine;
  machine.file("proc/self/cgroup", "3:cpuset:/a\n2:cpuacct:/a\n");
  machine.file("cgroup/cpu/a/cpu.cfs_quota_us", "100000").file("cgroup/cpu/a/cpu.cfs_period_us", "100000");
  CHECK_EQ(machine.quota(), Quota{});
}

TEST("cgroup: a hybrid host has both trees and the smaller limit wins") {
  Machine machine;
  machine.file("proc/self/cgroup", "1:cpu:/\n0::/unit\n");
  machine.file("cgroup/cpu/cpu.cfs_quota_us", "600000").file("cgroup/cpu/cpu.cfs_period_us", "100000");
  machine.file("cgroup/unified/unit/cpu.max", "500000 100000");
  CHECK_EQ(machine.quota(), Quota(5.0));
}

TEST("cgroup: files in an unknown form set no limit, and do not hide the others") {
  Machine machine;
  machine.file("proc/self/cgroup", "no colons here\n0::/a\n");
  machine.file("cgroup/a/cpu.max", "as much as you like").file("cgroup/cpu.max", "400000 100000");
  CHECK_EQ(machine.quota(), Quota(4.0));
}

TEST("topology: this machine") {
  const kt::Topology t = kt::read_topology();
  CHECK(t.logical_cpus >= 1);
  CHECK(t.physical_cores >= 1 && t.physical_cores <= t.logical_cpus);
  CHECK(!t.affinity.empty());
  CHECK(t.default_threads >= 1 && t.default_threads <= t.physical_in_affinity);
  CHECK_EQ(t.affinity, kt::allowed_cpus());
}
