// Memory for weights and scratch: aligned for tiles and huge pages, uninitialised, std::bad_alloc when there is none.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace kt {

inline std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    constexpr std::size_t kLine = 64;
    constexpr std::size_t kHugePage = std::size_t{2} << 20;
    const std::size_t alignment = bytes >= kHugePage ? kHugePage : kLine;
    void* data = nullptr;
    if (posix_memalign(&data, alignment, bytes) != 0) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(data);
#ifdef MADV_HUGEPAGE
    // Advice only: with 4 KiB pages a decode step walks some 10,000 of them a layer. Not for the tail, whose huge page
    // would be as large as a small layer's experts, and mostly empty.
    if (alignment == kHugePage) madvise(data_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  }
  ~AlignedBuffer() { std::free(data_); }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kt
