// Typed errors inside the library. They are thrown between rooms and turned into an ls_status in api.cpp, hooks.cpp and
// the ops: none crosses the C ABI.
#pragma once

#include "leanstream.h"

#include <exception>
#include <string>

namespace ls {

class Error : public std::exception {
public:
    Error(ls_status status, std::string message) { info.status = status; set_message(message); }

    Error & path(const std::string & p);
    Error & offset(uint64_t bytes) { info.offset_bytes = bytes; return *this; }
    Error & sizes(uint64_t used, uint64_t limit) { info.used_bytes = used; info.limit_bytes = limit; return *this; }
    Error & sys(int error_number) { info.sys_errno = error_number; return *this; }

    const char * what() const noexcept override { return info.message; }

    ls_error info = {};

private:
    void set_message(const std::string & m);
};

// printf into a string
std::string format(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

// "1.5 GiB"
std::string human_bytes(uint64_t bytes);

} // namespace ls
