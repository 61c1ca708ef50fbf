// Grouped weights one value at a time, as text for the generic tier's anonymous namespace: the order of operations that
// every tier repeats.

struct GroupedMicro {
  using Sum = float;
  // Rows that share one unpacking of the weights.
  static constexpr std::size_t kRows = 60;
  static constexpr std::size_t kMostInputs = 128;

  // values[k][channel] of one panel's group.
  static void unpack(const MatrixTraits& traits, const char* panel, std::int8_t (*values)[kPanelChannels]) {
    for (std::size_t k = 0; k < traits.group; ++k) {
      for (std::size_t c = 0; c < kPanelChannels; ++c) {
        if (traits.format == Format::kInt4) {
          const unsigned byte = static_cast<unsigned char>(panel[k / 8 * kRowBytes + 4 * c + k % 4]);
          values[k][c] = static_cast<std::int8_t>(nibble_value(traits.levels, k % 8 < 4 ? byte & 15 : byte >> 4));
        } else {
          values[k][c] = static_cast<std::int8_t>(panel[k / 4 * kRowBytes + 4 * c + k % 4]);
        }
      }
    }
  }

  static void unpack_scales(const MatrixTraits& traits, const char* source, float* scales) {
    for (std::size_t c = 0; c < kBlockChannels; ++c) scales[c] = scalar_to_float(source, traits.scales, c);
  }

  static void run(const MatrixTraits& traits, const char* rows, std::size_t row_stride, std::size_t m,
                  const char* block, std::size_t, std::size_t k_padded, Sum* sums) {
    const GroupedRow at = grouped_row(traits, k_padded);
    const std::size_t inputs = segment_inputs(traits);
    for (std::size_t i = 0; i < m * kBlockChannels; ++i) sums[i] = 0.0f;
    std::int8_t values[kMostInputs][kPanelChannels];
    float scales[kBlockChannels], minimums[kBlockChannels];
    for (std::size_t g = 0; g < k_padded / traits.group; ++g, block += group_bytes(traits)) {
      const char* behind = block + 2 * group_panel_bytes(traits);
      unpack_scales(traits, behind, scales);
      if (traits.minimums) unpack_scales(traits, behind + group_scales_bytes(traits), minimums);
      for (std::size_t panel = 0; panel < 2; ++panel) {
        unpack(traits, block + panel * group_panel_bytes(traits), values);
        const std::size_t first = panel * kPanelChannels;
        for (std::size_t r = 0; r < m; ++r) {
          const char* row = rows + r * row_stride;
          float* out = sums + r * kBlockChannels + first;
          for (std::size_t k = 0; k < traits.group; k += inputs) {
            const auto* x = reinterpret_cast<const std::int8_t*>(row) + g * traits.group + k;
            std::int32_t sum[kPanelChannels] = {};
            for (std::size_t i = 0; i < inputs; ++i) {
              for (std::size_t c = 0; c < kPanelChannels; ++c)
                sum[c] += std::int32_t{x[i]} * std::int32_t{values[k + i][c]};
            }
            const float scale = reinterpret_cast<const float*>(row + at.scales)[(g * traits.group + k) / inputs];
            for (std::size_t c = 0; c < kPanelChannels; ++c)
              out[c] += static_cast<float>(sum[c]) * scales[first + c] * scale;
          }
          if (!traits.minimums) continue;
          const float factor = reinterpret_cast<const float*>(row + at.minimums)[g];
          for (std::size_t c = 0; c < kPanelChannels; ++c) out[c] += minimums[first + c] * factor;
        }
      }
    }
  }
};
