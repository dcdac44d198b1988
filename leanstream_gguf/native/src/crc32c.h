// CRC-32C (Castagnoli), the checksum of clusters and expert records in lean files: docs/lean_format.md, section 4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ls {

// Of n bytes; with the processor's instruction where it has one (x86-64 with SSE 4.2, ARMv8 with CRC), else by table.
// before: the checksum of what came before, where data comes in pieces.
uint32_t crc32c(const void * data, size_t n, uint32_t before = 0);

// By table on every machine: the reference of the above.
uint32_t crc32c_portable(const void * data, size_t n);

} // namespace ls
