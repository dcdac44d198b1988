#include "memory.h"

#include "status.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#if defined(_WIN32)
#  define NOMINMAX
#  include <windows.h>
#  include <psapi.h>
#else
#  include <sys/mman.h>
#  include <unistd.h>
#  if defined(__APPLE__)
#    include <mach/mach.h>
#  endif
#endif

namespace ls {

size_t page_size() {
#if defined(_WIN32)
    return 4096; // unbuffered reads need the sector size, which is at most this
#else
    static const size_t bytes = [] {
        const long n = sysconf(_SC_PAGESIZE);
        return n > 4096 ? size_t(n) : size_t(4096);
    }();
    return bytes;
#endif
}

AddressSpace::AddressSpace(size_t n_bytes) : size_(page_ceil(n_bytes)) {
    if (size_ == 0) {
        return;
    }
#if defined(_WIN32)
    base_ = (uint8_t *) VirtualAlloc(nullptr, size_, MEM_RESERVE, PAGE_READWRITE);
    const int error_number = base_ ? 0 : (int) GetLastError();
#else
    void * p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const int error_number = errno;
    base_ = p == MAP_FAILED ? nullptr : (uint8_t *) p;
#endif
    if (!base_) {
        throw Error(LS_ERR_MEMORY, format("the system refused %s of address space; raise the limit (ulimit -v) or set "
            "vm.overcommit_memory to 0 or 1", human_bytes(size_).c_str())).sys(error_number).sizes(size_, 0);
    }
}

AddressSpace::~AddressSpace() {
    if (base_) {
#if defined(_WIN32)
        VirtualFree(base_, 0, MEM_RELEASE);
#else
        munmap(base_, size_);
#endif
    }
}

AddressSpace::AddressSpace(AddressSpace && other) noexcept {
    *this = std::move(other);
}

AddressSpace & AddressSpace::operator=(AddressSpace && other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    return *this;
}

void AddressSpace::commit(uint8_t * from, size_t n_bytes) {
#if defined(_WIN32)
    if (n_bytes && !VirtualAlloc(from, n_bytes, MEM_COMMIT, PAGE_READWRITE)) {
        throw Error(LS_ERR_MEMORY, format("the system refused %s of memory", human_bytes(n_bytes).c_str()))
            .sys((int) GetLastError()).sizes(n_bytes, 0);
    }
#else
    (void) from;
    (void) n_bytes;
#endif
}

void AddressSpace::discard(uint8_t * from, size_t n_bytes) {
    if (n_bytes == 0) {
        return;
    }
#if defined(_WIN32)
    VirtualFree(from, n_bytes, MEM_DECOMMIT);
#elif defined(__APPLE__)
    // MADV_DONTNEED keeps the pages on macOS; mapping afresh gives them back
    mmap(from, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#else
    madvise(from, n_bytes, MADV_DONTNEED);
#  if defined(MADV_NOHUGEPAGE)
    madvise(from, n_bytes, MADV_NOHUGEPAGE); // or a large page of a neighbour would bring it back
#  endif
#endif
}

void AddressSpace::prefer_large_pages(uint8_t * from, size_t n_bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t kLarge = 2u << 20; // only pages that lie inside: a larger one would hold more than was planned
    const uintptr_t begin = (uintptr_t(from) + kLarge - 1) & ~(kLarge - 1), end = (uintptr_t(from) + n_bytes) & ~(kLarge - 1);
    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_HUGEPAGE);
    }
#else
    (void) from;
    (void) n_bytes;
#endif
}

void AddressSpace::populate(uint8_t * from, size_t n_bytes) {
#if defined(__linux__)
#  if !defined(MADV_POPULATE_WRITE)
#    define MADV_POPULATE_WRITE 23 // Linux 5.14; older kernels refuse it
#  endif
    madvise(from, n_bytes, MADV_POPULATE_WRITE);
#else
    (void) from;
    (void) n_bytes;
#endif
}

uint64_t process_resident_bytes() {
#if defined(_WIN32)
    PROCESS_MEMORY_COUNTERS counters;
    return GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters)) ? counters.WorkingSetSize : 0;
#elif defined(__APPLE__)
    mach_task_basic_info info;
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    return task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t) &info, &count) == KERN_SUCCESS ? info.resident_size : 0;
#else
    FILE * f = fopen("/proc/self/statm", "r");
    if (!f) {
        return 0;
    }
    unsigned long total = 0, resident = 0;
    const int n = fscanf(f, "%lu %lu", &total, &resident);
    fclose(f);
    return n == 2 ? uint64_t(resident) * page_size() : 0;
#endif
}

} // namespace ls
