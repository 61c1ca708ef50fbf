// Micro kernels of grouped weights over a tier's vectors, as text for its anonymous namespace (after gemm-inl.hpp and
// grouped-rows-inl.hpp). Every tier does the same: exact integer sums of a segment, then
// sum + (float(integer) · weight scale) · row scale, and at a group's end + minimum · factor, each operation rounded.
//
// The including file defines on its registers (kWidth channels x 4 bytes): load_bytes, store_bytes, low_nibbles,
// high_nibbles, load_table, look_up, broadcast_bytes, broadcast_int. A Dot type says how it multiplies:
//   kRows                       rows of a tile: as many as sums of two registers of channels fit beside the operands
//   Word prepare(I)             once per weight register
//   Sums begin(I start), step(Sums&, Word, I x), fold(Sums&) after every 8 inputs, I finish(Sums, I start)
// Int8Dot takes the bytes of INT8_GROUPED, NibbleDot codes 0…15 as they are, LookedUpDot values 0…64 of a table.

constexpr std::size_t kRegisterBytes = 4 * kWidth;
constexpr int kPanelRegisters = kPanelChannels / kWidth;
constexpr int kBlockRegisters = 2 * kPanelRegisters;

// Weights says how words of 4 inputs a channel come out of a panel row.

struct Bytes {
  static constexpr bool kPacked = true;
  static constexpr std::size_t kWords = 1;  // in a panel row
  I word(I row, std::size_t) const { return row; }
};

struct UnpackedBytes : Bytes {
  static constexpr bool kPacked = false;
};

struct Nibbles {
  static constexpr bool kPacked = true;
  static constexpr std::size_t kWords = 2;
  I word(I row, std::size_t half) const { return half == 0 ? low_nibbles(row) : high_nibbles(row); }
};

// Codes that stand for values of a table.
struct LookedUp {
  static constexpr bool kPacked = true;
  static constexpr std::size_t kWords = 2;
  I table;
  I word(I row, std::size_t half) const { return look_up(table, half == 0 ? low_nibbles(row) : high_nibbles(row)); }
};

// Consecutive groups of a block, packed or unpacked: the first one's places.
struct Groups {
  const char* left;
  std::size_t panel_bytes;
  const char* scales;
  const char* minimums;  // null: none
  std::size_t bytes;     // from one group to the next
  DType type;            // of scales and minimums
  std::size_t ahead;     // what is prefetched lies so far behind; 0 for none
};

// What belongs to the first group in the first of a tile's rows, which are `stride` bytes apart.
struct GroupRows {
  const char* values;
  const char* scales;
  const char* starts;
  const char* factors;  // of the minimums
  std::size_t stride;
};

// How a group is cut into segments that have a sum and a scale of their own in a row.
struct Segments {
  std::size_t count;
  std::size_t inputs;
};

inline F load_scales(const char* p, std::size_t channel, DType type) {
  if (type == DType::kF32) return load(reinterpret_cast<const float*>(p) + channel);
  const auto* narrow = reinterpret_cast<const std::uint16_t*>(p) + channel;
  return type == DType::kF16 ? load_f16(narrow) : load_bf16(narrow);
}

inline float float_at(const char* p) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

// What one segment adds to kM x kR registers of sums. `w`: its first panel row of the first register.
template <class Dot, class Weights, int kM, int kR>
inline void add_segment(const Weights& weights, const Groups& group, const char* w, const GroupRows& rows,
                        std::size_t inputs, const F* scale, float* sums) {
  typename Dot::Sums sum[kM][kR];
#pragma GCC unroll 8
  for (int r = 0; r < kM; ++r) {
    const I start = broadcast_bytes(rows.starts + r * rows.stride);
#pragma GCC unroll 8
    for (int c = 0; c < kR; ++c) sum[r][c] = Dot::begin(start);
  }
  const char* x = rows.values;
  for (std::size_t i = 0; i < inputs; i += 16, x += 16) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < 4; j += Weights::kWords, w += kRowBytes) {
      I row[kR];
#pragma GCC unroll 8
      for (int c = 0; c < kR; ++c) {
        const char* p = w + c / kPanelRegisters * group.panel_bytes + c % kPanelRegisters * kRegisterBytes;
        row[c] = load_bytes(p);
        if (Weights::kPacked && c % kPanelRegisters == 0) __builtin_prefetch(p + group.ahead, 0, 2);
      }
#pragma GCC unroll 2
      for (std::size_t half = 0; half < Weights::kWords; ++half) {
        typename Dot::Word word[kR];
#pragma GCC unroll 8
        for (int c = 0; c < kR; ++c) word[c] = Dot::prepare(weights.word(row[c], half));
#pragma GCC unroll 8
        for (int r = 0; r < kM; ++r) {
          const I values = broadcast_bytes(x + 4 * (j + half) + r * rows.stride);
#pragma GCC unroll 8
          for (int c = 0; c < kR; ++c) {
            Dot::step(sum[r][c], word[c], values);
            if ((j + half) % 2 == 1) Dot::fold(sum[r][c]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kM; ++r) {
    const I start = broadcast_bytes(rows.starts + r * rows.stride);
    const F row_scale = set1(float_at(rows.scales + r * rows.stride));
#pragma GCC unroll 8
    for (int c = 0; c < kR; ++c) {
      float* out = sums + r * kBlockChannels + c * kWidth;
      store(out, add(load(out), mul(mul(to_float(Dot::finish(sum[r][c], start)), scale[c]), row_scale)));
    }
  }
}

template <int kM, int kR>
inline void add_minimums(const Groups& group, const GroupRows& rows, std::size_t first, float* sums) {
  for (int c = 0; c < kR; ++c) {
    const F minimum = load_scales(group.minimums, (first + c) * kWidth, group.type);
    for (int r = 0; r < kM; ++r) {
      float* out = sums + r * kBlockChannels + c * kWidth;
      store(out, add(load(out), mul(minimum, set1(float_at(rows.factors + r * rows.stride)))));
    }
  }
}

// Adds the groups' share to kM x kR registers of sums, from register `first` of the block's channels on.
template <class Dot, class Weights, int kM, int kR>
inline void add_groups(const Weights& weights, Groups group, std::size_t count, GroupRows rows, Segments segments,
                       std::size_t first, float* sums) {
  const std::size_t place = first / kPanelRegisters * group.panel_bytes + first % kPanelRegisters * kRegisterBytes;
  // A panel row holds 4 inputs a word.
  const std::size_t segment_bytes = segments.inputs / (4 * Weights::kWords) * kRowBytes;
  sums += first * kWidth;
  for (std::size_t g = 0; g < count; ++g) {
    F scale[kR];
#pragma GCC unroll 8
    for (int c = 0; c < kR; ++c) scale[c] = load_scales(group.scales, (first + c) * kWidth, group.type);
    if (Weights::kPacked) __builtin_prefetch(group.scales + group.ahead, 0, 2);
    const char* w = group.left + place;
    for (std::size_t s = 0; s < segments.count; ++s, w += segment_bytes) {
      add_segment<Dot, Weights, kM, kR>(weights, group, w, rows, segments.inputs, scale, sums);
      rows.values += segments.inputs;
      rows.scales += 4;
      rows.starts += 4;
    }
    if (group.minimums != nullptr) {
      add_minimums<kM, kR>(group, rows, first, sums);
      group.minimums += group.bytes;
      rows.factors += 4;
    }
    group.left += group.bytes;
    group.scales += group.bytes;
  }
}

// Where the groups of a block lie, and what belongs to them in each row.
class GroupWalk {
 public:
  GroupWalk(const MatrixTraits& traits, const char* rows, std::size_t stride, const char* block, std::size_t ahead,
            std::size_t k_padded)
      : at_(grouped_row(traits, k_padded)),
        traits_(traits),
        rows_(rows),
        stride_(stride),
        block_(block),
        ahead_(ahead),
        count_(k_padded / traits.group),
        segments_{traits.group / segment_inputs(traits), segment_inputs(traits)} {}

  std::size_t count() const { return count_; }
  Segments segments() const { return segments_; }
  const MatrixTraits& traits() const { return traits_; }

  Groups from(std::size_t g) const {
    const char* left = block_ + g * group_bytes(traits_);
    const std::size_t panel_bytes = group_panel_bytes(traits_);
    const char* scales = left + 2 * panel_bytes;
    const char* minimums = traits_.minimums ? scales + group_scales_bytes(traits_) : nullptr;
    return {left, panel_bytes, scales, minimums, group_bytes(traits_), traits_.scales, ahead_};
  }

  GroupRows rows(std::size_t g, std::size_t first) const {
    const char* row = rows_ + first * stride_;
    const std::size_t s = 4 * g * segments_.count;
    return {row + g * traits_.group, row + at_.scales + s, row + at_.starts + s, row + at_.minimums + 4 * g, stride_};
  }

 private:
  GroupedRow at_;
  const MatrixTraits& traits_;
  const char* rows_;
  std::size_t stride_;
  const char* block_;
  std::size_t ahead_, count_;
  Segments segments_;
};

// Rows [row, row + m), m <= kM, times groups [g, g + count), over two registers of channels at a time.
template <class Dot, class Weights, int kM>
inline void add_tile(const Weights& weights, const Groups& groups, std::size_t count, const GroupWalk& walk,
                     std::size_t g, std::size_t row, std::size_t m, float* sums) {
  if (m == kM) {
    for (std::size_t first = 0; first < kBlockRegisters; first += 2) {
      add_groups<Dot, Weights, kM, 2>(weights, groups, count, walk.rows(g, row), walk.segments(), first,
                                      sums + row * kBlockChannels);
    }
  } else if constexpr (kM > 1) {
    add_tile<Dot, Weights, kM - 1>(weights, groups, count, walk, g, row, m, sums);
  }
}

template <class Dot, class Weights>
inline void add_rows(const Weights& weights, const Groups& groups, std::size_t count, const GroupWalk& walk,
                     std::size_t g, std::size_t m, float* sums) {
  for (std::size_t row = 0; row < m; row += Dot::kRows) {
    const std::size_t rows = m - row < Dot::kRows ? m - row : Dot::kRows;
    add_tile<Dot, Weights, Dot::kRows>(weights, groups, count, walk, g, row, rows, sums);
  }
}

// Inputs that all rows are multiplied with before the next ones: their weights as bytes (8 KiB) and 64 rows' share of
// them (16 KiB) stay in L1. A multiple of the largest group.
constexpr std::size_t kChunkInputs = 256;

// Sums of m rows, weights from where they are packed.
template <class Dot, class Weights>
inline void multiply_packed(const Weights& weights, const GroupWalk& walk, std::size_t m, float* sums) {
  if (m == 1) {  // all channels in one pass, so that each line of weights is read once and in order
    add_groups<Dot, Weights, 1, kBlockRegisters>(weights, walk.from(0), walk.count(), walk.rows(0, 0), walk.segments(),
                                                 0, sums);
    return;
  }
  const std::size_t chunk = kChunkInputs / walk.traits().group;
  for (std::size_t g = 0; g < walk.count(); g += chunk) {
    const std::size_t count = walk.count() - g < chunk ? walk.count() - g : chunk;
    add_rows<Dot>(weights, walk.from(g), count, walk, g, m, sums);
  }
}

// Codes to bytes, scales and minimums to fp32, in groups of the same order.
template <class Weights>
inline Groups unpack(const Weights& weights, Groups packed, std::size_t count, char* out) {
  const std::size_t bytes = 4 * packed.panel_bytes, scales_bytes = 4 * kBlockChannels;
  const char* minimums = packed.minimums == nullptr ? nullptr : out + bytes + scales_bytes;
  const Groups unpacked = {out, 2 * packed.panel_bytes, out + bytes, minimums, bytes + 2 * scales_bytes, DType::kF32,
                           0};
  for (std::size_t g = 0; g < count; ++g, out += unpacked.bytes) {
    char* to = out;
    for (const char* p = packed.left; p < packed.scales; p += kRowBytes, to += 2 * kRowBytes) {
      __builtin_prefetch(p + packed.ahead, 0, 2);
      for (std::size_t i = 0; i < kRowBytes; i += kRegisterBytes) {
        const I row = load_bytes(p + i);
        store_bytes(to + i, weights.word(row, 0));
        store_bytes(to + kRowBytes + i, weights.word(row, 1));
      }
    }
    __builtin_prefetch(packed.scales + packed.ahead, 0, 2);
    auto* scales = reinterpret_cast<float*>(to);
    for (std::size_t c = 0; c < kBlockChannels; c += kWidth) {
      store(scales + c, load_scales(packed.scales, c, packed.type));
      if (packed.minimums != nullptr) store(scales + kBlockChannels + c, load_scales(packed.minimums, c, packed.type));
    }
    packed.left += packed.bytes;
    packed.scales += packed.bytes;
    if (packed.minimums != nullptr) packed.minimums += packed.bytes;
  }
  return unpacked;
}

// The same sums as multiply_packed; codes become bytes once for all rows.
template <class Dot, class Weights>
inline void multiply_unpacked(const Weights& weights, const GroupWalk& walk, std::size_t m, float* sums) {
  constexpr std::size_t kMostGroups = kChunkInputs / 16;
  alignas(64) char bytes[kChunkInputs * kBlockChannels + kMostGroups * 2 * 4 * kBlockChannels];
  const std::size_t chunk = kChunkInputs / walk.traits().group;
  for (std::size_t g = 0; g < walk.count(); g += chunk) {
    const std::size_t count = walk.count() - g < chunk ? walk.count() - g : chunk;
    add_rows<Dot>(UnpackedBytes{}, unpack(weights, walk.from(g), count, bytes), count, walk, g, m, sums);
  }
}

// Up to here the rows that one unpacking serves are too few to pay for storing and loading the bytes. Both ways give
// the same bits.
constexpr std::size_t kUnpackFrom = 5;

template <class Dot, class Weights>
inline void multiply_nibbles(const Weights& weights, const GroupWalk& walk, std::size_t m, float* sums) {
  if (m >= kUnpackFrom) {
    multiply_unpacked<Dot>(weights, walk, m, sums);
  } else {
    multiply_packed<Dot>(weights, walk, m, sums);
  }
}

inline void clear(float* sums, std::size_t m) {
  for (std::size_t i = 0; i < m * kBlockChannels; i += kWidth) store(sums + i, set1(0.0f));
}

// Rows that share a pass over a block, in whole tiles; their sums (8 KiB) stay in L1.
template <class Dot>
constexpr std::size_t kSharedRows = 64 / Dot::kRows * Dot::kRows;

struct GroupedInt8Micro {
  using Sum = float;
  static constexpr std::size_t kRows = kSharedRows<Int8Dot>;

  static void run(const MatrixTraits& traits, const char* rows, std::size_t stride, std::size_t m, const char* block,
                  std::size_t block_bytes, std::size_t k_padded, Sum* sums) {
    clear(sums, m);
    const GroupWalk walk(traits, rows, stride, block, prefetch_ahead(m <= Int8Dot::kRows, block_bytes), k_padded);
    multiply_packed<Int8Dot>(Bytes{}, walk, m, sums);
  }
};

struct Int4Micro {
  using Sum = float;
  static constexpr std::size_t kRows = kSharedRows<NibbleDot>;

  static void run(const MatrixTraits& traits, const char* rows, std::size_t stride, std::size_t m, const char* block,
                  std::size_t block_bytes, std::size_t k_padded, Sum* sums) {
    clear(sums, m);
    const GroupWalk walk(traits, rows, stride, block, prefetch_ahead(m < kUnpackFrom, block_bytes), k_padded);
    if (codes_are_looked_up(traits.levels)) {
      std::uint8_t table[16];
      for (unsigned code = 0; code < 16; ++code) {
        table[code] = static_cast<std::uint8_t>(nibble_value(traits.levels, code) + nibble_offset(traits.levels));
      }
      multiply_nibbles<LookedUpDot, LookedUp>({load_table(table)}, walk, m, sums);
    } else {
      multiply_nibbles<NibbleDot, Nibbles>({}, walk, m, sums);
    }
  }
};
