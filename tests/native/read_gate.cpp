#include "read_gate.h"

#include <cerrno>
#include <memory>
#include <mutex>

#include <dlfcn.h>
#include <sys/types.h>

namespace check {

namespace {

std::mutex gate_mutex;
std::shared_ptr<ReadGate> gate;

} // namespace

GateReads::GateReads(ReadGate g) {
    std::lock_guard<std::mutex> lock(gate_mutex);
    gate = std::make_shared<ReadGate>(std::move(g));
}

GateReads::~GateReads() {
    std::lock_guard<std::mutex> lock(gate_mutex);
    gate.reset();
}

static int ask_gate(uint64_t offset, size_t n_bytes) {
    std::shared_ptr<ReadGate> g;
    {
        std::lock_guard<std::mutex> lock(gate_mutex);
        g = gate;
    }
    return g && n_bytes >= 4096 ? (*g)(offset, n_bytes) : 0;
}

} // namespace check

// These win over the C library's, as the program comes first in symbol look-up.
using PreadFunction = ssize_t (*)(int, void *, size_t, off_t);

static ssize_t gated(const char * name, int fd, void * dest, size_t n_bytes, off_t offset) {
    if (const int error = check::ask_gate(uint64_t(offset), n_bytes)) {
        errno = error;
        return -1;
    }
    return PreadFunction(dlsym(RTLD_NEXT, name))(fd, dest, n_bytes, offset);
}

extern "C" ssize_t pread(int fd, void * dest, size_t n_bytes, off_t offset) {
    return gated("pread", fd, dest, n_bytes, offset);
}

extern "C" ssize_t pread64(int fd, void * dest, size_t n_bytes, off_t offset) {
    return gated("pread64", fd, dest, n_bytes, offset);
}
