// A part of a file as read-only memory, whose pages all processes that map it share.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace kt {

class MappedFile {
 public:
  // Throws Error that names the file and what the system said, also for a file that ends before offset + bytes.
  MappedFile(const std::string& path, std::size_t offset, std::size_t bytes);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept
      : pages_(std::exchange(other.pages_, nullptr)), page_bytes_(other.page_bytes_), data_(other.data_) {}
  MappedFile& operator=(MappedFile&&) = delete;

  const std::byte* data() const { return data_; }

 private:
  void* pages_ = nullptr;  // mappings begin at a page
  std::size_t page_bytes_ = 0;
  const std::byte* data_ = nullptr;
};

}  // namespace kt
