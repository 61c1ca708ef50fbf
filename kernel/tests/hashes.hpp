// Stored hashes of the sweep's outputs, made by the generic tier; kernel/tests/hashes.txt at compile time.
#pragma once

namespace kt::check {

// "16 hexadecimal digits, two spaces, the case's name" a line, in the sweep's order; lines with # are comments.
const char* stored_hashes();

bool write_hashes(const char* path);

}  // namespace kt::check
