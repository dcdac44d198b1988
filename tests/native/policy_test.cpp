#include "check.h"
#include "support.h"

#include "policy.h"
#include "scheduler.h"

#include <algorithm>
#include <cstdio>
#include <list>
#include <numeric>
#include <random>

using namespace ls;

namespace {

const auto any = [](uint32_t) { return true; };

std::unique_ptr<Policy> make(const char * name, uint32_t n_units = 16, uint32_t n_capacity = 8, PolicyParams params = {}) {
    return make_policy(name, params, n_units, n_capacity);
}

// the order in which everything would be given up; leaves the policy empty
std::vector<int64_t> victims(Policy & p) {
    std::vector<int64_t> order;
    for (int64_t u = p.victim(any); u >= 0; u = p.victim(any)) {
        order.push_back(u);
        p.erase(uint32_t(u));
    }
    return order;
}

using Order = std::vector<int64_t>;

} // namespace

TEST(lru_gives_up_the_longest_unused) {
    auto p = make("lru");
    for (uint32_t u : {0, 1, 2, 3}) {
        p->insert(u);
    }
    p->touch(0);
    p->touch(2);
    p->erase(3);
    CHECK_EQ(victims(*p), (Order{1, 0, 2}));
}

TEST(cold_units_go_first) {
    for (const char * name : {"lru", "slru", "lfu", "hotcold", "lean"}) {
        auto p = make(name);
        p->insert(0);
        p->insert(1);
        p->insert_cold(2);
        CHECK_EQ(p->victim(any), 2);
        p->touch(2); // used after all
        CHECK(p->victim(any) != 2);
    }
}

// A pass over everything comes round in the same order: what was read last is needed last.
TEST(cold_units_go_latest_first) {
    for (const char * name : {"lru", "slru", "lfu", "hotcold", "lean"}) {
        auto p = make(name);
        p->insert(0);
        p->insert_cold(1);
        p->insert_cold(2);
        p->insert(3);
        p->insert_cold(4);
        CHECK_EQ(victims(*p), (Order{4, 2, 1, 0, 3}));
    }
}

TEST(victim_must_be_allowed) {
    for (const char * name : {"lru", "slru", "lfu", "hotcold", "lean"}) {
        auto p = make(name);
        CHECK_EQ(p->victim(any), -1); // empty
        for (uint32_t u : {4, 5, 6}) {
            p->insert(u);
        }
        CHECK_EQ(p->victim([](uint32_t u) { return u == 6; }), 6);
        CHECK_EQ(p->victim([](uint32_t) { return false; }), -1);
        CHECK_EQ(victims(*p), (Order{4, 5, 6}));
    }
}

TEST(lfu_keeps_the_often_used) {
    auto p = make("lfu");
    for (uint32_t u : {0, 1, 2}) {
        p->insert(u);
    }
    for (int i = 0; i < 5; ++i) {
        p->touch(0);
    }
    p->touch(2);
    CHECK_EQ(victims(*p), (Order{1, 2, 0}));
}

TEST(lfu_ages_by_its_half_life) {
    for (const double half_life : {4.0, 100000.0}) {
        PolicyParams params;
        params.half_life = half_life;
        auto p = make("lfu", 16, 8, params);
        p->insert(0);
        for (int i = 0; i < 10; ++i) {
            p->touch(0); // popular once
        }
        p->insert(1);
        for (int i = 0; i < 3; ++i) {
            p->touch(1); // popular now
            for (uint32_t u : {2, 3, 4, 5, 6, 7}) {
                i == 0 ? p->insert(u) : p->touch(u);
            }
        }
        p->touch(1);
        const Order order = victims(*p);
        const auto place = [&](int64_t u) { return std::find(order.begin(), order.end(), u) - order.begin(); };
        CHECK_EQ(place(0) < place(1), half_life == 4.0);
        CHECK_EQ(order.size(), 8);
    }
}

TEST(lfu_remembers_units_that_were_given_up) {
    auto p = make("lfu");
    p->insert(0);
    p->touch(0);
    p->touch(0);
    p->erase(0);
    p->insert(1);
    p->touch(1);
    p->insert(0); // its third use and its fourth
    CHECK_EQ(victims(*p), (Order{1, 0}));
}

TEST(lfu_scores_stay_ordered_after_many_uses) {
    PolicyParams params;
    params.half_life = 1; // scores grow by one a use
    auto p = make("lfu", 4, 2, params);
    p->insert(0);
    p->insert(1);
    for (int i = 0; i < 300000; ++i) {
        p->touch(uint32_t(i & 1));
    }
    CHECK_EQ(victims(*p), (Order{0, 1}));
}

TEST(slru_protects_the_second_use_from_a_scan) {
    auto p = make("slru");
    p->insert(0);
    p->insert(1);
    p->touch(0);
    for (uint32_t u : {2, 3, 4, 5}) {
        p->insert(u);
    }
    CHECK_EQ(victims(*p), (Order{1, 2, 3, 4, 5, 0}));
}

TEST(slru_demotes_what_overflows_the_protected_segment) {
    PolicyParams params;
    params.protected_share = 0.25; // two of eight
    auto p = make("slru", 16, 8, params);
    for (uint32_t u : {0, 1, 2, 3}) {
        p->insert(u);
    }
    for (uint32_t u : {0, 1, 2}) {
        p->touch(u); // 0 overflows and becomes the newest on probation
    }
    CHECK_EQ(victims(*p), (Order{3, 0, 1, 2}));
}

TEST(slru_without_room_for_protection_is_lru) {
    auto p = make("slru", 16, 0);
    for (uint32_t u : {0, 1, 2}) {
        p->insert(u);
    }
    p->touch(0);
    CHECK_EQ(victims(*p), (Order{1, 2, 0}));
}

TEST(lru_agrees_with_a_list_for_random_operations) {
    check::Random random(3);
    auto p = make("lru", 64, 32);
    std::list<uint32_t> model;
    for (int i = 0; i < 20000; ++i) {
        const uint32_t u = random.below(64);
        const auto at = std::find(model.begin(), model.end(), u);
        if (at == model.end()) {
            const bool cold = random.below(5) == 0;
            cold ? p->insert_cold(u) : p->insert(u);
            model.insert(cold ? model.begin() : model.end(), u);
        } else if (random.below(3) == 0) {
            p->erase(u);
            model.erase(at);
        } else {
            p->touch(u);
            model.splice(model.end(), model, at);
        }
        REQUIRE(p->victim(any) == (model.empty() ? -1 : int64_t(model.front())));
    }
}

TEST(what_is_in_use_is_no_victim_and_keeps_its_place) {
    for (const char * name : {"lfu", "lean"}) {
        auto p = make(name);
        for (uint32_t u : {0, 1, 2, 3}) {
            p->insert(u);
        }
        p->insert_cold(4);
        p->hold(0);
        p->hold(4);
        p->touch(0);
        CHECK_EQ(p->victim(any), 1);
        p->release(0);
        p->release(4);
        p->hold(2);
        p->erase(2); // given up all the same
        p->release(2);
        CHECK_EQ(victims(*p), (Order{4, 1, 3, 0}));
    }
}

// Clusters of neurons: hundreds of thousands, and hundreds of decisions for each layer of each token.
TEST(a_decision_takes_no_longer_among_many_units) {
    constexpr uint32_t kMany = 300000, kResident = kMany / 4, kOperations = 100000;
    for (const char * name : {"lru", "slru", "lfu", "lean"}) {
        auto p = make(name, kMany, kResident);
        std::vector<uint32_t> absent(kMany - kResident);
        std::iota(absent.begin(), absent.end(), kResident);
        std::shuffle(absent.begin(), absent.end(), std::minstd_rand(1)); // as uses come: all over memory
        for (uint32_t u = 0; u < kResident; ++u) {
            p->insert(u);
            if (u % 8 == 0) {
                p->hold(u);
            }
        }
        const bool orders = p->victim(any) % 8 != 0; // the others hold what was used last, which is far from their victims
        const auto allowed = [&](uint32_t u) { return !orders || u >= kResident || u % 8 != 0; };
        const uint64_t begin = now_ns();
        for (uint32_t i = 0; i < kOperations; ++i) {
            const uint32_t out = uint32_t(p->victim(allowed)), in = absent[i % absent.size()];
            p->erase(out);
            p->insert(in);
            absent[i % absent.size()] = out;
            p->touch(in);
        }
        const uint64_t ns = (now_ns() - begin) / (2 * kOperations); // a victim with its insertion, and a use
        printf("%s: %u ns a decision among %u units\n", name, unsigned(ns), kMany);
        CHECK(ns < 2000); // about 100 where nothing else runs
    }
}

TEST(lean_keeps_what_came_near_at_its_last_turn) {
    auto p = make("lean");
    const float margin[4] = {2.0f, -0.1f, -5.0f, 1.0f};
    p->ranked(0, margin, 4);
    for (uint32_t u : {0, 1, 2, 3}) {
        p->insert(u);
    }
    CHECK_EQ(victims(*p), (Order{2, 1, 3, 0}));
}

TEST(lean_keeps_what_is_predicted_until_its_turn) {
    auto p = make("lean");
    for (uint32_t u : {0, 1, 2}) {
        p->insert(u);
    }
    const float soon[3] = {0.01f, 0.95f, 0.6f};
    p->predicted(0, soon, 3);
    CHECK_EQ(p->victim(any), 0);
    CHECK(p->worth_less(0, 1) && !p->worth_less(1, 0));
    p->ranked(0, nullptr, 3); // its turn came
    p->touch(0);
    p->touch(0);
    CHECK_EQ(victims(*p), (Order{1, 2, 0}));
}

// A guess may take the place of what is used more seldom than the guess is likely, however often that was used before.
TEST(lean_weighs_a_guess_against_how_often_a_unit_is_used) {
    auto p = make("lean", 64, 32);
    for (int round = 0; round < 64; ++round) {
        p->next_round();
        p->ranked(0, nullptr, 64);
        for (uint32_t u = 0; u < 8; ++u) { // one of eight units in every round, another in every eighth
            const uint32_t used = u == 0 ? 0 : 8 * u + uint32_t(round) % 8;
            round < 8 && (u > 0 || round == 0) ? p->insert(used) : p->touch(used);
        }
    }
    std::vector<float> soon(64, 0.0f);
    soon[1] = 0.5f;   // not resident
    soon[2] = 0.05f;
    p->predicted(1, &soon[1], 7);
    CHECK(p->worth_less(9, 1));  // used in one round of eight
    CHECK(!p->worth_less(9, 2));
    CHECK(!p->worth_less(0, 1)); // in every one
    p->ranked(1, nullptr, 7);    // its turn has passed
    CHECK(!p->worth_less(9, 1));
}

TEST(lean_is_not_swept_by_a_scan) {
    auto p = make("lean", 64, 8);
    for (int i = 0; i < 8; ++i) {
        for (uint32_t u : {0, 1, 2, 3}) {
            i == 0 ? p->insert(u) : p->touch(u);
        }
    }
    uint32_t held = 63;
    p->insert(held);
    for (uint32_t u = 4; u < 63; ++u) { // each once, each in place of the one before
        CHECK_EQ(p->victim(any), held);
        p->erase(held);
        p->insert(u);
        held = u;
    }
}

TEST(lean_finds_the_least_key_among_many) {
    check::Random random(7);
    auto p = make("lean", 500, 100);
    std::vector<float> margin(500);
    std::vector<bool> in(500, false);
    for (int round = 0; round < 300; ++round) {
        for (float & m : margin) {
            m = float(random.below(1000)) / 100.0f - 6.0f;
        }
        p->ranked(0, margin.data(), 500);
        for (int i = 0; i < 40; ++i) {
            const uint32_t u = random.below(500);
            if (!in[u]) {
                p->insert(u);
            } else if (random.below(2)) {
                p->touch(u);
                continue;
            } else {
                p->erase(u);
            }
            in[u] = !in[u];
        }
        const int64_t v = p->victim(any), odd = p->victim([](uint32_t u) { return u % 2 == 1; });
        for (uint32_t u = 0; u < 500; ++u) {
            CHECK(v < 0 || !in[u] || !p->worth_less(u, uint32_t(v)));
            CHECK(odd < 0 || !in[u] || u % 2 == 0 || !p->worth_less(u, uint32_t(odd)));
        }
    }
}

TEST(lean_stays_ordered_after_many_uses) {
    PolicyParams params;
    params.half_life = 1; // time grows by one a use, and starts over many times
    auto p = make("lean", 4, 2, params);
    p->insert(0);
    p->insert(1);
    for (int i = 0; i < 300000; ++i) {
        p->touch(uint32_t(i & 1));
    }
    CHECK_EQ(victims(*p), (Order{0, 1}));
}

TEST(hotcold_never_gives_up_the_most_used) {
    auto p = make("hotcold", 16, 4); // two hot ones, chosen after 128 uses
    for (uint32_t u : {0, 1, 2, 3}) {
        p->insert(u);
    }
    for (int i = 0; i < 62; ++i) {
        p->touch(1);
        p->touch(3);
    }
    p->touch(0);
    p->touch(2);
    CHECK_EQ(victims(*p), (Order{0, 2, 1, 3}));
}

TEST(names) {
    for (const char * name : {"lru", "slru", "lfu", "hotcold", "lean"}) {
        CHECK_EQ(std::string(make(name)->name()), name);
    }
    const ls_error e = check::error_of([] { make("mru"); });
    CHECK_EQ(e.status, LS_ERR_ARGUMENT);
    CHECK(std::string(e.message).find("mru") != std::string::npos);
}

TEST(parameters) {
    CHECK_EQ(parse_policy_params("slru", "{\"protected_share\": 0.5}").protected_share, 0.5);
    CHECK_EQ(parse_policy_params("lfu", "{\"half_life\":4096}").half_life, 4096.0);
    CHECK_EQ(parse_policy_params("lru", "").half_life, 0.0);
    CHECK_EQ(parse_policy_params("lru", "{}").protected_share, 0.8);
    const std::pair<const char *, const char *> bad[] = {
        {"slru", "{\"protected_share\":0}"}, {"slru", "{\"protected_share\":1}"}, {"slru", "{\"protected_share\":\"x\"}"},
        {"slru", "{\"protected_share\":nan}"}, {"slru", "{\"half_life\":4}"}, {"lfu", "{\"half_life\":0.5}"},
        {"lfu", "{\"half_life\":-1}"}, {"lfu", "{\"half_life\":}"}, {"lfu", "{\"half_life\""}, {"lru", "{\"half_life\":4}"},
        {"lean", "{\"protected_share\":0.5}"}, {"hotcold", "{\"hot_share\":2}"}, {"lru", "\""}, {"lfu", "{\"unknown\":1}"}, {"lfu", "half_life=4"},
    };
    for (const auto & [name, json] : bad) {
        const ls_error e = check::error_of([&] { parse_policy_params(name, json); });
        if (e.status != LS_ERR_ARGUMENT) {
            check::failed(__FILE__, __LINE__, std::string(name) + " takes " + json);
        }
    }
}
