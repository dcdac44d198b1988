// A test program in one header. TEST(name) { CHECK(...); } registers a test; check_main.cpp runs all of them, or those named
// on the command line. Exit code: 0, 1 = a check failed, 77 = nothing ran and something was skipped.
#pragma once

#include "status.h"

#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Case {
    const char * name;
    void (*run)();
};

struct Stop {};                     // thrown by REQUIRE: the rest of the test makes no sense
struct Skip { std::string reason; }; // thrown by SKIP

std::vector<Case> & cases();
bool add(const char * name, void (*run)());
// Prints and counts; from any thread.
void failed(const char * file, int line, const std::string & what);

// What the body threw; status LS_OK if nothing. An exception of another type fails the test.
inline ls_error error_of(const std::function<void()> & body) {
    try {
        body();
    } catch (const ls::Error & e) {
        return e.info;
    }
    return {};
}

template <typename T> std::string show(const T & value) {
    std::ostringstream out;
    if constexpr (std::is_enum_v<T> || std::is_same_v<T, uint8_t> || std::is_same_v<T, int8_t>) {
        out << int(value);
    } else {
        out << value;
    }
    return out.str();
}

template <typename T> std::string show(const std::vector<T> & values) {
    std::string out = "[";
    for (const auto & v : values) {
        out += (out.size() > 1 ? ", " : "") + show(v);
    }
    return out + "]";
}

template <typename A, typename B> bool same(const A & a, const B & b) {
    if constexpr ((std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>)) {
        const auto x = int64_t(a), y = int64_t(b); // signed and unsigned compare by value below 2^63
        return x == y;
    } else {
        return a == b;
    }
}

template <typename A, typename B> void equal(const A & a, const B & b, const char * text, const char * file, int line) {
    if (!same(a, b)) {
        failed(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
    }
}

} // namespace check

#define TEST(name)                                                      \
    static void test_##name();                                          \
    [[maybe_unused]] static const bool added_##name = check::add(#name, test_##name); \
    static void test_##name()

#define CHECK(condition)                                                \
    do {                                                                \
        if (!(condition)) {                                             \
            check::failed(__FILE__, __LINE__, #condition);              \
        }                                                               \
    } while (0)

// as CHECK, with both values in the message
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

#define REQUIRE(condition)                                              \
    do {                                                                \
        if (!(condition)) {                                             \
            check::failed(__FILE__, __LINE__, #condition);              \
            throw check::Stop();                                        \
        }                                                               \
    } while (0)

#define SKIP(reason) throw check::Skip{reason}
