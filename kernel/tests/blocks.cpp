#include "blocks.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "reference.hpp"

namespace kt::check {

GuardedBuffer::GuardedBuffer(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t usable = (bytes + page - 1) / page * page;
  mapped_ = usable + page;
  void* address = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(address);
  mprotect(mapping_ + usable, page, PROT_NONE);
  data_ = mapping_ + usable - bytes;
}

GuardedBuffer::~GuardedBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

namespace {

std::size_t bytes_per_weight(Format format) {
  return format == Format::kBf16 ? 2 : 1;
}

// A group of 32 inputs: codes, then 32 fp32 scales.
std::size_t bytes_of_group(Format format) {
  return 32 * (format == Format::kInt4 ? 16 : 32) + 128;
}

std::size_t bytes_of_block(Format format, std::size_t k_padded) {
  if (is_grouped(format)) return k_padded / 32 * bytes_of_group(format);
  const std::size_t tiles = 32 * k_padded * bytes_per_weight(format);
  if (format == Format::kInt8) return tiles + 256;
  if (format == Format::kFp8) return tiles + 128 + ((k_padded + 127) / 128 * 8 + 63) / 64 * 64;
  return tiles;
}

}  // namespace

MatrixTraits whole_number_traits(Format format) {
  MatrixTraits traits{.format = format};
  if (!is_grouped(format)) return traits;
  traits.group = 32;
  traits.levels = format == Format::kInt4 ? Levels::kInt4 : Levels::kInt8;
  return traits;
}

Blocks::Blocks(Format format, std::size_t count, std::size_t k_padded)
    : traits_(whole_number_traits(format)),
      count_(count),
      k_padded_(k_padded),
      block_bytes_(bytes_of_block(format, k_padded)),
      bytes_(count * block_bytes_),
      values_(32 * count * k_padded) {
  for (std::size_t c = 0; c < channels(); ++c) {
    for (std::size_t k = 0; k < k_padded; ++k) set(c, k, 0);
    if (format != Format::kBf16) set_scale(c, 1.0f);
    for (std::size_t group = 0; format == Format::kFp8 && 128 * group < k_padded; ++group)
      set_panel_scale(c, group, 1.0f);
  }
}

char* Blocks::block_of(std::size_t channel) const {
  return bytes_.as<char>() + channel / 32 * block_bytes_;
}

// The first byte of a weight.
char* Blocks::place(std::size_t channel, std::size_t k) const {
  const std::size_t panel = channel % 32 / 16, lane = channel % 16;
  char* block = block_of(channel);
  if (traits_.format == Format::kInt4) {
    return block + k / 32 * bytes_of_group(Format::kInt4) + panel * 256 + k % 32 / 8 * 64 + 4 * lane + k % 4;
  }
  if (traits_.format == Format::kInt8Grouped) {
    return block + k / 32 * bytes_of_group(Format::kInt8Grouped) + panel * 512 + k % 32 / 4 * 64 + 4 * lane + k % 4;
  }
  const std::size_t byte = k * bytes_per_weight(traits_.format), word = byte / 4;
  return block + word / 16 * 2048 + panel * 1024 + word % 16 * 64 + 4 * lane + byte % 4;
}

void Blocks::set(std::size_t channel, std::size_t k, int value) {
  int& stored = values_[channel * k_padded_ + k];
  char* p = place(channel, k);
  if (traits_.format == Format::kInt4) {
    auto* byte = reinterpret_cast<std::uint8_t*>(p);
    const unsigned code = static_cast<unsigned>(value + 8);
    *byte = static_cast<std::uint8_t>(k % 8 < 4 ? (*byte & 0xf0u) | code : (*byte & 0x0fu) | code << 4);
  } else if (traits_.format == Format::kFp8) {
    set_code(channel, k, nearest_e4m3(static_cast<float>(value)));
  } else if (traits_.format == Format::kBf16) {
    *reinterpret_cast<std::uint16_t*>(p) = nearest_bf16(static_cast<float>(value));
  } else {
    const int before = *reinterpret_cast<std::int8_t*>(p);
    *reinterpret_cast<std::int8_t*>(p) = static_cast<std::int8_t>(value);
    if (traits_.format == Format::kInt8) {
      auto* sum = reinterpret_cast<std::int32_t*>(block_of(channel) + block_bytes_ - 128) + channel % 32;
      *sum += value - before;
    }
  }
  stored = value;
}

void Blocks::set_scale(std::size_t channel, float scale) {
  if (traits_.format == Format::kInt8) {
    reinterpret_cast<float*>(block_of(channel) + block_bytes_ - 256)[channel % 32] = scale;
    return;
  }
  if (traits_.format == Format::kFp8) {
    reinterpret_cast<float*>(block_of(channel) + 32 * k_padded_)[channel % 32] = scale;
    return;
  }
  const std::size_t bytes = bytes_of_group(traits_.format);
  for (std::size_t g = 0; g < k_padded_ / 32; ++g) {
    reinterpret_cast<float*>(block_of(channel) + (g + 1) * bytes - 128)[channel % 32] = scale;
  }
}

void Blocks::set_code(std::size_t channel, std::size_t k, std::uint8_t code) {
  const std::size_t panel = channel % 32 / 16, lane = channel % 16;
  char* row = block_of(channel) + (2 * (k / 64) + panel) * 1024 + k % 64 / 4 * 64;
  row[k % 4 / 2 * 32 + 2 * lane + k % 2] = static_cast<char>(code);
}

void Blocks::set_panel_scale(std::size_t channel, std::size_t group, float scale) {
  reinterpret_cast<float*>(block_of(channel) + 32 * k_padded_ + 128)[2 * group + channel % 32 / 16] = scale;
}

std::int64_t Blocks::product(std::size_t channel, const float* x) const {
  std::int64_t sum = 0;
  for (std::size_t k = 0; k < k_padded_; ++k) sum += std::int64_t{at(channel, k)} * static_cast<std::int64_t>(x[k]);
  return sum;
}

GemmCall Blocks::call(const Rows& rows, std::size_t first, std::size_t m) const {
  GemmCall call{};
  call.traits = &traits_;
  call.rows = rows.bytes.as<char>() + first * rows.row_bytes;
  call.row_stride = rows.row_bytes;
  call.row_scales = rows.scales.data() + first;
  call.m = m;
  call.blocks = bytes_.as<char>();
  call.block_bytes = block_bytes_;
  call.block_count = count_;
  call.k_padded = k_padded_;
  return call;
}

namespace {

constexpr float kUntouched = -777.0f;

// Calls with an output that is `columns` wide inside wider rows, and looks whether anything else was written.
template <class Function>
std::vector<float> in_wider_rows(std::size_t m, std::size_t columns, const Function& function) {
  const std::size_t stride = columns + 16;
  const GuardedBuffer memory((m * stride - 16) * sizeof(float));  // the last row ends with its last column
  float* out = memory.as<float>();
  for (std::size_t i = 0; i < m * stride - 16; ++i) out[i] = kUntouched;
  function(out, stride);
  std::vector<float> result;
  for (std::size_t r = 0; r < m; ++r) {
    result.insert(result.end(), out + r * stride, out + r * stride + columns);
    for (std::size_t i = columns; i < stride && r + 1 < m; ++i) CHECK_EQ(out[r * stride + i], kUntouched);
  }
  return result;
}

}  // namespace

std::vector<float> Blocks::down(const Rows& rows, std::size_t first, std::size_t m) const {
  return in_wider_rows(m, channels(), [&](float* out, std::size_t stride) {
    GemmCall c = call(rows, first, m);
    c.out = out;
    c.out_stride = stride;
    rows.functions.down(c);
  });
}

std::vector<float> Blocks::gate_up(const Rows& rows, std::size_t first, std::size_t m, const Gate& gate) const {
  return in_wider_rows(m, channels() / 2, [&](float* out, std::size_t stride) {
    GemmCall c = call(rows, first, m);
    c.out = out;
    c.out_stride = stride;
    rows.functions.gate_up(c, gate);
  });
}

Rows::Rows(const FormatCase& c, const std::vector<float>& x, std::size_t k_padded)
    : Rows(c, x.data(), DType::kF32, x.size() / k_padded, k_padded, k_padded) {}

Rows::Rows(const FormatCase& c, const void* x, DType dtype, std::size_t rows, std::size_t k, std::size_t k_padded)
    : functions(c.functions()),
      row_bytes(functions.row_bytes(whole_number_traits(c.format), k_padded)),
      count(rows),
      bytes(rows * row_bytes),
      scales(rows, 1.0f) {
  const GuardedBuffer work(k_padded * sizeof(float));
  const std::size_t source_bytes = k * (dtype == DType::kF32 ? 4 : 2);
  for (std::size_t r = 0; r < rows; ++r) {
    functions.encode_row(static_cast<const char*>(x) + r * source_bytes, dtype, k, k_padded,
                         whole_number_traits(c.format), bytes.as<char>() + r * row_bytes, &scales[r], work.as<float>());
  }
}

}  // namespace kt::check
