// kt_tests: see check.hpp for the arguments. Two more:
//   --tiers               which tiers exist, one a line: name, compiled or absent, what they need
//   --write-hashes FILE   computes the hashes of the sweep on the generic tier (kernel/tests/hashes.txt)
#include <cstdio>
#include <cstring>

#include "each_tier.hpp"
#include "hashes.hpp"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--tiers") == 0) {
    std::fputs(kt::check::list_tiers().c_str(), stdout);
    return 0;
  }
  if (argc == 3 && std::strcmp(argv[1], "--write-hashes") == 0) return kt::check::write_hashes(argv[2]) ? 0 : 1;
  std::printf("%s\n", kt::check::describe_tiers().c_str());
  return kt::check::run(argc, argv);
}
