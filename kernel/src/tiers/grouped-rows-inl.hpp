// Activations for grouped weights, as text for a tier's anonymous namespace (after elementwise-inl.hpp and
// grouped-layout-inl.hpp): symmetric INT8, a scale for each segment.

std::size_t grouped_row_bytes(const MatrixTraits& traits, std::size_t k_padded) {
  return grouped_row(traits, k_padded).bytes;
}

// kOffset(levels): what the tier's products add to every weight to make it unsigned. Sums start at minus what that adds
// to them. The tiers agree on everything else.
template <int (*kOffset)(Levels)>
void encode_grouped_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits& traits,
                        void* row, float* scale, float* work) {
  load_row(x, dtype, k, k_padded, work);
  if (traits.rotation != 0) rotate(work, k_padded, traits.rotation);
  const GroupedRow at = grouped_row(traits, k_padded);
  auto* q = static_cast<std::int8_t*>(row);
  auto* scales = reinterpret_cast<float*>(q + at.scales);
  auto* starts = reinterpret_cast<std::int32_t*>(q + at.starts);
  auto* minimums = reinterpret_cast<float*>(q + at.minimums);
  const std::size_t inputs = segment_inputs(traits), segments = k_padded / inputs;
  for (std::size_t s = 0; s < segments; ++s) {
    scales[s] = quantize(work + s * inputs, inputs, q + s * inputs);
    std::int32_t sum = 0;
    for (std::size_t i = s * inputs; i < (s + 1) * inputs; ++i) sum += q[i];
    starts[s] = sum;
  }
  if (traits.minimums) {
    const std::size_t each = traits.group / inputs;
    for (std::size_t g = 0; g < k_padded / traits.group; ++g) {
      float sum = 0.0f;
      for (std::size_t s = g * each; s < (g + 1) * each; ++s) sum += static_cast<float>(starts[s]) * scales[s];
      minimums[g] = sum;
    }
  }
  const std::int32_t offset = kOffset(traits.levels);
  for (std::size_t s = 0; s < segments; ++s) starts[s] *= -offset;
  *scale = 1.0f;
}

inline int no_offset(Levels) {
  return 0;
}
