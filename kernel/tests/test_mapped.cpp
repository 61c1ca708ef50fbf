// Packed experts in a file: the bytes that were written, no byte behind them, and nothing written to them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "each_tier.hpp"
#include "error.hpp"
#include "layers.hpp"

using kt::Format;
using kt::LayerLayout;
using kt::PackedExperts;

namespace {

constexpr std::size_t kHidden = 70, kInner = 35, kHeader = 192;

// A file that is gone at the end.
struct File {
  explicit File(const std::vector<std::byte>& content) {
    const char* folder = std::getenv("TMPDIR");
    path = std::string(folder == nullptr ? "/tmp" : folder) + "/kt-mapped-XXXXXX";
    const int descriptor = mkstemp(path.data());
    std::FILE* file = fdopen(descriptor, "wb");
    std::fwrite(content.data(), 1, content.size(), file);
    std::fclose(file);
  }
  ~File() { std::remove(path.c_str()); }
  std::string path;
};

PackedExperts a_packed_layer() {
  const kt::check::Layer layer = kt::check::make_layer({2, kHidden, kInner}, 1);
  PackedExperts packed(LayerLayout(Format::kInt8, {}, 2, kHidden, kInner));
  for (std::size_t expert = 0; expert < 2; ++expert)
    packed.pack(*kt::check::context(2), kt::check::generic(), expert, layer.source(expert));
  return packed;
}

std::vector<std::byte> behind_a_header(const PackedExperts& packed) {
  const std::size_t bytes = packed.layout().bytes();
  std::vector<std::byte> content(kHeader + bytes);
  std::copy(packed.data(), packed.data() + bytes, content.begin() + kHeader);
  return content;
}

}  // namespace

TEST("a mapped layer holds the bytes that were packed, also when its file is deleted") {
  const PackedExperts packed = a_packed_layer();
  PackedExperts mapped = [&] {
    const File file(behind_a_header(packed));
    return PackedExperts(packed.layout(), file.path, kHeader);
  }();
  CHECK(mapped.mapped() && !packed.mapped());
  CHECK(std::equal(packed.data(), packed.data() + packed.layout().bytes(), mapped.data()));
}

TEST("a mapped layer is not written to") {
  const PackedExperts packed = a_packed_layer();
  const File file(behind_a_header(packed));
  PackedExperts mapped(packed.layout(), file.path, kHeader);
  const std::vector<std::byte> one(packed.layout().expert_bytes);
  CHECK_THROWS(mapped.load(0, one), kt::Error, "not written to");
}

TEST("a file that ends too early, starts between lines or is not there is an error") {
  const PackedExperts packed = a_packed_layer();
  std::vector<std::byte> content = behind_a_header(packed);
  const File whole(content);
  content.pop_back();
  const File cut(content);
  CHECK_THROWS(PackedExperts(packed.layout(), cut.path, kHeader), kt::Error, "ends at byte");
  CHECK_THROWS(PackedExperts(packed.layout(), whole.path, kHeader + 1), kt::Error, "ends at byte");
  CHECK_THROWS(PackedExperts(packed.layout(), whole.path, kHeader - 8), kt::Error, "a multiple of 64");
  CHECK_THROWS(PackedExperts(packed.layout(), whole.path + ".not", kHeader), kt::Error, "No such file");
}
