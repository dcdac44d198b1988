// A writer for the few JSON documents of the C API. Objects and arrays nest by scope:
//   Json j; { auto o = j.object(); j.key("a").number(1); }
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace ls {

class Json {
public:
    class Scope {
    public:
        Scope(Json & j, char open, char close) : json(j), close_with(close) { json.separate(); json.text += open; json.first = true; }
        ~Scope() { json.text += close_with; json.first = false; }
        Scope(const Scope &) = delete;
    private:
        Json & json;
        char   close_with;
    };

    Scope object() { return Scope(*this, '{', '}'); }
    Scope array()  { return Scope(*this, '[', ']'); }

    Json & key(const char * name) { string(name); text += ':'; first = true; return *this; }
    Json & key(const std::string & name) { return key(name.c_str()); }

    void number(uint64_t v) { separate(); text += std::to_string(v); }
    void number(int64_t v)  { separate(); text += std::to_string(v); }
    void number(uint32_t v) { number(uint64_t(v)); }
    void number(int32_t v)  { number(int64_t(v)); }
    void number(double v) { // null for infinities and NaN, which JSON has no word for
        separate();
        char b[40];
        snprintf(b, sizeof(b), "%.9g", v);
        text += v - v == 0 ? b : "null";
    }
    void raw(const std::string & literal) { separate(); text += literal; }
    void boolean(bool v)    { separate(); text += v ? "true" : "false"; }

    void string(const std::string & s) {
        separate();
        text += '"';
        for (unsigned char c : s) {
            if (c == '"' || c == '\\') {
                text += '\\';
                text += char(c);
            } else if (c < 0x20) {
                char b[8];
                snprintf(b, sizeof(b), "\\u%04x", c);
                text += b;
            } else {
                text += char(c);
            }
        }
        text += '"';
    }

    std::string text;

private:
    void separate() {
        if (!first) {
            text += ',';
        }
        first = false;
    }

    bool first = true;
};

} // namespace ls
