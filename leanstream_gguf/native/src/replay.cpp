#include "replay.h"

#include "json.h"
#include "policy.h"
#include "scheduler.h"
#include "status.h"
#include "trace.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

namespace ls {

namespace {

std::vector<uint32_t> first_units(const TraceReader & trace) {
    std::vector<uint32_t> first = {0};
    for (const TraceLayer & l : trace.layers()) {
        first.push_back(first.back() + l.n_units);
    }
    return first;
}

// Gives up the unit whose next use is farthest; the least misses there can be.
class Belady final : public Policy {
public:
    Belady(TraceReader & trace, const std::vector<uint32_t> & first) : uses_(first.back()), next_(first.back(), 0) {
        TraceEvent e;
        for (uint64_t turn = 0; trace.next(e);) {
            if (e.kind == TraceEvent::kNeed) {
                for (uint32_t u : e.units) {
                    uses_[first[e.layer] + u].push_back(turn);
                }
                turn++;
            }
        }
        trace.rewind();
    }

    void insert(uint32_t u) override { order_.insert({key(u, ++next_[u]), u}); }
    void insert_cold(uint32_t u) override { insert(u); }
    void touch(uint32_t u) override { erase(u); insert(u); }
    void erase(uint32_t u) override { order_.erase({key(u, next_[u]), u}); }

    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override {
        for (auto it = order_.rbegin(); it != order_.rend(); ++it) {
            if (allowed(it->second)) {
                return it->second;
            }
        }
        return -1;
    }

    const char * name() const override { return "belady"; }

private:
    uint64_t key(uint32_t u, size_t i) const { return i < uses_[u].size() ? uses_[u][i] : UINT64_MAX; }

    std::vector<std::vector<uint64_t>> uses_; // [unit] turns that use it
    std::vector<size_t> next_;                // [unit] uses that have been
    std::set<std::pair<uint64_t, uint32_t>> order_;
};

class Replay {
public:
    Replay(TraceReader & trace, const ReplayOptions & options)
        : trace_(trace), options_(options), first_(first_units(trace)), resident_(first_.back(), 0), now_(first_.back(), 0) {
        if (options.n_capacity == 0) {
            throw Error(LS_ERR_ARGUMENT, "a replay needs room for at least one unit");
        }
        const PolicyParams params = options.policy == "belady" ? PolicyParams() : parse_policy_params(options.policy, options.params_json);
        policy_ = options.policy == "belady" ? std::make_unique<Belady>(trace, first_)
                                             : make_policy(options.policy, params, first_.back(), options.n_capacity);
    }

    ReplayResult run() {
        TraceEvent e;
        uint64_t n_seen = 0, spent_ns = 0, uses = 0;
        while (trace_.next(e)) {
            if (e.kind == TraceEvent::kTokens) {
                counting_ = n_seen >= options_.n_warmup_tokens;
                n_seen += e.n_tokens;
                result_.n_tokens += counting_ ? e.n_tokens : 0;
                continue;
            }
            const uint64_t begin = now_ns();
            e.kind == TraceEvent::kPredict ? predict(e) : need(e);
            spent_ns += now_ns() - begin;
            uses += e.kind == TraceEvent::kNeed ? e.units.size() : 0;
        }
        result_.ns_per_use = uses ? double(spent_ns) / double(uses) : 0;
        return result_;
    }

private:
    void predict(const TraceEvent & e) {
        p_.assign(trace_.layers()[e.layer].n_units, 0.0f);
        for (size_t i = 0; i < e.units.size(); ++i) {
            p_[e.units[i]] = e.p[i];
        }
        policy_->predicted(first_[e.layer], p_.data(), uint32_t(p_.size()));
    }

    void need(const TraceEvent & e) {
        const TraceLayer & layer = trace_.layers()[e.layer];
        turn_++;
        if (!e.pass) {
            policy_->ranked(first_[e.layer], e.margin.empty() ? nullptr : e.margin.data(), layer.n_units);
        }
        for (uint32_t i : e.units) {
            const uint32_t u = first_[e.layer] + i;
            now_[u] = turn_;
            if (resident_[u] && (!e.pass || options_.policy == "belady")) {
                policy_->touch(u);
            }
        }
        uint64_t n_missed = 0;
        bool room = true;
        for (uint32_t i : e.units) {
            const uint32_t u = first_[e.layer] + i;
            if (!resident_[u]) {
                n_missed++;
                room = admit(u, e.pass) && room;
            }
        }
        result_.n_oversized += counting_ && !room;
        result_.n_uses   += counting_ ? e.units.size() : 0;
        result_.n_misses += counting_ ? n_missed : 0;
        result_.missed_bytes += counting_ ? n_missed * layer.unit_bytes : 0;
    }

    bool admit(uint32_t u, bool pass) {
        if (n_resident_ == options_.n_capacity) {
            int64_t v = policy_->victim([this](uint32_t x) { return now_[x] != turn_; });
            const bool room = v >= 0;
            if (!room) { // more than fits: in turns, one after the other
                v = policy_->victim([](uint32_t) { return true; });
            }
            policy_->erase(uint32_t(v));
            resident_[size_t(v)] = 0;
            n_resident_--;
            put(u, pass);
            return room;
        }
        put(u, pass);
        return true;
    }

    void put(uint32_t u, bool pass) {
        pass ? policy_->insert_cold(u) : policy_->insert(u);
        resident_[u] = 1;
        n_resident_++;
    }

    TraceReader & trace_;
    const ReplayOptions & options_;
    std::vector<uint32_t> first_;
    std::unique_ptr<Policy> policy_;
    std::vector<uint8_t>  resident_;
    std::vector<uint64_t> now_; // [unit] the last turn that used it
    std::vector<float> p_;
    ReplayResult result_;
    uint64_t turn_ = 0;
    uint32_t n_resident_ = 0;
    bool counting_ = true;
};

struct Recall {
    uint64_t n = 0, at_k = 0, at_2k = 0;
};

// share of `used` among the k and 2k likeliest of a prediction; both ascending by unit
void count_recall(const TraceEvent & prediction, const std::vector<uint32_t> & used, Recall & out) {
    std::vector<size_t> order(prediction.units.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return prediction.p[a] > prediction.p[b]; });
    const size_t k = used.size();
    for (size_t i = 0; i < order.size() && i < 2 * k; ++i) {
        const bool found = std::binary_search(used.begin(), used.end(), prediction.units[order[i]]);
        out.at_k  += i < k && found;
        out.at_2k += found;
    }
    out.n += k;
}

} // namespace

ReplayResult replay(const std::string & trace_path, const ReplayOptions & options) {
    TraceReader trace(trace_path);
    return Replay(trace, options).run();
}

std::string trace_summary_json(const std::string & trace_path) {
    TraceReader trace(trace_path);
    const size_t n_layers = trace.layers().size();
    std::vector<std::vector<uint64_t>> arrivals(n_layers, std::vector<uint64_t>(kArrivals, 0));
    std::map<std::pair<uint8_t, uint32_t>, Recall> recall;              // [lead, layer]
    std::map<std::pair<uint8_t, uint32_t>, TraceEvent> latest;
    uint64_t n_tokens = 0, n_now = 0, n_uses = 0, n_units = 0;
    TraceEvent e;
    while (trace.next(e)) {
        if (e.kind == TraceEvent::kTokens) {
            n_tokens += n_now = e.n_tokens;
        } else if (e.kind == TraceEvent::kPredict) {
            latest[{e.lead, e.layer}] = e;
        } else {
            n_uses += e.units.size();
            for (Arrival a : e.arrival) {
                arrivals[e.layer][size_t(a)]++;
            }
            for (auto it = latest.begin(); it != latest.end();) {
                if (it->first.second != e.layer) {
                    ++it;
                    continue;
                }
                if (n_now == 1) {
                    count_recall(it->second, e.units, recall[it->first]);
                }
                it = latest.erase(it);
            }
        }
    }
    for (const TraceLayer & l : trace.layers()) {
        n_units += l.n_units;
    }
    Json j;
    {
        auto top = j.object();
        j.key("n_tokens").number(n_tokens);
        j.key("n_uses").number(n_uses);
        j.key("n_units").number(n_units);
        j.key("unit_bytes").number(trace.layers()[0].unit_bytes);
        j.key("layers");
        {
            auto list = j.array();
            for (size_t l = 0; l < n_layers; ++l) {
                auto o = j.object();
                const std::vector<uint64_t> & a = arrivals[l];
                j.key("block").number(trace.layers()[l].block);
                j.key("n_units").number(trace.layers()[l].n_units);
                j.key("n_uses").number(std::accumulate(a.begin(), a.end(), uint64_t(0)));
                j.key("n_hit").number(a[0]);
                j.key("n_ahead").number(a[1]);
                j.key("n_late").number(a[2]);
                j.key("n_missed").number(a[3]);
            }
        }
        j.key("recall");
        auto list = j.array();
        for (const auto & [where, r] : recall) {
            auto o = j.object();
            j.key("lead").number(uint32_t(where.first));
            j.key("block").number(trace.layers()[where.second].block);
            j.key("at_k").number(double(r.at_k) / double(r.n));
            j.key("at_2k").number(double(r.at_2k) / double(r.n));
            j.key("n").number(r.n);
        }
    }
    return j.text;
}

} // namespace ls
