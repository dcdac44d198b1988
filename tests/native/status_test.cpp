// Errors and the JSON writer.
#include "check.h"

#include "json.h"
#include "status.h"

#include <cmath>
#include <cstring>

using namespace ls;

TEST(error_carries_its_fields) {
    const Error e = Error(LS_ERR_READ, "cause; remedy").path("/a/b").offset(7).sizes(1, 2).sys(5);
    CHECK_EQ(e.info.status, LS_ERR_READ);
    CHECK_EQ(std::string(e.what()), "cause; remedy");
    CHECK_EQ(std::string(e.info.path), "/a/b");
    CHECK_EQ(e.info.offset_bytes, 7);
    CHECK_EQ(e.info.used_bytes, 1);
    CHECK_EQ(e.info.limit_bytes, 2);
    CHECK_EQ(e.info.sys_errno, 5);
}

TEST(long_texts_are_cut_and_terminated) {
    const std::string text(5000, 'x');
    const Error e = Error(LS_ERR_READ, text).path(text);
    CHECK_EQ(strlen(e.info.message), sizeof(e.info.message) - 1);
    CHECK_EQ(strlen(e.info.path), sizeof(e.info.path) - 1);
    CHECK_EQ(strlen(Error(LS_OK, "").info.message), 0);
}

TEST(formatting) {
    CHECK_EQ(format("%s %d", "a", 3), "a 3");
    CHECK_EQ(format("%s", std::string(3000, 'y').c_str()).size(), 3000);
    CHECK_EQ(format("%s", ""), "");
    CHECK_EQ(human_bytes(0), "0 B");
    CHECK_EQ(human_bytes(1023), "1023 B");
    CHECK_EQ(human_bytes(1536), "1.5 KiB");
    CHECK_EQ(human_bytes(3u << 20), "3.0 MiB");
    CHECK_EQ(human_bytes(5ull << 29), "2.50 GiB");
}

TEST(json_nests_and_separates) {
    Json j;
    {
        auto root = j.object();
        j.key("a").number(1u);
        j.key("b");
        {
            auto list = j.array();
            j.number(int64_t(-2));
            { auto inner = j.object(); }
            { auto inner = j.array(); }
            j.string("x");
        }
        j.key("c").boolean(true);
        j.key(std::string("d")).raw("null");
        j.key("e").number(uint64_t(18446744073709551615ull));
        j.key("f").number(0.5);
    }
    CHECK_EQ(j.text, "{\"a\":1,\"b\":[-2,{},[],\"x\"],\"c\":true,\"d\":null,\"e\":18446744073709551615,\"f\":0.5}");
}

TEST(json_escapes) {
    Json j;
    j.string(std::string("q\" b\\ n\n t\t z\0 e\x1f u\xc3\xa9", 21));
    CHECK_EQ(j.text, "\"q\\\" b\\\\ n\\u000a t\\u0009 z\\u0000 e\\u001f u\xc3\xa9\"");
}

TEST(json_has_no_word_for_numbers_that_are_none) {
    for (const double v : {double(NAN), double(INFINITY), -double(INFINITY)}) {
        Json j;
        j.number(v);
        CHECK_EQ(j.text, "null");
    }
}
