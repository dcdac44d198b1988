// Reading clusters ahead of their layer's decision. Everything here moves reads and tells retention; no result depends on it.
#include "json.h"
#include "neurons.h"
#include "session.h"

#include <algorithm>
#include <functional>

namespace ls {

namespace {

constexpr uint32_t kTurnsLearntFrom = 64; // all of the first ones, then every fourth

bool learnt_from(uint32_t turn) {
    return turn < kTurnsLearntFrom || turn % 4 == 0;
}

} // namespace

void NeuronStore::note_decider(uint32_t layer, const Decider & decider) {
    Lock lock(mutex_);
    if (!deciders_[layer].known) { // another context may be reading it, without the lock
        deciders_[layer] = decider;
        deciders_[layer].residual = nullptr;
    }
}

// ---- a layer's turn ------------------------------------------------------------------------------------------------

void NeuronStore::guessed(const Session & session, uint32_t layer, uint8_t lead, const float * score) {
    Lock lock(mutex_);
    NeuronsAhead & a = ahead_[layer];
    NeuronGuess & g = a.guesses[lead];
    g.of = &session;
    if (learnt_from(a.n_turns)) {
        if (g.score.empty() && !score_buffers_.empty()) {
            g.score.swap(score_buffers_.back());
            score_buffers_.pop_back();
        }
        g.score.assign(score, score + layers_[layer].shape->n_ff);
        g.model.note_size(score);
    }
    g.model.probabilities(score, p_);
    if (trace_) {
        trace_guess_locked(layer, lead, p_);
    }
    if (session.lead > 0 && session.speculation.uses(lead, session.lead)) {
        read_ahead_locked(layer, lead, p_);
    }
}

void NeuronStore::forget_guesses(const Session & session) {
    Lock lock(mutex_);
    for (NeuronsAhead & a : ahead_) {
        for (NeuronGuess & g : a.guesses) {
            g.of = g.of == &session ? nullptr : g.of;
        }
    }
}

// The layer has decided, and the run has its neurons; nothing but what was expected is pinned or read for them yet.
void NeuronStore::begin_turn_locked(const Session & session, const NeuronRun & run, int64_t n_tokens) {
    const NeuronGuess * guesses = ahead_[run.layer->index].guesses;
    if (trace_) {
        trace_need_locked(run, n_tokens);
    }
    if (n_tokens == 1 && std::any_of(guesses, guesses + kLeads, [&](const NeuronGuess & g) { return g.of == &session; })) {
        learn_locked(session, run);
    }
}

void NeuronStore::learn_locked(const Session & session, const NeuronRun & run) {
    NeuronsAhead & a = ahead_[run.layer->index];
    const size_t k = run.positions.size();
    a.n_turns++;
    marks_.assign(run.layer->shape->n_ff, 0);
    for (uint32_t at : run.positions) {
        marks_[at] = 1;
    }
    for (uint8_t lead = 1; lead < kLeads; ++lead) {
        NeuronGuess & g = a.guesses[lead];
        if (g.of != &session || g.score.empty()) {
            g.of = g.of == &session ? nullptr : g.of;
            continue;
        }
        g.of = nullptr;
        g.model.probabilities(g.score.data(), p_);
        ranks_ = p_;
        const auto least_of = [&](size_t n) { // of the n likeliest
            if (n == 0 || n > ranks_.size()) {
                return n == 0 ? 2.0f : 0.0f;
            }
            std::nth_element(ranks_.begin(), ranks_.begin() + std::ptrdiff_t(n - 1), ranks_.end(), std::greater<float>());
            return ranks_[n - 1];
        };
        const float among_2k = least_of(2 * k), among_k = least_of(k);
        for (uint32_t at : run.positions) {
            a.recall[lead].k  += p_[at] >= among_k;
            a.recall[lead].k2 += p_[at] >= among_2k;
        }
        a.recall[lead].n += k;
        g.model.learn(g.score.data(), marks_);
        score_buffers_.emplace_back();
        score_buffers_.back().swap(g.score);
    }
}

// All that the layer needs has a place: what was read ahead and is not needed has lost its right to one.
void NeuronStore::end_turn_locked(uint32_t layer) {
    NeuronsAhead & a = ahead_[layer];
    Pool & pool = pools_[layers_[layer].pool];
    if (!a.waiting.empty()) {
        marks_.assign(layers_[layer].shape->n_clusters, 1);
        rerank_locked(layer, marks_, Priority::speculative);
        for (uint32_t unit : a.waiting) {
            if (pool.ahead->waiting(unit - pool.first_unit)) {
                pool.ahead->pass(unit - pool.first_unit);
            }
        }
        a.waiting.clear();
    }
    for (uint32_t unit : a.hinted) {
        pool.cache->ranked(unit - pool.first_unit, nullptr, 1);
    }
    a.hinted.clear();
}

void NeuronStore::note_evicted_locked(Pool & pool, const std::vector<uint32_t> & evicted) {
    for (uint32_t u : evicted) {
        const uint32_t unit = pool.first_unit + u;
        n_ready_ -= state_[unit] == kReady;
        state_[unit] = kAbsent;
        pool.ahead->evicted(u, layers_[layer_of_unit_[unit]].shape->stride);
    }
    counters_.evictions += evicted.size();
}

// ---- reads ---------------------------------------------------------------------------------------------------------

// Reads what is likely enough, likeliest first; drops queued reads that no longer are.
void NeuronStore::read_ahead_locked(uint32_t layer, uint8_t lead, const std::vector<float> & p) {
    const NeuronLayer & l = layers_[layer];
    Pool & pool = pools_[l.pool];
    NeuronsAhead & a = ahead_[layer];
    const uint32_t n_slots = pool.cache->n_slots();
    if (n_slots < 2 * min_slots(pool) || float(n_slots) < 2 * a.mean_units) {
        return; // no room beside what demand needs
    }
    const Priority priority = lead == kLeadBlock ? Priority::refined : Priority::speculative;
    const uint32_t k = l.shape->cluster_size;
    std::vector<std::pair<float, uint32_t>> wanted;
    marks_.assign(l.shape->n_clusters, 0);
    for (uint32_t c = 0; c < l.shape->n_clusters; ++c) {
        const auto first = p.begin() + std::ptrdiff_t(c * k), last = p.begin() + std::ptrdiff_t(std::min(uint32_t(p.size()), (c + 1) * k));
        const float likely = *std::max_element(first, last);
        const uint32_t unit = l.first_unit + c;
        if (pool.ahead->waiting(unit - pool.first_unit)) {
            marks_[c] = likely < 0.5f * waste_.least_p;
        } else if (likely >= waste_.least_p && state_[unit] == kAbsent) {
            wanted.push_back({ likely, unit });
        } else if (likely > 0.5f && state_[unit] == kReady) {
            hint_locked(unit, likely);
        }
    }
    if (!a.waiting.empty()) {
        rerank_locked(layer, marks_, priority);
    }
    std::sort(wanted.begin(), wanted.end(), std::greater<std::pair<float, uint32_t>>());
    std::vector<uint32_t> missing;
    for (const auto & [likely, unit] : wanted) {
        const uint32_t local = unit - pool.first_unit;
        if (pool.cache->resident(local)) {
            continue; // its read failed: demand shall meet that
        }
        hint_locked(unit, likely);
        std::vector<uint32_t> evicted;
        const bool room = pool.ahead->n_waiting() < n_slots / 4 && pool.cache->admit_ahead(local, evicted);
        note_evicted_locked(pool, evicted);
        if (!room) {
            break;
        }
        pool.ahead->begin(local, l.shape->stride);
        pool.cache->pin(local); // until the read is done
        state_[unit] = kLoading;
        a.waiting.push_back(unit);
        missing.push_back(unit);
    }
    start_reads_locked(missing, priority);
}

void NeuronStore::hint_locked(uint32_t unit, float p) {
    Pool & pool = pools_[layers_[layer_of_unit_[unit]].pool];
    pool.cache->predicted(unit - pool.first_unit, &p, 1);
    ahead_[layer_of_unit_[unit]].hinted.push_back(unit);
}

// Of a layer's reads ahead that have not begun: dropped if all of their clusters are unlikely, else as urgent as `priority`.
void NeuronStore::rerank_locked(uint32_t layer, const std::vector<uint8_t> & unlikely, Priority priority) {
    const uint32_t first_unit = layers_[layer].first_unit;
    const auto is_unlikely = [&](const Read & r) {
        return std::all_of(r.units.begin(), r.units.end(), [&](uint32_t unit) { return unlikely[unit - first_unit]; });
    };
    std::vector<Read> kept;
    for (size_t i = queued_.size(); i-- > 0 && queued_[i].ahead();) {
        if (queued_[i].layer == layer) {
            if (is_unlikely(queued_[i])) {
                forget_read_locked(queued_[i]);
            } else {
                queued_[i].priority = std::min(queued_[i].priority, priority);
                kept.push_back(std::move(queued_[i]));
            }
            queued_.erase(queued_.begin() + std::ptrdiff_t(i));
        }
    }
    for (Read & r : kept) {
        queue_locked(std::move(r));
    }
    for (uint32_t b = 0; b < kBuffers && n_ahead_buffers_ > 0; ++b) {
        Read & r = reads_[b];
        if (r.units.empty() || !r.ahead() || r.layer != layer) {
            continue;
        }
        if (!is_unlikely(r)) {
            if (priority < r.priority) {
                r.priority = priority;
                scheduler_->promote(tag_of(b), priority);
            }
        } else if (scheduler_->withdraw(tag_of(b), 1)) {
            forget_read_locked(r);
            release_buffer_locked(b);
        }
    }
    start_next_locked();
}

// None of it has been read: as if it had never been asked for.
void NeuronStore::forget_read_locked(const Read & read) {
    Pool & pool = pools_[layers_[read.layer].pool];
    for (uint32_t unit : read.units) {
        const uint32_t local = unit - pool.first_unit;
        pool.ahead->withdraw_bytes(layers_[read.layer].shape->stride);
        pool.ahead->forget(local);
        state_[unit] = kAbsent;
        pool.cache->unpin(local);
        if (!pool.cache->pinned(local)) {
            pool.cache->evict(local);
        }
    }
    n_loading_ -= uint32_t(read.units.size());
    counters_.needed_bytes -= read.units.size() * layers_[read.layer].shape->stride;
}

// A run waits for it now.
void NeuronStore::promote_locked(uint32_t unit) {
    const auto holds = [&](const Read & r) { return r.ahead() && std::find(r.units.begin(), r.units.end(), unit) != r.units.end(); };
    const auto queued = std::find_if(queued_.begin(), queued_.end(), holds);
    if (queued != queued_.end()) {
        Read r = std::move(*queued);
        queued_.erase(queued);
        r.priority = Priority::demand;
        queue_locked(std::move(r));
        start_next_locked();
        return;
    }
    for (uint32_t b = 0; b < kBuffers; ++b) {
        if (holds(reads_[b])) {
            reads_[b].priority = Priority::demand;
            n_ahead_buffers_--;
            scheduler_->promote(tag_of(b), Priority::demand);
            return;
        }
    }
}

// ---- traces --------------------------------------------------------------------------------------------------------

void NeuronStore::list_trace_layers(std::vector<TraceLayer> & out) const {
    for (const NeuronLayer & l : layers_) {
        out.push_back({ l.shape->block, l.shape->n_clusters, l.shape->stride });
    }
}

void NeuronStore::set_trace(std::shared_ptr<TraceWriter> trace, uint32_t first_layer) {
    Lock lock(mutex_);
    trace_ = std::move(trace);
    trace_first_layer_ = first_layer;
}

void NeuronStore::trace_guess_locked(uint32_t layer, uint8_t lead, const std::vector<float> & p) {
    constexpr float kLeast = 0.02f; // most neurons are unlikely, and a trace shall be small
    const uint32_t k = layers_[layer].shape->cluster_size;
    std::vector<float> of_cluster(layers_[layer].shape->n_clusters, 0.0f);
    for (size_t i = 0; i < p.size(); ++i) {
        of_cluster[i / k] = std::max(of_cluster[i / k], p[i] < kLeast ? 0.0f : p[i]);
    }
    trace_->predict(trace_first_layer_ + layer, lead, of_cluster.data());
}

void NeuronStore::trace_need_locked(const NeuronRun & run, int64_t n_tokens) {
    const NeuronLayer & l = *run.layer;
    std::vector<uint32_t> used;
    for (uint32_t at : run.positions) {
        used.push_back(at / l.shape->cluster_size);
    }
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    std::vector<Arrival> arrival;
    for (uint32_t c : used) {
        const uint32_t unit = l.first_unit + c;
        const bool ahead = pools_[l.pool].ahead->holds(unit - pools_[l.pool].first_unit);
        arrival.push_back(early_[unit] ? Arrival::missed : state_[unit] == kReady ? (ahead ? Arrival::ahead : Arrival::hit) : ahead ? Arrival::late : Arrival::missed);
    }
    const bool pass = n_tokens > 1 && used.size() > l.shape->n_clusters / 2;
    trace_->need(trace_first_layer_ + l.index, pass, used, arrival, nullptr);
}

// ---- numbers -------------------------------------------------------------------------------------------------------

AheadCounters NeuronStore::ahead_counters() const {
    Lock lock(mutex_);
    return ahead_counters_;
}

float NeuronStore::least_p() const {
    Lock lock(mutex_);
    return waste_.least_p;
}

void NeuronStore::write_recall(Json & j) const {
    Lock lock(mutex_);
    auto list = j.array();
    for (uint32_t lead = 1; lead < kLeads; ++lead) {
        Recall all;
        for (const NeuronsAhead & a : ahead_) {
            all.n  += a.recall[lead].n;
            all.k  += a.recall[lead].k;
            all.k2 += a.recall[lead].k2;
        }
        if (all.n == 0) {
            continue;
        }
        auto o = j.object();
        j.key("lead").number(lead);
        all.write(j);
        j.key("layers");
        auto layers = j.array();
        for (size_t l = 0; l < ahead_.size(); ++l) {
            if (ahead_[l].recall[lead].n > 0) {
                auto layer = j.object();
                j.key("layer").number(layers_[l].shape->block);
                ahead_[l].recall[lead].write(j);
            }
        }
    }
}

} // namespace ls
