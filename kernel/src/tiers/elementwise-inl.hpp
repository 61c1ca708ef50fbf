// The numerics that every tier shares, as text: included inside a tier's anonymous namespace after its vector type, so
// that each tier compiles its own copy with internal linkage, and INT8 bits agree because the operations are the same
// ones.
//
// The including file defines: kWidth; F (fp32 vector), I (int32 vector) and the functions used below. Rules for them:
// one IEEE fp32 operation each, max_of(a, b) = a > b ? a : b, min_of(a, b) = a < b ? a : b (lane-wise, so a NaN in a
// yields b), round_to_int rounds to nearest even.

// ---- loading and storing rows of any length
// ----------------------------------------------------------------------------

inline float scalar_to_float(const void* x, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(x)[i];
    case DType::kBf16:
      return bf16_to_float(static_cast<const std::uint16_t*>(x)[i]);
    case DType::kF16:
      return f16_to_float(static_cast<const std::uint16_t*>(x)[i]);
  }
  return 0.0f;
}

inline void load_row(const void* x, DType dtype, std::size_t n, std::size_t n_padded, float* out) {
  std::size_t i = 0;
  switch (dtype) {
    case DType::kF32:
      for (; i + kWidth <= n; i += kWidth) store(out + i, load(static_cast<const float*>(x) + i));
      break;
    case DType::kBf16:
      for (; i + kWidth <= n; i += kWidth) store(out + i, load_bf16(static_cast<const std::uint16_t*>(x) + i));
      break;
    case DType::kF16:
      for (; i + kWidth <= n; i += kWidth) store(out + i, load_f16(static_cast<const std::uint16_t*>(x) + i));
      break;
  }
  for (; i < n; ++i) out[i] = scalar_to_float(x, dtype, i);
  for (; i < n_padded; ++i) out[i] = 0.0f;
}

inline void store_vector(F v, void* y, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kF32:
      store(static_cast<float*>(y) + i, v);
      break;
    case DType::kBf16:
      store_bf16(static_cast<std::uint16_t*>(y) + i, v);
      break;
    case DType::kF16:
      store_f16(static_cast<std::uint16_t*>(y) + i, v);
      break;
  }
}

inline void store_scalar(float v, void* y, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(y)[i] = v;
      break;
    case DType::kBf16:
      static_cast<std::uint16_t*>(y)[i] = float_to_bf16(v);
      break;
    case DType::kF16:
      static_cast<std::uint16_t*>(y)[i] = float_to_f16(v);
      break;
  }
}

// ---- block Hadamard rotation
// -------------------------------------------------------------------------------------------

// Stages h = 1, 2, 4, … : (a, b) -> (a + b, a - b) for elements h apart. Stages below the vector width run inside a
// register.
inline void rotate_block(float* x, std::size_t block) {
  for (std::size_t i = 0; i < block; i += kWidth) store(x + i, butterflies_in_register(load(x + i)));
  std::size_t h = kWidth;
  // Two stages a pass: half the loads and stores; each element still sees its additions in the same order.
  for (; h * 2 < block; h *= 4) {
    for (std::size_t base = 0; base < block; base += 4 * h) {
      for (std::size_t i = base; i < base + h; i += kWidth) {
        const F a = load(x + i), b = load(x + i + h), c = load(x + i + 2 * h), d = load(x + i + 3 * h);
        const F ab = add(a, b), a_b = sub(a, b), cd = add(c, d), c_d = sub(c, d);
        store(x + i, add(ab, cd));
        store(x + i + h, add(a_b, c_d));
        store(x + i + 2 * h, sub(ab, cd));
        store(x + i + 3 * h, sub(a_b, c_d));
      }
    }
  }
  for (; h < block; h *= 2) {
    for (std::size_t base = 0; base < block; base += 2 * h) {
      for (std::size_t i = base; i < base + h; i += kWidth) {
        const F a = load(x + i), b = load(x + i + h);
        store(x + i, add(a, b));
        store(x + i + h, sub(a, b));
      }
    }
  }
}

void rotate(float* x, std::size_t n, std::size_t rotation) {
  for (std::size_t i = 0; i + rotation <= n; i += rotation) rotate_block(x + i, rotation);
}

// ---- symmetric INT8 quantisation
// ---------------------------------------------------------------------------------------

// Below this the reciprocal 127/max would overflow fp32; such a row is zero for any model that also holds ordinary
// numbers.
constexpr float kSmallestMax = 1e-35f;

float quantize(const float* x, std::size_t n, std::int8_t* q) {
  // |x| compared as integers orders NaN above infinity above every number, so one maximum finds all three cases.
  I most = zero_int();
  for (std::size_t i = 0; i < n; i += kWidth) most = max_int(most, abs_bits(load(x + i)));
  const std::uint32_t bits = largest_lane(most);
  const float max = bits_to_float(bits);
  const bool finite = bits < 0x7f800000u;
  if (!finite || max < kSmallestMax) {
    for (std::size_t i = 0; i < n; ++i) q[i] = 0;
    return finite ? 0.0f : bits_to_float(0x7fc00000u);
  }
  const F inverse = set1(127.0f / max);
  for (std::size_t i = 0; i < n; i += kWidth) store_int8(q + i, round_to_int(mul(load(x + i), inverse)));
  return max / 127.0f;
}

void encode_int8_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits& traits,
                     void* row, float* scale, float* work) {
  load_row(x, dtype, k, k_padded, work);
  if (traits.rotation != 0) rotate(work, k_padded, traits.rotation);
  *scale = quantize(work, k_padded, static_cast<std::int8_t*>(row));
}

inline std::size_t int8_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return k_padded;
}

// ---- gate formulas
// -----------------------------------------------------------------------------------------------------

// exp(x) for the sigmoid: x = n·ln2 + r, |r| <= ln2/2, Taylor to r^7 (the rest is below 0.35^8/8! = 5e-9), times 2^n.
// The bounds keep 2^n a normal number. Beyond them the sigmoid is held: at 1 to fp32, or near 6e-39 instead of 0, which
// only a gate below -1e35 could show.
inline F exp_of(F x) {
  x = min_of(max_of(x, set1(-87.0f)), set1(88.0f));
  const I n = round_to_int(mul(x, set1(1.44269504f)));  // 1/ln2
  const F nf = to_float(n);
  // ln2 in two parts (355/512 and the rest): the first has 9 significant bits, so n times it is exact.
  F r = sub(x, mul(nf, set1(0.693359375f)));
  r = sub(r, mul(nf, set1(-2.12194440e-4f)));
  F p = set1(1.0f / 5040);
  p = add(mul(p, r), set1(1.0f / 720));
  p = add(mul(p, r), set1(1.0f / 120));
  p = add(mul(p, r), set1(1.0f / 24));
  p = add(mul(p, r), set1(1.0f / 6));
  p = add(mul(p, r), set1(0.5f));
  p = add(mul(p, r), set1(1.0f));
  p = add(mul(p, r), set1(1.0f));
  return mul(p, pow2(n));
}

// x·sigmoid(alpha·x); exp of the negated argument, so large positive x gives x and large negative x gives about 0.
inline F silu(F x, F minus_alpha) {
  return div(x, add(set1(1.0f), exp_of(mul(x, minus_alpha))));
}

// x·Phi(x), Phi the normal distribution: erfc by Abramowitz & Stegun 7.1.26 (absolute error below 1.5e-7), on the side
// where it is small, so that nothing cancels.
inline F gelu(F x) {
  const F magnitude = max_of(x, sub(set1(0.0f), x));
  const F z = mul(magnitude, set1(0.70710678f));
  const F t = div(set1(1.0f), add(set1(1.0f), mul(z, set1(0.3275911f))));
  F p = set1(1.061405429f);
  p = add(mul(p, t), set1(-1.453152027f));
  p = add(mul(p, t), set1(1.421413741f));
  p = add(mul(p, t), set1(-0.284496736f));
  p = add(mul(p, t), set1(0.254829592f));
  const F erfc = mul(mul(p, t), exp_of(sub(set1(0.0f), mul(z, z))));
  const F small = mul(mul(set1(0.5f), magnitude), erfc);  // |x|·Phi(-|x|)
  // max(x, 0) - |x|·Phi(-|x|); a NaN comes back through max_of's second operand.
  return sub(max_of(set1(0.0f), x), small);
}

// x·sigmoid(2·sqrt(2/pi)·(x + 0.044715·x^3)), which is the tanh form: (1 + tanh(y))/2 = sigmoid(2y).
inline F gelu_tanh(F x) {
  const F cube = mul(mul(x, x), x);
  const F inner = mul(add(x, mul(cube, set1(0.044715f))), set1(-1.59576912f));
  return div(x, add(set1(1.0f), exp_of(inner)));
}

// A NaN must survive the clamp: comparing with the value second returns it.
inline F clamp_above(F x, F limit) {
  return min_of(limit, x);
}
inline F clamp_below(F x, F limit) {
  return max_of(limit, x);
}

inline F activate(F x, const Gate& gate) {
  switch (gate.activation) {
    case Activation::kGelu:
      return gelu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kRelu:
      return clamp_below(x, set1(0.0f));
    case Activation::kReluSquared: {
      const F positive = clamp_below(x, set1(0.0f));
      return mul(positive, positive);
    }
    case Activation::kSilu:
      break;
  }
  return silu(x, set1(-gate.alpha));
}

inline F gated(F g, F u, const Gate& gate) {
  const bool clamped = gate.limit > 0.0f;
  if (clamped) {
    if (!gate.limit_after) g = clamp_above(g, set1(gate.limit));
    u = clamp_below(clamp_above(u, set1(gate.limit)), set1(-gate.limit));
  }
  F a = activate(g, gate);
  if (clamped && gate.limit_after) a = clamp_above(a, set1(gate.limit));
  return mul(a, gate.up_offset == 0.0f ? u : add(u, set1(gate.up_offset)));
}

// ---- epilogues: a micro kernel leaves `rows` x 32 sums, left panel first
// -------------------------------------------------

inline void scale_sums(const std::int32_t* sums, const float* channel_scales, float row_scale, float* out) {
  const F s = set1(row_scale);
  for (std::size_t i = 0; i < kBlockChannels; i += kWidth) {
    store(out + i, mul(mul(to_float(load_int(sums + i)), load(channel_scales + i)), s));
  }
}

inline void add_biases(const float* biases, float* values) {
  for (std::size_t i = 0; i < kBlockChannels; i += kWidth) store(values + i, add(load(values + i), load(biases + i)));
}

// 16 activated channels of a gated block, or all 32 of one without a gate.
inline void store_activated(const float* left_right, const Gate& gate, float* out) {
  if (gate.gated) {
    for (std::size_t i = 0; i < kPanelChannels; i += kWidth) {
      store(out + i, gated(load(left_right + i), load(left_right + kPanelChannels + i), gate));
    }
  } else {
    for (std::size_t i = 0; i < kBlockChannels; i += kWidth) store(out + i, activate(load(left_right + i), gate));
  }
}

// ---- the weighted sum over a token's experts
// ----------------------------------------------------------------------------

void combine(const CombineCall& call) {
  std::size_t i = 0;
  for (; i + kWidth <= call.n; i += kWidth) {
    F sum = set1(0.0f);
    for (std::size_t s = 0; s < call.slots; ++s) {
      if (call.rows[s] != nullptr) sum = add(sum, mul(load(call.rows[s] + i), set1(call.weights[s])));
    }
    store_vector(sum, call.y, call.dtype, i);
  }
  for (; i < call.n; ++i) {
    float sum = 0.0f;
    for (std::size_t s = 0; s < call.slots; ++s) {
      if (call.rows[s] != nullptr) sum += call.rows[s][i] * call.weights[s];
    }
    store_scalar(sum, call.y, call.dtype, i);
  }
}
