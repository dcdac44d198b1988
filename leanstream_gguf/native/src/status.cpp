#include "status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ls {

static void copy_to(char * dst, size_t size, const std::string & src) {
    const size_t n = src.size() < size - 1 ? src.size() : size - 1;
    memcpy(dst, src.data(), n);
    dst[n] = 0;
}

Error & Error::path(const std::string & p) {
    copy_to(info.path, sizeof(info.path), p);
    return *this;
}

void Error::set_message(const std::string & m) {
    copy_to(info.message, sizeof(info.message), m);
}

std::string format(const char * fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    const int n = vsnprintf(nullptr, 0, fmt, args);
    va_end(args);
    std::string out(n > 0 ? n : 0, '\0');
    if (n > 0) {
        vsnprintf(&out[0], n + 1, fmt, again);
    }
    va_end(again);
    return out;
}

std::string human_bytes(uint64_t bytes) {
    if (bytes >= 1ull << 30) {
        return format("%.2f GiB", bytes / double(1ull << 30));
    }
    if (bytes >= 1ull << 20) {
        return format("%.1f MiB", bytes / double(1ull << 20));
    }
    return bytes >= 1024 ? format("%.1f KiB", bytes / 1024.0) : format("%u B", unsigned(bytes));
}

} // namespace ls
