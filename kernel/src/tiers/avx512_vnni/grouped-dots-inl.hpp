// Products of grouped weights by vpdpbusd on 512 bits, as text for a tier's anonymous namespace: weights are the
// unsigned side, activations the signed one, and sums start at minus what the weights' offset adds.

struct NibbleDot {
  using Word = I;
  using Sums = I;
  // 8 rows x 2 registers = 16 sums, more than vpdpbusd's latency of 5 times two ports asks for.
  static constexpr int kRows = 8;
  static Word prepare(I word) { return word; }
  static Sums begin(I start) { return start; }
  // As an instruction: GCC else copies sums from register to register between steps.
  static void step(Sums& sum, Word w, I x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
  static void fold(Sums&) {}
  static I finish(Sums sum, I) { return sum; }
};

using LookedUpDot = NibbleDot;

// -128…127 to 0…255.
inline int int8_offset(Levels) {
  return 128;
}
struct Int8Dot : NibbleDot {
  static Word prepare(I word) { return _mm512_xor_si512(word, _mm512_set1_epi8(-128)); }
};
