// Activations for the u8 x s8 instructions, as text for a tier's anonymous namespace (after elementwise-inl.hpp).
//
// A row holds q + 128. Its products with the weights exceed the wanted ones by 128·(sum of the channel's weights),
// which is in the block's trailer: sums start at minus that.

void encode_offset_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits& traits,
                       void* row, float* scale, float* work) {
  encode_int8_row(x, dtype, k, k_padded, traits, row, scale, work);
  auto* bytes = static_cast<std::uint8_t*>(row);
  for (std::size_t i = 0; i < k_padded; ++i) bytes[i] ^= 0x80;  // -128…127 to 0…255
}

// The 32 channel sums of the block that ends at `end`.
inline const std::int32_t* channel_sums(const char* end) {
  return reinterpret_cast<const std::int32_t*>(end - kTrailerBytes / 2);
}
