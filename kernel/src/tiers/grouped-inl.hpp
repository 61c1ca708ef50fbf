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

struct Bytes {
  static constexpr std::size_t kWords = 1;  // of 4 inputs in a panel row
  I word(I row, std::size_t) const { return row; }
};

struct Nibbles {
  static constexpr std::size_t kWords = 2;
  I word(I row, std::size_t half) const { return half == 0 ? low_nibbles(row) : high_nibbles(row); }
};

// Codes that stand for values of a table.
struct LookedUp {
  static constexpr std::size_t kWords = 2;
  I table;
  I word(I row, std::size_t half) const { return look_up(table, half == 0 ? low_nibbles(row) : high_nibbles(row)); }
};

// One group of a block, packed or unpacked.
struct Group {
  const char* left;
  std::size_t panel_bytes;
  const char* scales;
  const char* minimums;  // null: none
  DType type;            // of both
  std::size_t ahead;     // what is prefetched lies so far behind; 0 for none
};

// What belongs to a group in the first of a tile's rows, which are `stride` bytes apart.
struct GroupRows {
  const char* values;
  const char* scales;
  const char* starts;
  const char* factors;  // of the minimums
  std::size_t stride;
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

// Adds a group's share to kM x kR registers of sums, from register `first` of the block's channels on.
template <class Dot, class Weights, int kM, int kR>
inline void add_group(const Weights& weights, const Group& group, const GroupRows& rows, std::size_t segments,
                      std::size_t segment, std::size_t first, float* sums) {
  const char* w = group.left + first / kPanelRegisters * group.panel_bytes + first % kPanelRegisters * kRegisterBytes;
  const char* x = rows.values;
  sums += first * kWidth;
  for (std::size_t s = 0; s < segments; ++s) {
    typename Dot::Sums sum[kM][kR];
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
      const I start = broadcast_bytes(rows.starts + 4 * s + r * rows.stride);
#pragma GCC unroll 8
      for (int c = 0; c < kR; ++c) sum[r][c] = Dot::begin(start);
    }
    for (std::size_t i = 0; i < segment; i += 16, x += 16) {
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; j += Weights::kWords, w += kRowBytes) {
        I row[kR];
#pragma GCC unroll 8
        for (int c = 0; c < kR; ++c) {
          const char* p = w + c / kPanelRegisters * group.panel_bytes + c % kPanelRegisters * kRegisterBytes;
          row[c] = load_bytes(p);
          if (group.ahead != 0 && c % kPanelRegisters == 0) __builtin_prefetch(p + group.ahead, 0, 2);
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
    F scale[kR];
#pragma GCC unroll 8
    for (int c = 0; c < kR; ++c) scale[c] = load_scales(group.scales, (first + c) * kWidth, group.type);
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
      const I start = broadcast_bytes(rows.starts + 4 * s + r * rows.stride);
      const F row_scale = set1(float_at(rows.scales + 4 * s + r * rows.stride));
#pragma GCC unroll 8
      for (int c = 0; c < kR; ++c) {
        float* out = sums + r * kBlockChannels + c * kWidth;
        store(out, add(load(out), mul(mul(to_float(Dot::finish(sum[r][c], start)), scale[c]), row_scale)));
      }
    }
  }
  if (group.minimums == nullptr) return;
#pragma GCC unroll 8
  for (int c = 0; c < kR; ++c) {
    const F minimum = load_scales(group.minimums, (first + c) * kWidth, group.type);
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
      float* out = sums + r * kBlockChannels + c * kWidth;
      store(out, add(load(out), mul(minimum, set1(float_at(rows.factors + r * rows.stride)))));
    }
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
        segment_(segment_inputs(traits)),
        bytes_(group_bytes(traits)),
        panel_bytes_(group_panel_bytes(traits)) {}

  std::size_t segment() const { return segment_; }
  std::size_t segments() const { return traits_.group / segment_; }

  Group group(std::size_t g) const {
    const char* left = block_ + g * bytes_;
    const char* scales = left + 2 * panel_bytes_;
    return {left,           panel_bytes_, scales, traits_.minimums ? scales + group_scales_bytes(traits_) : nullptr,
            traits_.scales, ahead_};
  }

  GroupRows rows(std::size_t g, std::size_t first) const {
    const char* row = rows_ + first * stride_;
    const std::size_t s = 4 * g * segments();
    return {row + g * traits_.group, row + at_.scales + s, row + at_.starts + s, row + at_.minimums + 4 * g, stride_};
  }

 private:
  GroupedRow at_;
  const MatrixTraits& traits_;
  const char* rows_;
  std::size_t stride_;
  const char* block_;
  std::size_t ahead_, segment_, bytes_, panel_bytes_;
};

// All rows in tiles of at most Dot::kRows over two registers of channels.
template <class Dot, class Weights, int kM>
inline void add_rest(const Weights& weights, const Group& group, const GroupWalk& walk, std::size_t g,
                     std::size_t first_row, std::size_t m, float* sums) {
  if (m == kM) {
    for (std::size_t first = 0; first < kBlockRegisters; first += 2) {
      add_group<Dot, Weights, kM, 2>(weights, group, walk.rows(g, first_row), walk.segments(), walk.segment(), first,
                                     sums + first_row * kBlockChannels);
    }
  } else if constexpr (kM > 1) {
    add_rest<Dot, Weights, kM - 1>(weights, group, walk, g, first_row, m, sums);
  }
}

template <class Dot, class Weights>
inline void add_rows(const Weights& weights, const Group& group, const GroupWalk& walk, std::size_t g, std::size_t m,
                     float* sums) {
  for (std::size_t row = 0; row < m; row += Dot::kRows) {
    add_rest<Dot, Weights, Dot::kRows>(weights, group, walk, g, row, m - row < Dot::kRows ? m - row : Dot::kRows, sums);
  }
}

// Sums of m rows, weights from where they are packed.
template <class Dot, class Weights>
inline void multiply_packed(const Weights& weights, const GroupWalk& walk, std::size_t groups, std::size_t m,
                            float* sums) {
  for (std::size_t g = 0; g < groups; ++g) {
    const Group group = walk.group(g);
    if (m == 1) {  // all channels in one pass, so that each line of weights is read once and in order
      add_group<Dot, Weights, 1, kBlockRegisters>(weights, group, walk.rows(g, 0), walk.segments(), walk.segment(), 0,
                                                  sums);
    } else {
      add_rows<Dot>(weights, group, walk, g, m, sums);
    }
  }
}

// The same sums; a group's codes become bytes once for all rows.
template <class Dot, class Weights>
inline void multiply_unpacked(const Weights& weights, const GroupWalk& walk, std::size_t groups, std::size_t m,
                              float* sums) {
  constexpr std::size_t kMostInputs = 128;  // of a group
  alignas(64) char bytes[kMostInputs * kBlockChannels];
  alignas(64) float scales[2 * kBlockChannels];
  for (std::size_t g = 0; g < groups; ++g) {
    const Group packed = walk.group(g);
    char* out = bytes;
    for (const char* p = packed.left; p < packed.scales; p += kRowBytes, out += 2 * kRowBytes) {
      __builtin_prefetch(p + packed.ahead, 0, 2);
      for (std::size_t i = 0; i < kRowBytes; i += kRegisterBytes) {
        const I row = load_bytes(p + i);
        store_bytes(out + i, weights.word(row, 0));
        store_bytes(out + kRowBytes + i, weights.word(row, 1));
      }
    }
    for (std::size_t c = 0; c < kBlockChannels; c += kWidth) {
      store(scales + c, load_scales(packed.scales, c, packed.type));
      if (packed.minimums != nullptr) {
        store(scales + kBlockChannels + c, load_scales(packed.minimums, c, packed.type));
      }
    }
    const char* minimums =
        packed.minimums == nullptr ? nullptr : reinterpret_cast<const char*>(scales + kBlockChannels);
    const Group group = {bytes, 2 * packed.panel_bytes, reinterpret_cast<const char*>(scales), minimums, DType::kF32,
                         0};
    add_rows<Dot>(Bytes{}, group, walk, g, m, sums);
  }
}

// kUnpackFrom: rows from which unpacking once for all of them pays. Both ways give the same bits.
template <class Dot, class Weights, std::size_t kUnpackFrom>
inline void multiply_nibbles(const Weights& weights, const GroupWalk& walk, std::size_t groups, std::size_t m,
                             float* sums) {
  if (m >= kUnpackFrom) {
    multiply_unpacked<Dot>(weights, walk, groups, m, sums);
  } else {
    multiply_packed<Dot>(weights, walk, groups, m, sums);
  }
}

inline void clear(float* sums, std::size_t m) {
  for (std::size_t i = 0; i < m * kBlockChannels; i += kWidth) store(sums + i, set1(0.0f));
}

struct GroupedInt8Micro {
  using Sum = float;
  // Rows that share a pass over a block; their sums (8 KiB) stay in L1.
  static constexpr std::size_t kRows = 60;

  static void run(const MatrixTraits& traits, const char* rows, std::size_t stride, std::size_t m, const char* block,
                  std::size_t ahead, std::size_t k_padded, Sum* sums) {
    clear(sums, m);
    const GroupWalk walk(traits, rows, stride, block, ahead, k_padded);
    multiply_packed<Int8Dot>(Bytes{}, walk, k_padded / traits.group, m, sums);
  }
};

struct Int4Micro {
  using Sum = float;
  static constexpr std::size_t kRows = 60;
  // Up to here the rows that one unpacking serves are too few to pay for storing and loading the bytes.
  static constexpr std::size_t kUnpackFrom = 5;

  static void run(const MatrixTraits& traits, const char* rows, std::size_t stride, std::size_t m, const char* block,
                  std::size_t ahead, std::size_t k_padded, Sum* sums) {
    clear(sums, m);
    const GroupWalk walk(traits, rows, stride, block, ahead, k_padded);
    const std::size_t groups = k_padded / traits.group;
    if (codes_are_looked_up(traits.levels)) {
      std::uint8_t table[16];
      for (unsigned code = 0; code < 16; ++code) {
        table[code] = static_cast<std::uint8_t>(nibble_value(traits.levels, code) + nibble_offset(traits.levels));
      }
      multiply_nibbles<LookedUpDot, LookedUp, kUnpackFrom>({load_table(table)}, walk, groups, m, sums);
    } else {
      multiply_nibbles<NibbleDot, Nibbles, kUnpackFrom>({}, walk, groups, m, sums);
    }
  }
};
