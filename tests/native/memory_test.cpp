#include "check.h"
#include "support.h"

#include "memory.h"

#include <cstring>
#include <utility>

using namespace ls;

namespace {

const uint64_t kPage = page_size();

} // namespace

TEST(page_arithmetic) {
    CHECK(kPage >= 4096 && (kPage & (kPage - 1)) == 0);
    CHECK_EQ(page_floor(0), 0);
    CHECK_EQ(page_ceil(0), 0);
    CHECK_EQ(page_floor(kPage - 1), 0);
    CHECK_EQ(page_ceil(1), kPage);
    CHECK_EQ(page_floor(5 * kPage), 5 * kPage);
    CHECK_EQ(page_ceil(5 * kPage), 5 * kPage);
    CHECK_EQ(page_ceil(5 * kPage + 1), 6 * kPage);
}

TEST(reserved_space_costs_nothing_until_written) {
    AddressSpace space(64ull << 30);
    CHECK_EQ(space.size(), 64ull << 30);
    CHECK_EQ(uintptr_t(space.base()) % kPage, 0);
    CHECK_EQ(check::resident_bytes(space.base(), 1024 * kPage), 0);
    uint8_t * far = space.base() + (63ull << 30);
    space.commit(far, 16 * kPage);
    memset(far, 7, 16 * kPage);
    CHECK_EQ(check::resident_bytes(far, 1024 * kPage), 16 * kPage);
}

TEST(discard_gives_pages_back_and_loses_their_contents) {
    AddressSpace space(64 * kPage);
    memset(space.base(), 9, 64 * kPage);
    AddressSpace::discard(space.base() + 8 * kPage, 16 * kPage);
    CHECK_EQ(check::resident_bytes(space.base(), 64 * kPage), 48 * kPage);
    CHECK_EQ(space.base()[8 * kPage], 0);
    CHECK_EQ(space.base()[8 * kPage - 1], 9);
    CHECK_EQ(space.base()[24 * kPage], 9);
    AddressSpace::discard(space.base(), 0); // nothing
    CHECK_EQ(space.base()[0], 9);
}

TEST(sizes_are_rounded_up) {
    CHECK_EQ(AddressSpace(1).size(), kPage);
    AddressSpace none(0);
    CHECK_EQ(none.size(), 0);
    CHECK(none.base() == nullptr);
}

TEST(moved_space_has_one_owner) {
    AddressSpace a(4 * kPage);
    uint8_t * base = a.base();
    base[0] = 1;
    AddressSpace b(std::move(a));
    CHECK(b.base() == base && b.size() == 4 * kPage);
    AddressSpace c;
    c = std::move(b);
    CHECK_EQ(c.base()[0], 1);
    c = AddressSpace(kPage); // gives the first range back
    CHECK_EQ(c.size(), kPage);
}

TEST(more_than_there_is_is_refused) {
    const ls_error e = check::error_of([] { AddressSpace space(1ull << 60); });
    CHECK_EQ(e.status, LS_ERR_MEMORY);
    CHECK_EQ(e.used_bytes, 1ull << 60);
    CHECK(e.sys_errno != 0);
}

TEST(resident_bytes_of_the_process_follow) {
    const uint64_t before = process_resident_bytes();
    REQUIRE(before > 0);
    AddressSpace space(64u << 20);
    memset(space.base(), 1, space.size());
    const uint64_t with = process_resident_bytes();
    CHECK(with >= before + (60u << 20));
    AddressSpace::discard(space.base(), space.size());
    CHECK(process_resident_bytes() + (60u << 20) <= with);
}
