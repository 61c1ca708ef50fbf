// One GEMM call without the layer around it: weights laid out by hand from the drawing in docs/architecture.md, rows
// encoded by the tier, every buffer ending at a page that must not be touched.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "each_tier.hpp"

namespace kt::check {

// Memory whose last byte is the last one before an inaccessible page.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t bytes);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept
      : mapping_(std::exchange(other.mapping_, nullptr)), mapped_(other.mapped_), data_(other.data_) {}
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  char* mapping_;
  std::size_t mapped_;
  char* data_;
};

// What a test's matrix of whole numbers is: INT4 of -8…7 in groups of 32, fp32 scales.
MatrixTraits whole_number_traits(Format format);

// Column blocks of 32 channels: all weights 0, all scales 1.
class Blocks {
 public:
  Blocks(Format format, std::size_t count, std::size_t k_padded);

  // INT8: -127 … 127; INT4: -8 … 7; BF16, FP8: a whole number that the format holds. Channels 32b … 32b+15 are the left
  // panel of block b.
  void set(std::size_t channel, std::size_t k, int value);
  void set_scale(std::size_t channel, float scale);  // of all its groups, where the format has groups
  // FP8: any code, which product() does not count; the scale of 16 channels and the 128 inputs from 128·group on.
  void set_code(std::size_t channel, std::size_t k, std::uint8_t code);
  void set_panel_scale(std::size_t channel, std::size_t group, float scale);

  std::size_t count() const { return count_; }
  std::size_t channels() const { return 32 * count_; }
  std::size_t k_padded() const { return k_padded_; }
  int at(std::size_t channel, std::size_t k) const { return values_[channel * k_padded_ + k]; }
  // Sum over K of weight times x.
  std::int64_t product(std::size_t channel, const float* x) const;

  // `m` rows from `first` on, through the tier.
  std::vector<float> down(const class Rows& rows, std::size_t first, std::size_t m) const;
  std::vector<float> gate_up(const class Rows& rows, std::size_t first, std::size_t m, const Gate& gate) const;

 private:
  char* block_of(std::size_t channel) const;
  GemmCall call(const class Rows& rows, std::size_t first, std::size_t m) const;

  char* place(std::size_t channel, std::size_t k) const;

  MatrixTraits traits_;
  std::size_t count_, k_padded_, block_bytes_;
  GuardedBuffer bytes_;
  std::vector<int> values_;
};

// Rows encoded by a tier, without rotation.
class Rows {
 public:
  // k_padded inputs a row.
  Rows(const FormatCase& c, const std::vector<float>& x, std::size_t k_padded);
  // Rows of k inputs, one after the other, in any type.
  Rows(const FormatCase& c, const void* x, DType dtype, std::size_t count, std::size_t k, std::size_t k_padded);

  const FormatTable& functions;
  std::size_t row_bytes;
  std::size_t count;
  GuardedBuffer bytes;
  std::vector<float> scales;
};

}  // namespace kt::check
