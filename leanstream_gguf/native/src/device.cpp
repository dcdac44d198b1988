#include "device.h"

#include "memory.h"

#include <cerrno>

namespace ls {

uint64_t Device::granularity() const {
    return page_size();
}

int64_t Device::read(uint64_t offset, uint8_t * dest, uint64_t n_bytes) {
    if ((offset | uint64_t(uintptr_t(dest)) | n_bytes) & (granularity() - 1)) {
        return -EINVAL;
    }
    uint64_t done = 0, best = 0; // where the next call starts, and how far the last one came
    while (done < n_bytes) {
        const int64_t n = read_impl(offset + done, dest + done, n_bytes - done);
        if (n == -EINTR || n == -EAGAIN) {
            continue;
        }
        if (n < 0) {
            return n;
        }
        const uint64_t reached = done + uint64_t(n);
        if (reached <= best) {
            break; // no progress: the end of the file
        }
        best = reached;
        done = reached == n_bytes ? reached : page_floor(reached); // a direct read goes on at a page only
    }
    after_read(offset, best);
    return int64_t(best);
}

} // namespace ls
