// Activations for multiplying in 16 bits, as text for a tier's anonymous namespace: needs AVX2.
//
// Weights are widened by shifting the bytes of each 32-bit lane apart (no shuffle): inputs 0 and 2 of every four in one
// register, 1 and 3 in another. A widened row has the same order: of every four inputs first 0 and 2, then 1 and 3, 16
// bits each.

// wide may begin at or before narrow, as long as it ends where narrow ends.
inline void widen_row(const char* narrow, std::size_t k_padded, char* wide) {
  for (std::size_t i = 0; i < k_padded; i += 32) {
    const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow + i));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), odd = _mm256_srai_epi16(q, 8);
    const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + 2 * i), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + 2 * i + 32), _mm256_permute2x128_si256(low, high, 0x31));
  }
}
