// Products of grouped weights on AVX-512 without VNNI, as text for a tier's anonymous namespace: as on AVX2
// (avx2/grouped-dots-inl.hpp), with more registers.

struct NibbleDot {
  using Word = I;
  using Sums = I;
  static constexpr int kRows = 8;
  static Word prepare(I word) { return word; }
  static Sums begin(I) { return zero_int(); }
  static void step(Sums& sum, Word w, I x) { sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x)); }
  static void fold(Sums&) {}
  static I finish(Sums sum, I start) { return _mm512_add_epi32(_mm512_madd_epi16(sum, _mm512_set1_epi16(1)), start); }
};

struct LookedUpDot {
  using Word = I;
  struct Sums {
    I narrow, wide;
  };
  static constexpr int kRows = 6;  // 24 registers for sums
  static Word prepare(I word) { return word; }
  static Sums begin(I start) { return {zero_int(), start}; }
  static void step(Sums& sum, Word w, I x) { sum.narrow = _mm512_add_epi16(sum.narrow, _mm512_maddubs_epi16(w, x)); }
  static void fold(Sums& sum) {
    sum.wide = _mm512_add_epi32(sum.wide, _mm512_madd_epi16(sum.narrow, _mm512_set1_epi16(1)));
    sum.narrow = zero_int();
  }
  static I finish(const Sums& sum, I) { return sum.wide; }
};

struct Int8Dot {
  struct Word {
    I magnitude;
    __mmask64 negative;
  };
  using Sums = I;
  static constexpr int kRows = 8;
  static Word prepare(I word) { return {_mm512_abs_epi8(word), _mm512_movepi8_mask(word)}; }
  static Sums begin(I) { return zero_int(); }
  static void step(Sums& sum, const Word& w, I x) {
    const I signed_x = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w.magnitude, signed_x), _mm512_set1_epi16(1)));
  }
  static void fold(Sums&) {}
  static I finish(Sums sum, I) { return sum; }
};
