#include "device.h"

#include "memory.h"

#include <cerrno>

namespace ls {

int64_t Device::read(uint64_t offset, uint8_t * dest, uint64_t n_bytes) {
    if ((offset | uint64_t(uintptr_t(dest)) | n_bytes) & (page_size() - 1)) {
        return -EINVAL;
    }
    uint64_t done = 0;
    while (done < n_bytes) {
        const int64_t n = read_impl(offset + done, dest + done, n_bytes - done);
        if (n == -EINTR || n == -EAGAIN) {
            continue;
        }
        if (n < 0) {
            return n;
        }
        done += uint64_t(n);
        if (n == 0 || done & (page_size() - 1)) {
            break; // end of file: an unaligned rest cannot be continued, and need not be
        }
    }
    after_read(offset, done);
    return int64_t(done);
}

} // namespace ls
