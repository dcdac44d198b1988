// Stands between the engine and the drive: the test program's own pread, which asks a function first. pread backend only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace check {

// Asked before each read of a page or more, on the reading thread; may wait. Returns 0 to let the read happen, or the errno
// that it fails with.
using ReadGate = std::function<int(uint64_t offset, size_t n_bytes)>;

// In force until the end of the scope.
class GateReads {
public:
    explicit GateReads(ReadGate gate);
    ~GateReads(); // reads that are inside the gate may still be
    GateReads(const GateReads &) = delete;
};

} // namespace check
