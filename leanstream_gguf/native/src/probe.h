// How fast a file's drive answers aligned reads.
#pragma once

#include <cstdint>
#include <string>

namespace ls {

struct ProbeResult {
    double bytes_per_second = 0;
    double reads_per_second = 0;
    bool   direct = true;
};

// io_backend as in ls_options. Throws Error(LS_ERR_ARGUMENT, NOT_FOUND, UNREADABLE, READ).
ProbeResult probe_reads(const std::string & path, uint64_t block_bytes, uint32_t depth, bool sequential, uint32_t duration_ms,
                        uint32_t io_backend);

} // namespace ls
