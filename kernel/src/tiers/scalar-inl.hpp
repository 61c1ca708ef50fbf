// Scalar number conversions, as text for a tier's anonymous namespace (see elementwise-inl.hpp). Same bits as the
// vector forms.

inline float bits_to_float(std::uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline std::uint32_t float_to_bits(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float bf16_to_float(std::uint16_t x) {
  return bits_to_float(static_cast<std::uint32_t>(x) << 16);
}

// Round to nearest even; a NaN keeps its sign and becomes quiet instead of rounding into an infinity.
inline std::uint16_t float_to_bf16(float x) {
  const std::uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// FP8 e4m3 (OCP 8-bit Floating Point 1.0): 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, 0x7f is NaN.
inline float e4m3_to_float(std::uint8_t x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x & 0x80u) << 24;
  const std::uint32_t magnitude = x & 0x7fu;
  if (magnitude == 0x7fu) return bits_to_float(sign | 0x7fc00000u);
  if (magnitude >= 8u) return bits_to_float(sign | ((magnitude << 20) + (120u << 23)));
  const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * bits_to_float((127u - 9u) << 23);
  return bits_to_float(sign | float_to_bits(subnormal));
}

// Round to nearest even; beyond the largest number, 448, that number. A NaN stays one.
inline std::uint8_t float_to_e4m3(float x) {
  const std::uint32_t bits = float_to_bits(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<std::uint8_t>(sign | 0x7eu);  // 448 and above
  if (magnitude < 0x3c800000u) {
    // Below 2^-6 the result is subnormal: adding 2^14 lines its units (2^-9) up with fp32's last bit, rounding to
    // nearest even.
    const float aligned = bits_to_float(magnitude) + 16384.0f;
    return static_cast<std::uint8_t>(sign | (float_to_bits(aligned) - 0x46800000u));
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | ((rounded - (120u << 23)) >> 20));
}

// IEEE binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits.
inline float f16_to_float(std::uint16_t x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x & 0x8000u) << 16;
  const std::uint32_t magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u)
    return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | (magnitude > 0x7c00u ? 0x400000u : 0u));
  // As a fp32 the shifted bits are the value times 2^-112, subnormals included; one exact multiplication puts it right.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float((127u + 112u) << 23);
  return bits_to_float(sign | float_to_bits(scaled));
}

inline std::uint16_t float_to_f16(float x) {
  const std::uint32_t bits = float_to_bits(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 lines its units (2^-24) up with fp32's last bit, rounding to
    // nearest even.
    const float aligned = bits_to_float(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (float_to_bits(aligned) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
