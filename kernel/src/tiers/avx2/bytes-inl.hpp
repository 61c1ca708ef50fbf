// Bytes and halves of bytes in 256-bit registers, as text for a tier's anonymous namespace (after vector-inl.hpp).

inline I load_bytes(const char* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}
inline void store_bytes(char* p, I v) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), v);
}
inline I low_nibbles(I v) {
  return _mm256_and_si256(v, _mm256_set1_epi8(0x0f));
}
inline I high_nibbles(I v) {
  return low_nibbles(_mm256_srli_epi16(v, 4));
}
inline I load_table(const std::uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
inline I look_up(I table, I codes) {
  return _mm256_shuffle_epi8(table, codes);
}
inline I broadcast_bytes(const char* p) {
  std::int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
