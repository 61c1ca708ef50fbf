// Rows of bf16, two bytes an input, as text for a tier's anonymous namespace.

std::size_t bf16_row_bytes(const MatrixTraits&, std::size_t k_padded) {
  return 2 * k_padded;
}

void encode_bf16_row(const void* x, DType dtype, std::size_t k, std::size_t k_padded, const MatrixTraits&, void* row,
                     float*, float* work) {
  load_row(x, dtype, k, k_padded, work);
  for (std::size_t i = 0; i < k_padded; i += kWidth) store_bf16(static_cast<std::uint16_t*>(row) + i, load(work + i));
}
