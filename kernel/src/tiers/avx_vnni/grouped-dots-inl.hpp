// Products of grouped weights by vpdpbusd on 256 bits, as text for a tier's anonymous namespace: weights are the
// unsigned side, activations the signed one, and sums start at minus what the weights' offset adds.

struct NibbleDot {
  using Word = I;
  using Sums = I;
  // 6 rows x 2 registers = 12 sums; two weights and a broadcast leave one register free.
  static constexpr int kRows = 6;
  static Word prepare(I word) { return word; }
  static Sums begin(I start) { return start; }
  static void step(Sums& sum, Word w, I x) { accumulate(sum, w, x); }
  static void fold(Sums&) {}
  static I finish(Sums sum, I) { return sum; }
};

using LookedUpDot = NibbleDot;

// -128…127 to 0…255.
inline int int8_offset(Levels) {
  return 128;
}
struct Int8Dot : NibbleDot {
  static Word prepare(I word) { return _mm256_xor_si256(word, _mm256_set1_epi8(-128)); }
};
