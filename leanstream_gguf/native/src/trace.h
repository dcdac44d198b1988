// A record of what each token needed, what was predicted and what had arrived: written while a model runs, replayed by policies.
//
// File: "LSTRACE1", uint32 n_header, header (JSON: {"layers":[{"block":b,"n_units":n,"unit_bytes":s},...], ...}), events.
// All integers little-endian; a varint is LEB128. An event is a tag byte and
//   1 tokens   varint n                                          a graph of n tokens begins
//   2 predict  varint layer, byte lead, varint n, n x {varint step, byte p}
//              lead: 1 = one attention block ahead, 2 = one layer ahead, 3 = two layers ahead, 4 = within the FFN of the layer before
//   3 need     varint layer, byte pass, varint n, n x {varint step, byte arrival}, varint m, m x {varint step, int8 margin}
//              pass: 1 = a pass over (nearly) all units of the layer, which says nothing of single ones
// A unit is an expert or a cluster of neurons; layers with experts come first. Units are in ascending order within their layer; step is the distance to the one before, from -1. p is in 1/255, a margin in
// 1/16 and clipped; units without one came nowhere near (below -6).
#pragma once

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

namespace ls {

enum class Arrival : uint8_t {
    hit     = 0, // resident since an earlier use
    ahead   = 1, // read ahead of its use, in time
    late    = 2, // read ahead, but the use had to wait for it
    missed  = 3, // read when it was needed
};
constexpr uint32_t kArrivals = 4;

struct TraceLayer {
    int32_t  block = 0;
    uint32_t n_units = 0;
    uint64_t unit_bytes = 0;
};

struct TraceEvent {
    enum Kind : uint8_t { kTokens = 1, kPredict = 2, kNeed = 3 };

    uint8_t  kind = 0;
    uint8_t  lead = 0;              // predict
    bool     pass = false;          // need
    uint32_t layer = 0;
    uint32_t n_tokens = 0;          // tokens
    std::vector<uint32_t> units;    // predict, need: within the layer, ascending
    std::vector<float>    p;        // predict: [n]
    std::vector<Arrival>  arrival;  // need: [n]
    std::vector<float>    margin;   // need: [n_units of the layer], kNoMargin where none was recorded; empty if none at all

    static constexpr float kNoMargin = -6.0f;
};

// Thread-safe: contexts write at once, each event as a whole.
class TraceWriter {
public:
    // Creates the file and writes the header. note: JSON members for it, "\"model\":\"x\"" or "". Throws Error.
    TraceWriter(const std::string & path, const std::vector<TraceLayer> & layers, const std::string & note);
    ~TraceWriter();
    TraceWriter(const TraceWriter &) = delete;
    TraceWriter & operator=(const TraceWriter &) = delete;

    void tokens(uint32_t n);
    // p: [n_units of the layer]; only values of at least kLeastP are kept
    void predict(uint32_t layer, uint8_t lead, const float * p);
    // units ascending; margin: [n_units of the layer] or nullptr
    void need(uint32_t layer, bool pass, const std::vector<uint32_t> & units, const std::vector<Arrival> & arrival, const float * margin);
    // write out what is buffered; false: the disk refused, and the trace is not to be trusted
    bool flush();

    static constexpr float kLeastP = 1.0f / 255.0f;

private:
    void byte(uint8_t b) { buffer_.push_back(b); }
    void varint(uint64_t v);

    std::vector<TraceLayer> layers_;
    std::mutex mutex_; // taken last of all locks
    std::vector<uint8_t> buffer_;
    std::FILE * file_ = nullptr;
    bool ok_ = true;
};

class TraceReader {
public:
    // Throws Error(LS_ERR_NOT_FOUND, LS_ERR_UNREADABLE, LS_ERR_FORMAT).
    explicit TraceReader(const std::string & path);

    const std::vector<TraceLayer> & layers() const { return layers_; }
    const std::string & header() const { return header_; }
    // false at the end. Throws Error(LS_ERR_FORMAT) on a damaged event.
    bool next(TraceEvent & out);
    void rewind() { at_ = begin_; }

private:
    uint8_t byte();
    uint64_t varint(uint64_t limit);
    [[noreturn]] void damaged(const char * what) const;

    std::string path_, header_;
    std::vector<uint8_t> bytes_;
    size_t begin_ = 0, at_ = 0;
    std::vector<TraceLayer> layers_;
};

} // namespace ls
