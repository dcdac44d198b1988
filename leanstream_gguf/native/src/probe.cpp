#include "probe.h"

#include "memory.h"
#include "scheduler.h"
#include "status.h"

#include <atomic>
#include <cstring>
#include <random>

#include <sys/stat.h>

namespace ls {

namespace {

// Keeps `depth` reads in flight until the time is over: each finished read submits the next.
class Prober final : public ReadSink {
public:
    Prober(Device & device, uint64_t n_blocks, uint64_t block_bytes, bool sequential)
        : device_(device), n_blocks_(n_blocks), block_bytes_(block_bytes), sequential_(sequential) {}

    ReadRequest next(uint8_t * dest) {
        ReadRequest r;
        r.device   = &device_;
        r.offset   = (sequential_ ? at_++ % n_blocks_ : random_() % n_blocks_) * block_bytes_;
        r.dest     = dest;
        r.n_bytes  = r.n_needed = uint32_t(block_bytes_);
        return r;
    }

    void on_read(const ReadRequest & request, int error) override {
        std::lock_guard<std::mutex> lock(mutex_);
        n_reads_ += error == 0;
        error_ = error ? error : error_;
        if (!error && now_ns() < until_ns_) {
            scheduler_->submit({next(request.dest)});
        }
    }

    double run(Scheduler & scheduler, uint8_t * buffers, uint32_t depth, uint32_t duration_ms) {
        const uint64_t begin = now_ns();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            scheduler_ = &scheduler;
            until_ns_  = begin + uint64_t(duration_ms) * 1000000;
            for (uint32_t i = 0; i < depth; ++i) {
                scheduler.submit({next(buffers + i * block_bytes_)});
            }
        }
        scheduler.drain();
        if (error_) {
            throw Error(LS_ERR_READ, format("%s: a test read failed: %s", device_.path().c_str(), strerror(error_)))
                .path(device_.path()).sys(error_);
        }
        return double(n_reads_) / (double(now_ns() - begin) * 1e-9);
    }

private:
    Device & device_;
    uint64_t n_blocks_, block_bytes_;
    bool     sequential_;
    std::mutex mutex_;
    std::mt19937_64 random_{1};
    uint64_t at_ = 0, n_reads_ = 0, until_ns_ = 0;
    int      error_ = 0;
    Scheduler * scheduler_ = nullptr;
};

} // namespace

ProbeResult probe_reads(const std::string & path, uint64_t block_bytes, uint32_t depth, bool sequential, uint32_t duration_ms,
                        uint32_t io_backend) {
    struct stat st = {};
    std::string warning;
    const std::unique_ptr<Device> device = open_device(path, true, warning);
    stat(path.c_str(), &st);
    if (block_bytes == 0 || block_bytes % page_size() || block_bytes > (64u << 20) || depth == 0 || depth > 64 || io_backend > 2) {
        throw Error(LS_ERR_ARGUMENT, format("test reads need a block size that is a multiple of %zu bytes up to 64 MiB, and a depth "
            "of 1 to 64", page_size()));
    }
    if (uint64_t(st.st_size) < block_bytes) {
        throw Error(LS_ERR_ARGUMENT, format("%s is smaller than one test read", path.c_str())).path(path);
    }
    Prober prober(*device, uint64_t(st.st_size) / block_bytes, block_bytes, sequential);
    AddressSpace buffers(block_bytes * depth);
    buffers.commit(buffers.base(), buffers.size());
    AddressSpace::prefer_large_pages(buffers.base(), buffers.size()); // as the runtime's: scattered pages halve the rate
    IoOptions options;
    options.backend   = IoOptions::Backend(io_backend);
    options.n_threads = depth;
    options.depth     = depth;
    Scheduler scheduler(options, prober);
    ProbeResult r;
    r.reads_per_second = prober.run(scheduler, buffers.base(), depth, duration_ms);
    r.bytes_per_second = r.reads_per_second * double(block_bytes);
    r.direct = device->direct();
    return r;
}

} // namespace ls
