// Nanoseconds of one retention decision at 6144 units (48 layers of 128 experts) and at 300,000 (clusters of neurons), a quarter of
// them resident: a hit (touch) and a miss (eviction and admission, no I/O). One JSON line for each policy; the median of 9 rounds.
#include "cache.h"
#include "memory.h"
#include "scheduler.h"
#include "support.h"

#include <algorithm>
#include <cstdio>
#include <vector>

using namespace ls;

namespace {

constexpr int kOperations = 20000, kRounds = 9;

template <typename F> double median_ns(F && body) {
    std::vector<double> ns;
    for (int round = 0; round < kRounds; ++round) {
        const uint64_t begin = now_ns();
        for (int i = 0; i < kOperations; ++i) {
            body();
        }
        ns.push_back(double(now_ns() - begin) / kOperations);
    }
    std::sort(ns.begin(), ns.end());
    return ns[kRounds / 2];
}

void measure(const char * name, uint32_t n_units) {
    const uint32_t n_resident = n_units / 4;
    SlotCache cache(n_units, page_size());
    std::vector<uint32_t> ignored;
    cache.set_policy(make_policy(name, {}, n_units, n_resident));
    cache.set_capacity(n_resident * page_size(), ignored);
    check::Random random(1);
    std::vector<uint32_t> evicted;
    std::vector<uint32_t> resident;
    const auto admit_missing = [&] {
        uint32_t u = random.below(n_units);
        while (cache.resident(u)) {
            u = (u + 1) % n_units;
        }
        evicted.clear();
        cache.admit(u, false, evicted);
    };
    for (uint32_t i = 0; i < 4 * n_resident; ++i) {
        admit_missing(); // full, and past the first pages
    }
    for (uint32_t u = 0; u < n_units; ++u) {
        if (cache.resident(u)) {
            resident.push_back(u);
        }
    }
    const double hit = median_ns([&] { cache.touch(resident[random.below(uint32_t(resident.size()))]); });
    const double miss = median_ns(admit_missing);
    printf("{\"policy\": \"%s\", \"n_units\": %u, \"n_resident\": %u, \"hit_ns\": %.0f, \"miss_ns\": %.0f}\n", name, n_units,
        cache.n_resident(), hit, miss);
}

} // namespace

int main() {
    for (const char * name : {"lru", "lfu", "slru", "hotcold", "lean"}) {
        measure(name, 6144);
        measure(name, 300000);
    }
}
