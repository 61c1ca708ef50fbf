// Scales of grouped weights in the dtype a matrix keeps them in, as text for an anonymous namespace (after
// scalar-inl.hpp).

// The nearest number of the dtype.
inline float narrow_scale(float scale, DType dtype) {
  if (dtype == DType::kBf16) return bf16_to_float(float_to_bf16(scale));
  if (dtype == DType::kF16) return f16_to_float(float_to_f16(scale));
  return scale;
}

inline float read_scale(const void* scales, DType dtype, std::size_t channel) {
  if (dtype == DType::kF32) return static_cast<const float*>(scales)[channel];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(scales)[channel];
  return dtype == DType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

inline void write_scale(void* scales, DType dtype, std::size_t channel, float scale) {
  if (dtype == DType::kF32) {
    static_cast<float*>(scales)[channel] = scale;
  } else {
    static_cast<std::uint16_t*>(scales)[channel] = dtype == DType::kBf16 ? float_to_bf16(scale) : float_to_f16(scale);
  }
}
