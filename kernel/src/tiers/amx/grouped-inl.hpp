// Grouped weights on AMX for many rows, as text for a tier's anonymous namespace (after grouped-inl.hpp and
// tiles-inl.hpp). A tile product takes one segment, and its integers are exact; what follows are the operations of
// add_segment in their order, so that the bits are those of every other tier.
//
// The sums of a tile of rows and a panel of channels stay in registers. While they take the integers of a segment,
// those of the next one are stored and the products of the one after that are computed.

// m rows, at least 4, in tiles of 4, 8, 12 or 16; the last may begin inside the one before.
struct RowTiles {
  explicit RowTiles(std::size_t m) : m(m), count((m + 15) / 16), rows(height()) {
    if (rows > m) ++count, rows = height();
  }
  std::size_t height() const { return ((m + count - 1) / count + 3) / 4 * 4; }
  std::size_t first(std::size_t tile) const { return tile * rows + rows <= m ? tile * rows : m - rows; }
  // Rows of the tile that the one before has too.
  std::size_t overlap(std::size_t tile) const { return tile * rows - first(tile); }

  std::size_t m, count, rows;
};

// Consecutive groups of one panel, 8 bits a weight, and what belongs to them in a tile of rows. Pointers are those of
// the first group and the first row.
struct PanelGroups {
  const char* weights;
  const char* scales;
  const char* minimums;
  std::size_t bytes;  // from one group to the next
  DType type;         // of scales and minimums
  GroupRows rows;
  Segments segments;  // of a group
  std::size_t count;  // groups
  std::size_t ahead;  // what is prefetched lies so far behind the weights; 0 for none

  std::size_t panel_bytes() const { return segments.inputs / 4 * kRowBytes; }  // of a segment
  std::size_t group_of(std::size_t s) const { return s / segments.count; }
};

constexpr std::size_t kTileIntegers = 16 * kPanelChannels;

// Starts the products of segment s, signed rows times signed weights, and stores the integers of the segment before.
// Two sets of tiles take turns: a store of what is still being computed would hold up every tile product behind it
// (measured, two products and their stores: 16.6 ns, and 9.6 ns when the stores are a segment late).
[[gnu::always_inline]] inline void multiply_segment(const PanelGroups& panel, std::size_t s,
                                                    std::int32_t (*integers)[kTileIntegers]) {
  const std::size_t group = panel.group_of(s);
  const char* w = panel.weights + group * panel.bytes + (s - group * panel.segments.count) * panel.panel_bytes();
  const char* x = panel.rows.values + s * panel.segments.inputs;
  if (panel.ahead != 0) {
    for (std::size_t i = 0; i < panel.panel_bytes(); i += 64) __builtin_prefetch(w + panel.ahead + i, 0, 2);
  }
  if (s % 2 == 0) {
    asm volatile(
        "tileloadd (%0,%3,1), %%tmm4\n\ttileloadd (%1,%4,1), %%tmm6\n\ttilezero %%tmm0\n\t"
        "tdpbssd %%tmm6, %%tmm4, %%tmm0\n\ttilestored %%tmm1, (%2,%4,1)"
        :
        : "r"(x), "r"(w), "r"(integers[1]), "r"(panel.rows.stride), "r"(kRowBytes)
        : "memory");
  } else {
    asm volatile(
        "tileloadd (%0,%3,1), %%tmm5\n\ttileloadd (%1,%4,1), %%tmm7\n\ttilezero %%tmm1\n\t"
        "tdpbssd %%tmm7, %%tmm5, %%tmm1\n\ttilestored %%tmm0, (%2,%4,1)"
        :
        : "r"(x), "r"(w), "r"(integers[0]), "r"(panel.rows.stride), "r"(kRowBytes)
        : "memory");
  }
}

// The same after the last segment, which is an odd one: K is a multiple of 64.
inline void store_last_segment(std::int32_t (*integers)[kTileIntegers]) {
  asm volatile("tilestored %%tmm1, (%0,%1,1)" : : "r"(integers[1]), "r"(kRowBytes) : "memory");
}

// Adds the integers of segment s, scaled, to the sums, and at a group's end its minimums.
template <std::size_t kRows, bool kMinimums>
[[gnu::always_inline]] inline void add_integers(const PanelGroups& panel, std::size_t s, const std::int32_t* integers,
                                                F* sum) {
  const std::size_t group = panel.group_of(s), stride = panel.rows.stride;
  const F scale = load_scales(panel.scales + group * panel.bytes, 0, panel.type);
  const char* row_scales = panel.rows.scales + 4 * s;
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    const F row_scale = set1(float_at(row_scales + r * stride));
    sum[r] = add(sum[r], mul(mul(to_float(load_int(integers + r * kPanelChannels)), scale), row_scale));
  }
  if (!kMinimums || (s + 1) % panel.segments.count != 0) return;
  const F minimum = load_scales(panel.minimums + group * panel.bytes, 0, panel.type);
  const char* factors = panel.rows.factors + 4 * group;
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    sum[r] = add(sum[r], mul(minimum, set1(float_at(factors + r * stride))));
  }
}

// Adds to the sums of kRows rows; the first `overlap` of them have it already.
template <std::size_t kRows, bool kMinimums>
void multiply_panel(const PanelGroups& panel, std::size_t overlap, float* sums) {
  alignas(64) std::int32_t integers[2][kTileIntegers];
  F sum[kRows];
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) sum[r] = load(sums + r * kBlockChannels);
  const std::size_t segments = panel.count * panel.segments.count;
  multiply_segment(panel, 0, integers);  // stores what nobody reads
  multiply_segment(panel, 1, integers);
  for (std::size_t s = 2; s < segments; s += 2) {
    multiply_segment(panel, s, integers);
    add_integers<kRows, kMinimums>(panel, s - 2, integers[0], sum);
    multiply_segment(panel, s + 1, integers);
    add_integers<kRows, kMinimums>(panel, s - 1, integers[1], sum);
  }
  store_last_segment(integers);
  add_integers<kRows, kMinimums>(panel, segments - 2, integers[0], sum);
  add_integers<kRows, kMinimums>(panel, segments - 1, integers[1], sum);
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    if (r >= overlap) store(sums + r * kBlockChannels, sum[r]);
  }
}

template <bool kMinimums>
inline void multiply_panel(const PanelGroups& panel, const RowTiles& cut, std::size_t tile, float* sums) {
  switch (cut.rows) {
    case 4:
      return multiply_panel<4, kMinimums>(panel, cut.overlap(tile), sums);
    case 8:
      return multiply_panel<8, kMinimums>(panel, cut.overlap(tile), sums);
    case 12:
      return multiply_panel<12, kMinimums>(panel, cut.overlap(tile), sums);
    default:
      return multiply_panel<16, kMinimums>(panel, cut.overlap(tile), sums);
  }
}

// Adds to the sums of m rows what `count` groups from g on give; `groups`: those, 8 bits a weight.
inline void multiply_by_tiles(const GroupWalk& walk, std::size_t g, const Groups& groups, std::size_t count,
                              const RowTiles& cut, float* sums) {
  const std::size_t scale_bytes = groups.type == DType::kF32 ? 4 : 2;
  for (std::size_t tile = 0; tile < cut.count; ++tile) {
    const std::size_t first = cut.first(tile);
    for (std::size_t side = 0; side < 2; ++side) {
      const std::size_t channel = side * kPanelChannels;
      const PanelGroups panel = {
          .weights = groups.left + side * groups.panel_bytes,
          .scales = groups.scales + channel * scale_bytes,
          .minimums = groups.minimums == nullptr ? nullptr : groups.minimums + channel * scale_bytes,
          .bytes = groups.bytes,
          .type = groups.type,
          .rows = walk.rows(g, first),
          .segments = walk.segments(),
          .count = count,
          .ahead = tile == 0 ? groups.ahead : 0};
      float* out = sums + first * kBlockChannels + channel;
      if (groups.minimums == nullptr) {
        multiply_panel<false>(panel, cut, tile, out);
      } else {
        multiply_panel<true>(panel, cut, tile, out);
      }
    }
  }
}

struct GroupedInt8Tiles {
  using Sum = float;
  // Rows that share a pass over a block; their sums (32 KiB) stay in L2.
  static constexpr std::size_t kRows = 256;

  static void run(const MatrixTraits& traits, const char* rows, std::size_t stride, std::size_t m, const char* block,
                  std::size_t block_bytes, std::size_t k_padded, Sum* sums) {
    clear(sums, m);
    const GroupWalk walk(traits, rows, stride, block, block_bytes, k_padded);
    const RowTiles cut(m);
    configure_tiles(cut.rows, walk.segments().inputs);
    multiply_by_tiles(walk, 0, walk.from(0), walk.count(), cut, sums);
    release_tiles();
  }
};

struct Int4Tiles {
  using Sum = float;
  static constexpr std::size_t kRows = GroupedInt8Tiles::kRows;
  // Inputs whose weights are unpacked together: 16 KiB of bytes.
  static constexpr std::size_t kInputs = 512;

  static void run(const MatrixTraits& traits, const char* rows, std::size_t stride, std::size_t m, const char* block,
                  std::size_t block_bytes, std::size_t k_padded, Sum* sums) {
    clear(sums, m);
    std::uint8_t table[16];
    for (unsigned code = 0; code < 16; ++code) {
      table[code] = static_cast<std::uint8_t>(nibble_value(traits.levels, code));
    }
    const LookedUp codes{load_table(table)};
    const GroupWalk walk(traits, rows, stride, block, block_bytes, k_padded);
    const RowTiles cut(m);
    alignas(64) char bytes[kInputs * kBlockChannels + kInputs / 16 * 2 * 4 * kBlockChannels];
    configure_tiles(cut.rows, walk.segments().inputs);
    const std::size_t chunk = kInputs / traits.group;
    for (std::size_t g = 0; g < walk.count(); g += chunk) {
      const std::size_t count = walk.count() - g < chunk ? walk.count() - g : chunk;
      multiply_by_tiles(walk, g, unpack(codes, walk.from(g), count, bytes), count, cut, sums);
    }
    release_tiles();
  }
};
