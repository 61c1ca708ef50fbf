#include "cpu/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "error.hpp"

namespace kt {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw Error(path + ": cannot be " + what + ": " + std::generic_category().message(errno));
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path, std::size_t offset, std::size_t bytes) {
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.number < 0) fail(path, "opened");
  struct stat status{};
  if (fstat(file.number, &status) != 0) fail(path, "looked at");
  const auto size = static_cast<std::size_t>(status.st_size);
  // Reading pages behind the end of a file would kill the process.
  if (size < offset || size - offset < bytes) {
    throw Error(path + " ends at byte " + std::to_string(size) + ", before the " + std::to_string(bytes) +
                " bytes from " + std::to_string(offset) + " on");
  }
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t skipped = offset % page;
  page_bytes_ = skipped + bytes;
  pages_ = mmap(nullptr, page_bytes_, PROT_READ, MAP_SHARED, file.number, static_cast<off_t>(offset - skipped));
  if (pages_ == MAP_FAILED) {
    pages_ = nullptr;
    fail(path, "mapped");
  }
  data_ = static_cast<const std::byte*>(pages_) + skipped;
}

MappedFile::~MappedFile() {
  if (pages_ != nullptr) munmap(pages_, page_bytes_);
}

}  // namespace kt
