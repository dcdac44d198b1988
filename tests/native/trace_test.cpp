#include "check.h"
#include "support.h"

#include "replay.h"
#include "trace.h"

#include <cmath>
#include <fstream>
#include <iterator>

using namespace ls;

namespace {

const std::vector<TraceLayer> kLayers = {{0, 8, 4096}, {3, 300, 4096}};
using Units = std::vector<uint32_t>;

std::vector<Arrival> all(const Units & units, Arrival a) {
    return std::vector<Arrival>(units.size(), a);
}

// turns of layer 0, one token each
void write_turns(const std::string & path, const std::vector<Units> & turns, uint32_t n_units = 8) {
    TraceWriter w(path, {{0, n_units, 4096}}, "");
    for (const Units & units : turns) {
        w.tokens(1);
        w.need(0, false, units, all(units, Arrival::missed), nullptr);
    }
}

uint64_t misses(const std::string & path, const char * policy, uint32_t n_capacity, uint64_t n_warmup = 0) {
    ReplayOptions o;
    o.policy = policy;
    o.n_capacity = n_capacity;
    o.n_warmup_tokens = n_warmup;
    return replay(path, o).n_misses;
}

check::Bytes read_file(const std::string & path) {
    std::ifstream f(path, std::ios::binary);
    return check::Bytes(std::istreambuf_iterator<char>(f), std::istreambuf_iterator<char>());
}

void write_file(const std::string & path, const check::Bytes & bytes) {
    std::ofstream(path, std::ios::binary).write((const char *) bytes.data(), std::streamsize(bytes.size()));
}

} // namespace

TEST(what_is_written_is_read_back) {
    check::ScratchFolder folder;
    const std::string path = folder.path("a.trace");
    std::vector<float> p(300, 0.0f), margin(300, -9.0f);
    p[7] = 0.5f;
    p[299] = 1.0f;
    margin[0] = -2.5f;
    margin[130] = 3.25f;
    {
        TraceWriter w(path, kLayers, "\"model\":\"x\"");
        w.tokens(700);
        w.predict(1, 2, p.data());
        w.need(1, false, {0, 1, 299}, {Arrival::hit, Arrival::late, Arrival::ahead}, margin.data());
        w.need(0, true, {2}, {Arrival::missed}, nullptr);
        CHECK(w.flush());
    }
    TraceReader r(path);
    CHECK_EQ(r.layers().size(), 2);
    CHECK_EQ(r.layers()[1].block, 3);
    CHECK_EQ(r.layers()[1].n_units, 300);
    CHECK(r.header().find("\"model\":\"x\"") != std::string::npos);
    for (int round = 0; round < 2; ++round, r.rewind()) {
        TraceEvent e;
        REQUIRE(r.next(e) && e.kind == TraceEvent::kTokens);
        CHECK_EQ(e.n_tokens, 700);
        REQUIRE(r.next(e) && e.kind == TraceEvent::kPredict);
        CHECK_EQ(e.lead, 2);
        CHECK_EQ(e.units, (Units{7, 299}));
        CHECK(std::fabs(e.p[0] - 0.5f) < 0.003f && e.p[1] == 1.0f);
        REQUIRE(r.next(e) && e.kind == TraceEvent::kNeed);
        CHECK(!e.pass);
        CHECK_EQ(e.units, (Units{0, 1, 299}));
        CHECK_EQ(e.arrival, (std::vector<Arrival>{Arrival::hit, Arrival::late, Arrival::ahead}));
        REQUIRE(e.margin.size() == 300);
        CHECK(e.margin[0] == -2.5f && e.margin[130] == 3.25f && e.margin[5] == TraceEvent::kNoMargin);
        REQUIRE(r.next(e) && e.pass && e.margin.empty());
        CHECK(!r.next(e));
    }
}

TEST(damaged_traces_are_refused) {
    check::ScratchFolder folder;
    const std::string good = folder.path("good.trace"), bad = folder.path("bad.trace");
    write_turns(good, {{0, 1}, {2, 3}, {1, 7}});
    const check::Bytes bytes = read_file(good);
    const auto status_of = [&](const check::Bytes & b) {
        write_file(bad, b);
        return check::error_of([&] { misses(bad, "lru", 2); }).status;
    };
    CHECK_EQ(status_of(bytes), LS_OK);
    for (size_t n = 0; n < bytes.size(); ++n) { // cut anywhere: between two events it is a shorter trace, else it says so
        write_file(bad, check::Bytes(bytes.begin(), bytes.begin() + std::ptrdiff_t(n)));
        const ls_error e = check::error_of([&] { misses(bad, "lru", 2); });
        CHECK(e.status == LS_OK || e.status == LS_ERR_FORMAT);
        CHECK(n >= 66 || e.status == LS_ERR_FORMAT); // where the header ends
    }
    check::Random random(5);
    for (int i = 0; i < 400; ++i) { // no byte may crash it
        check::Bytes b = bytes;
        b[random.below(uint32_t(b.size()))] = uint8_t(random.below(256));
        const int s = status_of(b);
        CHECK(s == LS_OK || s == LS_ERR_FORMAT);
    }
    CHECK_EQ(check::error_of([&] { misses(folder.path("none.trace"), "lru", 2); }).status, LS_ERR_NOT_FOUND);
}

TEST(optimum_is_the_textbook_example) {
    check::ScratchFolder folder;
    const std::string path = folder.path("a.trace");
    write_turns(path, {{0}, {1}, {2}, {3}, {0}, {1}, {4}, {0}, {1}, {2}, {3}, {4}});
    CHECK_EQ(misses(path, "belady", 3), 7);
    CHECK_EQ(misses(path, "lru", 3), 10);
    CHECK_EQ(misses(path, "belady", 8), 5);
    CHECK_EQ(misses(path, "lru", 8), 5);
}

TEST(no_policy_beats_the_optimum) {
    check::ScratchFolder folder;
    const std::string path = folder.path("a.trace");
    check::Random random(1);
    std::vector<Units> turns;
    for (int t = 0; t < 2000; ++t) {
        const uint32_t a = random.below(20) * random.below(20) / 20, b = 20 + random.below(20) * random.below(20) / 20;
        turns.push_back({a, b});
    }
    write_turns(path, turns, 40);
    for (uint32_t n : {4u, 10u, 20u, 40u}) {
        const uint64_t optimum = misses(path, "belady", n);
        for (const char * policy : {"lru", "lfu", "slru", "hotcold", "lean"}) {
            CHECK(misses(path, policy, n) >= optimum);
        }
    }
}

TEST(warm_up_is_not_counted) {
    check::ScratchFolder folder;
    const std::string path = folder.path("a.trace");
    write_turns(path, {{0}, {1}, {0}, {2}});
    CHECK_EQ(misses(path, "lru", 8, 2), 1);
}

TEST(turns_that_need_more_than_fits_are_counted) {
    check::ScratchFolder folder;
    const std::string path = folder.path("a.trace");
    write_turns(path, {{0, 1, 2, 3}, {0, 1, 2, 3}});
    for (const char * policy : {"lru", "lfu", "slru", "hotcold", "lean", "belady"}) {
        ReplayOptions o;
        o.policy = policy;
        o.n_capacity = 2;
        CHECK_EQ(replay(path, o).n_oversized, 2);
    }
}

TEST(summary_counts_recall_and_arrivals) {
    check::ScratchFolder folder;
    const std::string path = folder.path("a.trace");
    {
        TraceWriter w(path, kLayers, "");
        w.tokens(1);
        const float p[8] = {0.9f, 0.1f, 0.8f, 0.0f, 0.7f, 0.0f, 0.0f, 0.0f};
        w.predict(0, 1, p);
        w.need(0, false, {0, 4}, {Arrival::ahead, Arrival::missed}, nullptr); // 0 is among the two likeliest, 4 among the four
    }
    const std::string json = trace_summary_json(path);
    CHECK(json.find("\"recall\":[{\"lead\":1,\"block\":0,\"at_k\":0.5,\"at_2k\":1,\"n\":2}]") != std::string::npos);
    CHECK(json.find("\"n_uses\":2,\"n_hit\":0,\"n_ahead\":1,\"n_late\":0,\"n_missed\":1") != std::string::npos);
}
