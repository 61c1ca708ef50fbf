// INT8 and grouped outputs are the same bits on every tier, thread count and chunking, and today's are yesterday's.
#include "hashes.hpp"

#include <fstream>
#include <iomanip>
#include <sstream>

#include "each_tier.hpp"
#include "sweep.hpp"

namespace {

using kt::check::Run;
using kt::check::SweepCase;
using Packed = std::shared_ptr<kt::PackedExperts>;

// FNV-1a, 64 bits.
std::string hash_of(const std::vector<std::uint8_t>& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3U;
  std::ostringstream text;
  text << std::hex << std::setfill('0') << std::setw(16) << hash;
  return text.str();
}

constexpr Run kPlain{1, 1000};

std::vector<std::string> stored_lines() {
  std::istringstream text(kt::check::stored_hashes());
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    if (!line.empty() && line[0] != '#') lines.push_back(line);
  }
  return lines;
}

std::string line_of(const SweepCase& c, const std::vector<std::uint8_t>& y) {
  return hash_of(y) + "  " + c.name();
}

// Where the output first differs from what the generic tier computes here and now.
std::string difference(const SweepCase& c, const Packed& packed, const std::vector<std::uint8_t>& y) {
  const std::vector<std::uint8_t> expected = kt::check::run_case(c, packed, kt::check::generic(), kPlain);
  if (y == expected) return "the generic tier's bits of today: stored hashes are out of date, or this compiler differs";
  std::size_t i = 0;
  while (y[i] == expected[i]) ++i;
  i /= c.y_type == kt::DType::kF32 ? 4 : 2;
  return "other bits than generic from token " + std::to_string(i / c.shape.hidden) + ", channel " +
         std::to_string(i % c.shape.hidden) + " on";
}

}  // namespace

namespace kt::check {

bool write_hashes(const char* path) {
  std::ofstream file(path);
  file
      << "# FNV-1a (64 bits) of the INT8 and grouped outputs of kernel/tests/sweep.cpp, computed by the generic tier:\n"
         "#   kt_tests --write-hashes kernel/tests/hashes.txt\n"
         "# Every tier must leave these bits. A change here changes users' results: say why where you make it.\n";
  for_each_case([&](std::size_t, const SweepCase& c, const Packed& packed) {
    file << line_of(c, run_case(c, packed, generic(), kPlain)) << '\n';
  });
  return static_cast<bool>(file.flush());
}

}  // namespace kt::check

TEST("hashes: there is one for each case of the sweep") {
  const std::vector<std::string> lines = stored_lines();
  CHECK_EQ(lines.size(), kt::check::sweep().size());
  for (std::size_t i = 0; i < std::min(lines.size(), kt::check::sweep().size()); ++i) {
    CHECK_EQ(lines[i].substr(std::min<std::size_t>(18, lines[i].size())), kt::check::sweep()[i].name());
  }
}

TEST_EACH_TIER("hashes: INT8 and grouped outputs over the sweep are the stored bits") {
  constexpr std::size_t kThreads[] = {1, 2, 3, 5, 7};
  constexpr std::size_t kMaxTokens[] = {1000, 64, 16, 5};
  const std::vector<std::string> lines = stored_lines();
  kt::check::for_each_case([&](std::size_t i, const SweepCase& c, const Packed& packed) {
    kt::check::Random random{i};
    const Run run{kThreads[random.below(5)], kMaxTokens[random.below(4)]};
    const std::vector<std::uint8_t> y = kt::check::run_case(c, packed, *tier.table, run);
    if (i < lines.size() && line_of(c, y) == lines[i]) return;
    kt::check::fail(__FILE__, __LINE__, c.name() + ": " + difference(c, packed, y));
  });
}
