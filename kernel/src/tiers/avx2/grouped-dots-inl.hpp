// Products of grouped weights on AVX2 without VNNI, as text for a tier's anonymous namespace: vpmaddubsw adds two u8·s8
// products in 16 bits, which must not saturate at 32767.

// Codes 0…15: a segment's 16 products of at most 15·127 a lane make 30480.
struct NibbleDot {
  using Word = I;
  using Sums = I;
  // 6 rows x 2 registers = 12 sums; two weights, a broadcast and a product fill the 16 registers.
  static constexpr int kRows = 6;
  static Word prepare(I word) { return word; }
  static Sums begin(I) { return zero_int(); }
  static void step(Sums& sum, Word w, I x) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }
  static void fold(Sums&) {}
  static I finish(Sums sum, I start) { return _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), start); }
};

// Values 0…64: 4 products of at most 64·127 make 32512, so they are widened after every 8 inputs.
struct LookedUpDot {
  using Word = I;
  struct Sums {
    I narrow, wide;
  };
  static constexpr int kRows = 3;  // twice the registers for sums
  static Word prepare(I word) { return word; }
  static Sums begin(I start) { return {zero_int(), start}; }
  static void step(Sums& sum, Word w, I x) { sum.narrow = _mm256_add_epi16(sum.narrow, _mm256_maddubs_epi16(w, x)); }
  static void fold(Sums& sum) {
    sum.wide = _mm256_add_epi32(sum.wide, _mm256_madd_epi16(sum.narrow, _mm256_set1_epi16(1)));
    sum.narrow = zero_int();
  }
  static I finish(const Sums& sum, I) { return sum.wide; }
};

// |w| as u8 times x with w's sign: two products of at most 128·127 make 32512.
struct Int8Dot {
  struct Word {
    I magnitude, sign;
  };
  using Sums = I;
  static constexpr int kRows = 4;  // a word takes two registers
  static Word prepare(I word) { return {_mm256_abs_epi8(word), word}; }
  static Sums begin(I) { return zero_int(); }
  static void step(Sums& sum, const Word& w, I x) {
    const I pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(x, w.sign));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static void fold(Sums&) {}
  static I finish(Sums sum, I) { return sum; }
};
