// Where a grouped matrix's codes and scales lie, as text for an anonymous namespace: the packer and every tier read it.
//
// A block of 32 channels is a sequence of groups of inputs, each: the left panel's rows, the right panel's, 32 scales,
// and 32 minimums where the matrix has them. A panel row is 64 bytes: of INT8_GROUPED 16 channels x 4 inputs, of INT4
// 16 channels x 8 inputs, the first 4 in the low halves of a channel's 4 bytes and the next 4 in the high halves.

// Codes of FP4 e2m1 (OCP Microscaling Formats 1.0, 5.3.3) to twice their values.
constexpr std::int8_t kE2m1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Ours for weights that come as floats: closer where a normal distribution is denser. Found by descent on the error of
// normal and Student-t weights in groups of 32; within 64 of each other, so that 4 products of them with 8-bit
// activations fit a signed 16-bit sum.
constexpr std::int8_t kNormal4Values[16] = {-35, -29, -22, -17, -13, -9, -6, -3, 0, 3, 6, 9, 13, 17, 22, 28};

inline bool codes_are_looked_up(Levels levels) {
  return levels == Levels::kE2m1 || levels == Levels::kNormal4;
}

// What makes the values of 4-bit codes not negative.
inline int nibble_offset(Levels levels) {
  switch (levels) {
    case Levels::kInt4:
      return 8;
    case Levels::kE2m1:
      return 12;
    case Levels::kNormal4:
      return -kNormal4Values[0];
    default:
      return 0;
  }
}

inline int nibble_value(Levels levels, unsigned code) {
  if (levels == Levels::kE2m1) return kE2m1Values[code];
  if (levels == Levels::kNormal4) return kNormal4Values[code];
  return static_cast<int>(code) - nibble_offset(levels);
}

inline std::size_t group_panel_bytes(const MatrixTraits& traits) {
  return traits.group * kPanelChannels / (traits.format == Format::kInt4 ? 2 : 1);
}

inline std::size_t group_scales_bytes(const MatrixTraits& traits) {
  return kBlockChannels * (traits.scales == DType::kF32 ? 4 : 2);
}

inline std::size_t group_bytes(const MatrixTraits& traits) {
  return 2 * group_panel_bytes(traits) + (traits.minimums ? 2 : 1) * group_scales_bytes(traits);
}

// ---- encoded activations: 8-bit values, then for each segment of inputs its scale, and where its sums of products
// start, then for each group what the minimums are multiplied by.

// Inputs of a row that share a scale: 32 keep a model's outliers apart (a scale a token costs nine times the KL
// divergence), and never more than a group, so that sums of products end with a segment.
inline std::size_t segment_inputs(const MatrixTraits& traits) {
  return traits.group < 32 ? traits.group : 32;
}

struct GroupedRow {
  std::size_t scales;    // offsets in bytes
  std::size_t starts;    // int32
  std::size_t minimums;  // fp32
  std::size_t bytes;
};

inline GroupedRow grouped_row(const MatrixTraits& traits, std::size_t k_padded) {
  const std::size_t segments = k_padded / segment_inputs(traits);
  GroupedRow row;
  row.scales = k_padded;
  row.starts = row.scales + 4 * segments;
  row.minimums = row.starts + 4 * segments;
  const std::size_t lines = (row.minimums + (traits.minimums ? 4 * (k_padded / traits.group) : 0) + 63) / 64;
  row.bytes = 64 * (lines | 1);  // an odd number of lines: rows a power of two apart would crowd into few cache sets
  return row;
}
