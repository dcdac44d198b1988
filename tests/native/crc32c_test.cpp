// CRC-32C against published values, and the two forms against each other at every length and alignment.
#include "check.h"

#include "crc32c.h"
#include "leanstream.h"

#include <cstring>
#include <numeric>
#include <vector>

using namespace ls;

TEST(published_values) { // RFC 3720, B.4
    CHECK_EQ(crc32c("123456789", 9), 0xe3069283u);
    CHECK_EQ(crc32c("", 0), 0u);
    uint8_t bytes[32] = {};
    CHECK_EQ(crc32c(bytes, 32), 0x8a9136aau);
    memset(bytes, 0xff, 32);
    CHECK_EQ(crc32c(bytes, 32), 0x62a8ab43u);
    std::iota(bytes, bytes + 32, uint8_t(0));
    CHECK_EQ(crc32c(bytes, 32), 0x46dd794eu);
}

TEST(both_forms_agree) {
    std::vector<uint8_t> data(300);
    uint32_t state = 1;
    for (uint8_t & b : data) {
        state = state * 1664525 + 1013904223;
        b = uint8_t(state >> 24);
    }
    for (size_t start = 0; start < 9; ++start) {
        for (size_t n = 0; n + start <= data.size(); ++n) {
            REQUIRE(crc32c(&data[start], n) == crc32c_portable(&data[start], n));
        }
    }
}

TEST(rows) {
    const char * text = "123456789123456789";
    uint32_t out[2] = {};
    CHECK_EQ(ls_crc32c_rows(text, 2, 9, out), LS_OK);
    CHECK_EQ(out[0], 0xe3069283u);
    CHECK_EQ(out[1], 0xe3069283u);
    CHECK_EQ(ls_crc32c_rows(text, 2, 9, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_crc32c_rows(nullptr, 2, 9, out), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_crc32c_rows(nullptr, 0, 9, out), LS_OK);
}
