// Preloaded into a test process: makes chosen pread calls fail, so that a broken drive can be had at will.
// read_faults_arm(mode, n_skip, n_fail): after n_skip reads, the next n_fail go wrong. Only reads of a page or more
// count, so Python's own small reads are left alone.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { FAULT_NONE, FAULT_EIO, FAULT_SHORT, FAULT_EINTR, FAULT_END_OF_FILE };

static atomic_int  mode;
static atomic_long n_skip, n_fail, n_faults;

void read_faults_arm(int new_mode, long skip, long fail) {
    atomic_store(&n_skip, skip);
    atomic_store(&n_fail, fail);
    atomic_store(&n_faults, 0);
    atomic_store(&mode, new_mode);
}

long read_faults_count(void) {
    return atomic_load(&n_faults);
}

static int due(size_t n_bytes) {
    if (atomic_load(&mode) == FAULT_NONE || n_bytes < 4096) {
        return FAULT_NONE;
    }
    if (atomic_fetch_sub(&n_skip, 1) > 0 || atomic_fetch_sub(&n_fail, 1) <= 0) {
        return FAULT_NONE;
    }
    atomic_fetch_add(&n_faults, 1);
    return atomic_load(&mode);
}

typedef ssize_t (*pread_fn)(int, void *, size_t, off64_t);

static ssize_t faulty(const char * name, int fd, void * dest, size_t n_bytes, off64_t offset) {
    pread_fn real = (pread_fn) dlsym(RTLD_NEXT, name);
    switch (due(n_bytes)) {
        case FAULT_EIO:         errno = EIO; return -1;
        case FAULT_EINTR:       errno = EINTR; return -1;
        case FAULT_END_OF_FILE: return 0;
        case FAULT_SHORT:       return real(fd, dest, 4096, offset); // what a signal may do to a direct read
        default:                return real(fd, dest, n_bytes, offset);
    }
}

ssize_t pread(int fd, void * dest, size_t n_bytes, off_t offset) {
    return faulty("pread", fd, dest, n_bytes, offset);
}

ssize_t pread64(int fd, void * dest, size_t n_bytes, off64_t offset) {
    return faulty("pread64", fd, dest, n_bytes, offset);
}
