// Small GGUF files by hand, right and wrong. Layout: magic, u32 version, u64 n_tensors, u64 n_kv, key-values, tensor table,
// padding to 32, tensors of float32, each padded to 32.
#pragma once

#include "support.h"

#include "gguf.h"

#include <cstdint>
#include <string>
#include <vector>

namespace check {

class GgufWriter {
public:
    GgufWriter & text(const std::string & key, const std::string & value) {
        begin_key(key, GGUF_TYPE_STRING);
        put_text(kv_, value);
        return *this;
    }
    GgufWriter & u32(const std::string & key, uint32_t value) {
        begin_key(key, GGUF_TYPE_UINT32);
        put(kv_, value);
        return *this;
    }
    GgufWriter & u16(const std::string & key, uint16_t value) {
        begin_key(key, GGUF_TYPE_UINT16);
        put(kv_, value);
        return *this;
    }
    GgufWriter & f32(const std::string & key, float value) {
        begin_key(key, GGUF_TYPE_FLOAT32);
        put(kv_, value);
        return *this;
    }
    GgufWriter & u32s(const std::string & key, const std::vector<uint32_t> & values) {
        begin_key(key, GGUF_TYPE_ARRAY);
        put(kv_, uint32_t(GGUF_TYPE_UINT32));
        put(kv_, uint64_t(values.size()));
        for (uint32_t v : values) {
            put(kv_, v);
        }
        return *this;
    }
    GgufWriter & texts(const std::string & key, const std::vector<std::string> & values) {
        begin_key(key, GGUF_TYPE_ARRAY);
        put(kv_, uint32_t(GGUF_TYPE_STRING));
        put(kv_, uint64_t(values.size()));
        for (const std::string & v : values) {
            put_text(kv_, v);
        }
        return *this;
    }
    // float32, shape in memory order
    GgufWriter & tensor(const std::string & name, const std::vector<uint64_t> & shape) {
        put_text(table_, name);
        put(table_, uint32_t(shape.size()));
        uint64_t n = 1;
        for (uint64_t d : shape) {
            put(table_, d);
            n *= d;
        }
        put(table_, uint32_t(0));
        put(table_, uint64_t(data_.size()));
        const Bytes values = random_bytes(n * 4, n_tensors_ + 1);
        data_.insert(data_.end(), values.begin(), values.end());
        data_.resize((data_.size() + 31) / 32 * 32);
        n_tensors_++;
        return *this;
    }

    Bytes bytes() const {
        Bytes out = {'G', 'G', 'U', 'F'};
        put(out, uint32_t(3));
        put(out, n_tensors_);
        put(out, n_keys_);
        out.insert(out.end(), kv_.begin(), kv_.end());
        out.insert(out.end(), table_.begin(), table_.end());
        out.resize((out.size() + 31) / 32 * 32);
        out.insert(out.end(), data_.begin(), data_.end());
        return out;
    }
    uint64_t data_bytes() const { return data_.size(); }

    // where things stand in bytes()
    static constexpr size_t kVersionAt = 4, kTensorCountAt = 8, kKeyCountAt = 16, kHeaderBytes = 24;

private:
    template <typename T> static void put(Bytes & to, T value) {
        const uint8_t * p = (const uint8_t *) &value;
        to.insert(to.end(), p, p + sizeof(value));
    }
    static void put_text(Bytes & to, const std::string & s) {
        put(to, uint64_t(s.size()));
        to.insert(to.end(), s.begin(), s.end());
    }
    void begin_key(const std::string & key, gguf_type type) {
        put_text(kv_, key);
        put(kv_, uint32_t(type));
        n_keys_++;
    }

    uint64_t n_tensors_ = 0, n_keys_ = 0;
    Bytes kv_, table_, data_;
};

} // namespace check
