#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#  include <nmmintrin.h>
#  define LS_CRC_X86 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#  include <arm_acle.h>
#  define LS_CRC_ARM 1
#endif

namespace ls {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78; // reflected
constexpr size_t   kSlices = 8;              // bytes a step of the table form

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
    Tables t{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) {
            crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
        }
        t[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; ++i) {
        for (size_t s = 1; s < kSlices; ++s) {
            t[s][i] = t[s - 1][i] >> 8 ^ t[0][t[s - 1][i] & 255];
        }
    }
    return t;
}

constexpr Tables tables = make_tables();

uint32_t update_portable(uint32_t crc, const uint8_t * p, size_t n) {
    for (; n >= kSlices; p += kSlices, n -= kSlices) {
        // little-endian order of bytes, whatever the machine's
        crc ^= uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
        crc = tables[7][crc & 255] ^ tables[6][crc >> 8 & 255] ^ tables[5][crc >> 16 & 255] ^ tables[4][crc >> 24] ^
            tables[3][p[4]] ^ tables[2][p[5]] ^ tables[1][p[6]] ^ tables[0][p[7]];
    }
    for (; n > 0; ++p, --n) {
        crc = crc >> 8 ^ tables[0][(crc ^ *p) & 255];
    }
    return crc;
}

#if defined(LS_CRC_X86)
__attribute__((target("sse4.2"))) uint32_t update_hardware(uint32_t crc, const uint8_t * p, size_t n) {
    uint64_t wide = crc;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = uint32_t(wide);
    for (; n > 0; ++p, --n) {
        crc = _mm_crc32_u8(crc, *p);
    }
    return crc;
}

bool have_hardware() {
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(LS_CRC_ARM)
uint32_t update_hardware(uint32_t crc, const uint8_t * p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        crc = __crc32cd(crc, word);
    }
    for (; n > 0; ++p, --n) {
        crc = __crc32cb(crc, *p);
    }
    return crc;
}

bool have_hardware() {
    return true;
}
#else
uint32_t update_hardware(uint32_t crc, const uint8_t * p, size_t n) {
    return update_portable(crc, p, n);
}

bool have_hardware() {
    return false;
}
#endif

} // namespace

uint32_t crc32c_portable(const void * data, size_t n) {
    return ~update_portable(~0u, static_cast<const uint8_t *>(data), n);
}

uint32_t crc32c(const void * data, size_t n, uint32_t before) {
    static const bool hardware = have_hardware();
    const auto * p = static_cast<const uint8_t *>(data);
    return ~(hardware ? update_hardware(~before, p, n) : update_portable(~before, p, n));
}

} // namespace ls
