#include "trace.h"

#include "status.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

namespace ls {

namespace {

constexpr char kMagic[] = "LSTRACE1";
constexpr size_t kMagicBytes = 8;

std::string layers_json(const std::vector<TraceLayer> & layers) {
    std::string out;
    for (const TraceLayer & l : layers) {
        out += format("%s{\"block\":%d,\"n_units\":%u,\"unit_bytes\":%llu}", out.empty() ? "" : ",", l.block, l.n_units,
            (unsigned long long) l.unit_bytes);
    }
    return out;
}

// the number behind "key": in text, from `at` on; -1 if there is none
long long number_after(const std::string & text, const char * key, size_t at) {
    const std::string quoted = std::string("\"") + key + "\":";
    const size_t found = text.find(quoted, at);
    return found == std::string::npos ? -1 : atoll(text.c_str() + found + quoted.size());
}

} // namespace

TraceWriter::TraceWriter(const std::string & path, const std::vector<TraceLayer> & layers, const std::string & note) : layers_(layers) {
    file_ = std::fopen(path.c_str(), "wb");
    if (!file_) {
        throw Error(LS_ERR_UNREADABLE, format("cannot write the trace to %s: %s", path.c_str(), strerror(errno))).path(path).sys(errno);
    }
    const std::string header = "{\"layers\":[" + layers_json(layers) + "]" + (note.empty() ? "" : "," + note) + "}";
    buffer_.insert(buffer_.end(), kMagic, kMagic + kMagicBytes);
    for (int i = 0; i < 4; ++i) {
        byte(uint8_t(header.size() >> (8 * i)));
    }
    buffer_.insert(buffer_.end(), header.begin(), header.end());
}

TraceWriter::~TraceWriter() {
    flush();
    std::fclose(file_);
}

void TraceWriter::varint(uint64_t v) {
    for (; v >= 0x80; v >>= 7) {
        byte(uint8_t(v | 0x80));
    }
    byte(uint8_t(v));
}

void TraceWriter::tokens(uint32_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    byte(TraceEvent::kTokens);
    varint(n);
}

void TraceWriter::predict(uint32_t layer, uint8_t lead, const float * p) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t n_units = layers_[layer].n_units;
    byte(TraceEvent::kPredict);
    varint(layer);
    byte(lead);
    varint(uint64_t(std::count_if(p, p + n_units, [](float v) { return v >= kLeastP; })));
    int64_t before = -1;
    for (uint32_t u = 0; u < n_units; ++u) {
        if (p[u] >= kLeastP) {
            varint(uint64_t(u - before));
            byte(uint8_t(std::lround(std::min(p[u], 1.0f) * 255.0f)));
            before = u;
        }
    }
}

void TraceWriter::need(uint32_t layer, bool pass, const std::vector<uint32_t> & units, const std::vector<Arrival> & arrival,
                       const float * margin) {
    std::lock_guard<std::mutex> lock(mutex_);
    byte(TraceEvent::kNeed);
    varint(layer);
    byte(pass);
    varint(units.size());
    int64_t before = -1;
    for (size_t i = 0; i < units.size(); ++i) {
        varint(uint64_t(units[i] - before));
        byte(uint8_t(arrival[i]));
        before = units[i];
    }
    const uint32_t n_units = margin ? layers_[layer].n_units : 0;
    const auto near = [&](uint32_t u) { return margin[u] > TraceEvent::kNoMargin; };
    uint64_t n_near = 0;
    for (uint32_t u = 0; u < n_units; ++u) {
        n_near += near(u);
    }
    varint(n_near);
    before = -1;
    for (uint32_t u = 0; u < n_units; ++u) {
        if (near(u)) {
            varint(uint64_t(u - before));
            byte(uint8_t(int8_t(std::lround(std::min(margin[u], 7.9f) * 16.0f))));
            before = u;
        }
    }
}

bool TraceWriter::flush() {
    std::lock_guard<std::mutex> lock(mutex_);
    ok_ = std::fwrite(buffer_.data(), 1, buffer_.size(), file_) == buffer_.size() && std::fflush(file_) == 0 && ok_;
    buffer_.clear();
    return ok_;
}

TraceReader::TraceReader(const std::string & path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        const int error = errno;
        throw Error(error == ENOENT ? LS_ERR_NOT_FOUND : LS_ERR_UNREADABLE,
            format("cannot read the trace %s: %s", path.c_str(), strerror(error))).path(path).sys(error);
    }
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (bytes_.size() < kMagicBytes + 4 || memcmp(bytes_.data(), kMagic, kMagicBytes) != 0) {
        throw Error(LS_ERR_FORMAT, format("%s is no trace; record one with `leanstream trace`", path.c_str())).path(path);
    }
    size_t n_header = 0;
    for (size_t i = 0; i < 4; ++i) {
        n_header |= size_t(bytes_[kMagicBytes + i]) << (8 * i);
    }
    begin_ = kMagicBytes + 4 + n_header;
    if (begin_ > bytes_.size()) {
        damaged("its header is cut off");
    }
    header_.assign(bytes_.begin() + kMagicBytes + 4, bytes_.begin() + begin_);
    const size_t end = header_.find(']');
    for (size_t at = header_.find("{\"block\":"); at < end; at = header_.find("{\"block\":", at + 1)) {
        const long long n_units = number_after(header_, "n_units", at), n_bytes = number_after(header_, "unit_bytes", at);
        if (n_units <= 0 || n_units > (1 << 24) || n_bytes < 0) {
            damaged("its header names impossible layers");
        }
        layers_.push_back({int32_t(number_after(header_, "block", at)), uint32_t(n_units), uint64_t(n_bytes)});
    }
    if (layers_.empty()) {
        damaged("its header names no layers");
    }
    at_ = begin_;
}

void TraceReader::damaged(const char * what) const {
    throw Error(LS_ERR_FORMAT, format("the trace %s is damaged at byte %zu: %s; record it again", path_.c_str(), at_, what)).path(path_);
}

uint8_t TraceReader::byte() {
    if (at_ >= bytes_.size()) {
        damaged("it ends within an event");
    }
    return bytes_[at_++];
}

uint64_t TraceReader::varint(uint64_t limit) {
    uint64_t v = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        const uint8_t b = byte();
        v |= uint64_t(b & 0x7f) << shift;
        if (b < 0x80) {
            if (v > limit) {
                damaged("a number is out of range");
            }
            return v;
        }
    }
    damaged("a number never ends");
}

bool TraceReader::next(TraceEvent & out) {
    if (at_ == bytes_.size()) {
        return false;
    }
    out.kind = byte();
    if (out.kind == TraceEvent::kTokens) {
        out.n_tokens = uint32_t(varint(UINT32_MAX));
        return true;
    }
    if (out.kind != TraceEvent::kPredict && out.kind != TraceEvent::kNeed) {
        damaged("an unknown event");
    }
    out.layer = uint32_t(varint(layers_.size() - 1));
    const uint32_t n_units = layers_[out.layer].n_units;
    const uint8_t detail = byte();
    out.lead = detail;
    out.pass = detail != 0;
    out.units.clear();
    out.p.clear();
    out.arrival.clear();
    out.margin.clear();
    const uint64_t n = varint(n_units);
    int64_t u = -1;
    for (uint64_t i = 0; i < n; ++i) {
        u += int64_t(varint(n_units));
        const uint8_t value = byte();
        if (u < 0 || u >= int64_t(n_units) || (out.kind == TraceEvent::kNeed && value >= kArrivals)) {
            damaged("a unit that the layer does not have");
        }
        out.units.push_back(uint32_t(u));
        if (out.kind == TraceEvent::kPredict) {
            out.p.push_back(float(value) / 255.0f);
        } else {
            out.arrival.push_back(Arrival(value));
        }
    }
    const uint64_t n_margins = out.kind == TraceEvent::kNeed ? varint(n_units) : 0;
    if (n_margins) {
        out.margin.assign(n_units, TraceEvent::kNoMargin);
    }
    u = -1;
    for (uint64_t i = 0; i < n_margins; ++i) {
        u += int64_t(varint(n_units));
        const float margin = float(int8_t(byte())) / 16.0f;
        if (u < 0 || u >= int64_t(n_units)) {
            damaged("a margin of a unit that the layer does not have");
        }
        out.margin[size_t(u)] = margin;
    }
    return true;
}

} // namespace ls
