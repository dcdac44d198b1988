#include "check.h"
#include "support.h"

#include "cache.h"
#include "units_ahead.h"

#include <algorithm>
#include <cstring>

using namespace ls;

namespace {

const uint64_t kSlot = 3 * page_size();

using Units = std::vector<uint32_t>;

// A cache beside a plain record of what it must hold; check() compares the two.
class Pair {
public:
    explicit Pair(uint32_t n_units) : cache(n_units, kSlot), resident_(n_units), pins_(n_units) {}

    bool resident(uint32_t u) const { return resident_[u]; }
    int  pins(uint32_t u) const { return pins_[u]; }

    // returns what was given up
    Units admit(uint32_t u, bool cold = false) {
        const bool expected = n_pinned() < cache.n_slots();
        Units evicted;
        const bool ok = cache.admit(u, cold, evicted);
        CHECK_EQ(ok, expected);
        CHECK(evicted.size() <= (ok ? 1u : 0u));
        forget(evicted);
        if (ok) {
            resident_[u] = true;
            memset(cache.memory(u), mark(u), kSlot);
        }
        return evicted;
    }

    void evict(uint32_t u) { cache.evict(u); resident_[u] = false; }
    void pin(uint32_t u)   { cache.pin(u); pins_[u]++; }
    void unpin(uint32_t u) { cache.unpin(u); pins_[u]--; }

    Units set_capacity(uint64_t n_bytes) {
        Units evicted;
        const bool fits = cache.set_capacity(n_bytes, evicted);
        CHECK_EQ(fits, n_pinned() * kSlot <= n_bytes);
        forget(evicted);
        limit_bytes_ = fits ? n_bytes : n_pinned() * kSlot;
        return evicted;
    }

    void check() {
        const auto n = std::count(resident_.begin(), resident_.end(), true);
        CHECK_EQ(cache.n_resident(), n);
        CHECK_EQ(cache.used_bytes(), uint64_t(n) * kSlot);
        CHECK_EQ(cache.n_pinned(), n_pinned());
        CHECK(cache.used_bytes() <= cache.capacity_bytes());
        CHECK(cache.capacity_bytes() <= limit_bytes_);
        CHECK(cache.n_slots() <= cache.n_units());
        for (uint32_t u = 0; u < resident_.size(); ++u) {
            CHECK_EQ(cache.resident(u), bool(resident_[u]));
            CHECK_EQ(cache.pinned(u), pins_[u] > 0);
        }
    }

    // every byte of a resident unit is still its own, so no two units share memory
    void check_contents() {
        uint8_t * lowest = nullptr;
        uint8_t * highest = nullptr;
        for (uint32_t u = 0; u < resident_.size(); ++u) {
            if (!resident_[u]) {
                continue;
            }
            uint8_t * m = cache.memory(u);
            CHECK(std::all_of(m, m + kSlot, [&](uint8_t b) { return b == mark(u); }));
            CHECK_EQ(uint64_t(uintptr_t(m)) % page_size(), 0);
            lowest  = !lowest || m < lowest ? m : lowest;
            highest = std::max(highest, m + kSlot);
        }
        CHECK(uint64_t(highest - lowest) <= cache.capacity_bytes()); // side by side
    }

    SlotCache cache;

private:
    static uint8_t mark(uint32_t u) { return uint8_t(u % 251 + 1); }
    uint32_t n_pinned() const {
        return uint32_t(std::count_if(pins_.begin(), pins_.end(), [](int n) { return n > 0; }));
    }
    void forget(const Units & evicted) {
        for (uint32_t v : evicted) {
            CHECK(resident_[v] && pins_[v] == 0);
            resident_[v] = false;
        }
    }

    std::vector<bool> resident_;
    std::vector<int> pins_;
    uint64_t limit_bytes_ = 0;
};

void random_step(Pair & p, check::Random & random, const char * policy) {
    const uint32_t n = p.cache.n_units();
    const uint32_t u = random.below(n);
    switch (random.below(16)) {
        case 0: p.set_capacity(random.below(uint32_t(n * kSlot + kSlot))); break;
        case 1: p.cache.set_policy(make_policy(random.below(2) ? policy : "lru", {}, n, n / 4)); break;
        case 2: case 3:
            if (p.resident(u)) {
                p.pin(u);
            }
            break;
        case 4: case 5: case 6:
            for (uint32_t v = 0; v < n; ++v) {
                if (p.pins(v) > 0 && random.below(2)) {
                    p.unpin(v);
                }
            }
            break;
        case 7:
            if (p.resident(u) && p.pins(u) == 0) {
                p.evict(u);
            }
            break;
        default:
            if (p.resident(u)) {
                p.cache.touch(u);
            } else {
                p.admit(u, random.below(8) == 0);
            }
    }
}

} // namespace

TEST(agrees_with_a_plain_record_for_random_operations) {
    for (const char * policy : {"lru", "slru", "lfu"}) {
        for (const uint32_t n : {1u, 2u, 48u}) {
            check::Random random(n);
            Pair p(n);
            p.set_capacity(n * kSlot / 4);
            for (int i = 0; i < 4000; ++i) {
                random_step(p, random, policy);
                p.check();
                if (i % 50 == 0) {
                    p.check_contents();
                }
            }
            p.check_contents();
        }
    }
}

TEST(evicts_in_the_order_of_the_policy) {
    Pair p(5);
    p.set_capacity(2 * kSlot + 1); // two slots: a part of one is none
    CHECK_EQ(p.cache.capacity_bytes(), 2 * kSlot);
    CHECK_EQ(p.admit(0), Units{});
    CHECK_EQ(p.admit(1), Units{});
    p.cache.touch(0);
    CHECK_EQ(p.admit(2), Units{1});
    CHECK_EQ(p.admit(3, true), Units{0});
    CHECK_EQ(p.admit(1), Units{3}); // cold: first to go
}

TEST(pinned_units_stay) {
    Pair p(4);
    p.set_capacity(2 * kSlot);
    p.admit(0);
    p.pin(0);
    p.pin(0); // twice: two contexts
    p.admit(1);
    CHECK_EQ(p.admit(2), Units{1});
    p.unpin(0);
    CHECK(p.cache.pinned(0));
    p.pin(2);
    CHECK_EQ(p.admit(3), Units{}); // refused, and nothing given up in vain
    CHECK_EQ(p.set_capacity(kSlot), Units{});
    CHECK_EQ(p.cache.capacity_bytes(), 2 * kSlot); // what is pinned
    p.unpin(0);
    CHECK_EQ(p.set_capacity(kSlot), Units{0});
    p.check_contents();
}

// A smaller cache packs its units together: contents move with them.
TEST(a_smaller_cache_keeps_the_most_useful_units_and_their_contents) {
    Pair p(32);
    p.set_capacity(32 * kSlot);
    for (uint32_t u = 0; u < 32; ++u) {
        p.admit(u);
    }
    for (uint32_t u : {31, 3, 17, 30}) {
        p.cache.touch(u);
    }
    p.pin(29);
    const Units evicted = p.set_capacity(5 * kSlot);
    CHECK_EQ(evicted.size(), 27);
    CHECK_EQ(evicted.front(), 0);
    for (uint32_t u : {31, 3, 17, 30, 29}) {
        CHECK(p.cache.resident(u));
    }
    p.check();
    p.check_contents();
    p.set_capacity(8 * kSlot);
    p.admit(0);
    p.check_contents();
}

// The accounting against what the kernel says.
TEST(memory_returns_to_the_system) {
    const uint32_t n = 64;
    Pair p(n);
    p.set_capacity(n * kSlot);
    uint8_t * base = nullptr;
    for (uint32_t u = 0; u < n; ++u) {
        p.admit(u);
        base = !base || p.cache.memory(u) < base ? p.cache.memory(u) : base;
    }
    const auto in_memory = [&] { return check::resident_bytes(base, n * kSlot); };
    CHECK_EQ(in_memory(), n * kSlot);
    p.set_capacity(5 * kSlot);
    CHECK_EQ(in_memory(), 5 * kSlot);
    p.check_contents();
    p.set_capacity(0);
    CHECK_EQ(in_memory(), 0);
    CHECK_EQ(p.admit(0), Units{});
    CHECK_EQ(p.cache.n_resident(), 0);
    p.set_capacity(1ull << 50); // more than there are units
    CHECK_EQ(p.cache.n_slots(), n);
    for (uint32_t u = 0; u < n; ++u) {
        p.admit(u);
    }
    CHECK(in_memory() <= p.cache.capacity_bytes());
}

TEST(a_cache_of_nothing) {
    SlotCache c(0, 0);
    Units evicted;
    CHECK(c.set_capacity(0, evicted));
    CHECK(c.set_capacity(1u << 20, evicted));
    CHECK_EQ(c.capacity_bytes(), 0);
}

TEST(guesses_must_be_surer_the_more_is_wasted) {
    WasteLimit limit(1e6);
    const float at_first = limit.least_p;
    for (int i = 0; i < 400; ++i) { // one of twenty
        limit.judge(i % 20 == 0 ? 10000 : 0, 10000);
    }
    const float little = limit.least_p;
    CHECK(little < at_first);
    for (int i = 0; i < 400; ++i) { // one of five
        limit.judge(i % 5 == 0 ? 10000 : 0, 10000);
    }
    CHECK(limit.least_p > at_first);
    CHECK(limit.least_p <= 0.95f);
    for (int i = 0; i < 400; ++i) {
        limit.judge_demand(10000);
    }
    CHECK_EQ(limit.least_p, little);
}
