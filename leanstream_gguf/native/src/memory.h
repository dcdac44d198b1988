// Address space that costs nothing until it is used, and what the process holds.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ls {

// unit of alignment for memory, file offsets and accounting: the system's page, 4096 or more
size_t page_size();

inline uint64_t page_floor(uint64_t bytes) { return bytes & ~uint64_t(page_size() - 1); }
inline uint64_t page_ceil (uint64_t bytes) { return (bytes + page_size() - 1) & ~uint64_t(page_size() - 1); }

// A reserved range of addresses. Pages take memory when they are written first and give it back with discard().
class AddressSpace {
public:
    AddressSpace() = default;
    explicit AddressSpace(size_t n_bytes); // throws Error(LS_ERR_MEMORY)
    ~AddressSpace();
    AddressSpace(AddressSpace && other) noexcept;
    AddressSpace & operator=(AddressSpace && other) noexcept;

    uint8_t * base() const { return base_; }
    size_t    size() const { return size_; }

    // page-aligned range; make it writable (needed on Windows only, cheap elsewhere); throws Error(LS_ERR_MEMORY)
    void commit(uint8_t * from, size_t n_bytes);
    // page-aligned range; its contents are lost, its memory returns to the system, large pages are no longer wanted
    static void discard(uint8_t * from, size_t n_bytes);
    // page-aligned range that will be filled as a whole: large pages where the system has them (fewer TLB misses)
    static void prefer_large_pages(uint8_t * from, size_t n_bytes);
    // page-aligned range; give it memory now, contents kept, so that the reader's thread need not clear pages. A hint.
    static void populate(uint8_t * from, size_t n_bytes);

private:
    uint8_t * base_ = nullptr;
    size_t    size_ = 0;
};

// resident bytes of this process, file mappings included; 0 if the system does not tell
uint64_t process_resident_bytes();

} // namespace ls
