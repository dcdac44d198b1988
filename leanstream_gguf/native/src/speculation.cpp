// The engine's reads ahead of a layer's choice (speculation.h). Everything here runs under the engine's lock.
#include "speculation.h"

#include "engine.h"
#include "json.h"
#include "neuron_guess.h"
#include "ops.h"
#include "trace.h"

#include <algorithm>
#include <numeric>

namespace ls {

namespace {

constexpr uint64_t kPauseNs = 50'000'000;

// Nodes of farther leads are left out, with the barrier behind them: where nothing is read ahead, guessing costs nothing.
void switch_guesses(const ggml_cgraph * graph, uint8_t farthest, const SpeculationSettings & settings) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        const ggml_custom_op_t fun = node->op == GGML_OP_CUSTOM ? op_params(node).custom.fun : nullptr;
        if (fun == op_guess || fun == op_guess_neurons) {
            const uint8_t lead = uint8_t(op_params(node).part);
            // those of neurons cost a product each: none that is not read on
            const bool on = fun == op_guess ? lead <= farthest : settings.uses(lead, farthest);
            node->flags = on ? node->flags | GGML_TENSOR_FLAG_COMPUTE : node->flags & ~GGML_TENSOR_FLAG_COMPUTE;
        }
    }
}

} // namespace

void Recall::write(Json & j) const {
    j.key("at_k").number(double(k) / double(n));
    j.key("at_2k").number(double(k2) / double(n));
    j.key("n").number(n);
}

static void write_recall(Json & j, const Recall (& recall)[kLeads]) {
    auto list = j.array();
    for (uint32_t lead = 1; lead < kLeads; ++lead) {
        if (recall[lead].n > 0) {
            auto o = j.object();
            j.key("lead").number(lead);
            recall[lead].write(j);
        }
    }
}

void Engine::add_speculation_locked(ls_stats & out) const {
    spec_.counters.add_to(out);
    neurons->ahead_counters().add_to(out);
}

std::string Engine::speculation_json() const {
    Lock lock(mutex_);
    const auto setting = [](Json & j, uint32_t v) { v == SpeculationSettings::kAuto ? j.raw("null") : j.number(v); };
    Json j;
    {
        auto top = j.object();
        setting(j.key("depth"), spec_.settings.depth);
        setting(j.key("stages"), spec_.settings.stages);
        const bool is_auto = spec_.settings.depth == SpeculationSettings::kAuto;
        j.key("lead").number(uint32_t(is_auto ? spec_.flow.best() : spec_.settings.farthest()));
        j.key("settled").boolean(!is_auto || spec_.flow.settled());
        j.key("least_p").number(double(spec_.least_p()));
        j.key("token_ns");
        {
            auto list = j.array();
            for (uint8_t c = 0; c < FlowControl::kChoices; ++c) {
                j.number(spec_.flow.mean_ns(c));
            }
        }
        j.key("recall");
        write_recall(j, spec_.recall);
        if (!neurons->empty()) {
            j.key("neurons_least_p").number(double(neurons->least_p()));
            j.key("neurons_recall");
            neurons->write_recall(j);
        }
    }
    return j.text;
}

void Engine::note_router(uint32_t layer, const Router & router) {
    Lock lock(mutex_);
    if (spec_.routers.size() < weights.moe_layers.size()) {
        spec_.routers.resize(weights.moe_layers.size());
    }
    if (spec_.routers[layer].matrix) {
        return; // another context may be reading it, without the lock
    }
    const Weight * w = router.matrix ? weights.find(router.matrix) : nullptr;
    spec_.routers[layer] = w && w->use == Use::resident ? router : Router();
}

void Engine::prepare_speculation_locked() {
    spec_.routers.resize(weights.moe_layers.size());
    spec_.guesses.resize(weights.moe_layers.size() * kLeads);
    for (size_t i = 0; i < spec_.guesses.size(); ++i) {
        spec_.guesses[i].calibration.reset(weights.moe_layers[i / kLeads].n_experts);
    }
    spec_.ahead = std::make_unique<UnitsAhead>(*cache_, spec_.counters, spec_.waste);
    spec_.flow.reset(spec_.settings.farthest());
}

void Engine::set_speculation(uint32_t depth, uint32_t stages) {
    if ((depth > 2 && depth != SpeculationSettings::kAuto) || stages == 0) {
        throw Error(LS_ERR_ARGUMENT, "speculation looks 0 (off) to 2 layers ahead and guesses in at least one stage");
    }
    Lock lock(mutex_);
    spec_.settings.depth  = depth;
    spec_.settings.stages = stages;
    spec_.flow.reset(spec_.settings.farthest());
}

void Engine::trace_begin(const std::string & path, const std::string & note) {
    Lock lock(mutex_);
    if (!activated_ || (weights.moe_layers.empty() && neurons->empty())) {
        throw Error(LS_ERR_STATE, "a trace needs a loaded model with experts or clusters of neurons that stream");
    }
    if (spec_.trace) {
        throw Error(LS_ERR_STATE, "a trace is being recorded already; end it first");
    }
    std::vector<TraceLayer> layers;
    for (const MoeLayer & l : weights.moe_layers) {
        layers.push_back({l.block, l.n_experts, cache_->slot_bytes()});
    }
    const uint32_t first_of_neurons = uint32_t(layers.size());
    neurons->list_trace_layers(layers);
    spec_.trace = std::make_shared<TraceWriter>(path, layers, note);
    spec_.tracing.store(true);
    neurons->set_trace(spec_.trace, first_of_neurons);
}

void Engine::trace_end() {
    Lock lock(mutex_);
    spec_.tracing.store(false);
    const std::shared_ptr<TraceWriter> trace = std::move(spec_.trace);
    neurons->set_trace(nullptr, 0);
    if (trace && !trace->flush()) {
        throw Error(LS_ERR_READ, "the disk did not take the whole trace; free space and record it again");
    }
}

// Before a graph: what will be guessed in it, and read on those guesses.
void Engine::begin_speculation_locked(Session & session, const ggml_cgraph * graph) {
    session.lead = 0;
    session.measured = false;
    const bool single = session.n_tokens == 1;
    if (single) {
        cache_->next_round();
        neurons->next_round();
    }
    if (spec_.trace) {
        spec_.trace->tokens(uint32_t(session.n_tokens));
    }
    const bool experts = !experts_ready_.load() && !weights.moe_layers.empty();
    if (single && (experts || neurons->wants_guesses())) {
        // the first token after a pause finds cold processor caches, and says nothing of a choice
        const bool is_auto = spec_.settings.depth == SpeculationSettings::kAuto;
        session.measured = is_auto && n_active_ == 0 && session.begin_ns - spec_.last_end_ns < kPauseNs;
        session.lead = session.measured ? spec_.flow.next() : is_auto ? spec_.flow.best() : spec_.settings.farthest();
    }
    session.speculation = spec_.settings;
    spec_.busy_ns = scheduler_->counters().busy_ns;
    session.part_guesses = single && spec_.trace ? UINT32_MAX : spec_.settings.part_guesses(session.lead);
    switch_guesses(graph, single && spec_.trace ? uint8_t(kLeadLayers) : session.lead, spec_.trace ? SpeculationSettings() : spec_.settings);
}

void Engine::end_speculation_locked(Session & session) {
    spec_.last_end_ns = now_ns();
    const uint64_t ns = spec_.last_end_ns - session.begin_ns;
    if (session.measured && n_active_ == 1 && !session.failed.load()) {
        spec_.flow.measured(session.lead, ns);
    }
    if (session.n_tokens == 1) {
        const double busy = double(scheduler_->counters().busy_ns - spec_.busy_ns) / double(std::max<uint64_t>(1, ns));
        spec_.drive_busy += (std::min(1.0, busy) - spec_.drive_busy) / 16;
    }
    if (spec_.trace) {
        spec_.trace->flush();
    }
    for (Guess & g : spec_.guesses) {
        g.of = g.of == &session ? nullptr : g.of;
    }
    neurons->forget_guesses(session);
}

void Engine::guessed(Session & session, uint32_t layer, uint8_t lead, const float * scores) {
    Lock lock(mutex_);
    if (session.failed.load() || !session.active) {
        return;
    }
    const MoeLayer & l = weights.moe_layers[layer];
    Guess & g = spec_.guess(layer, lead);
    g.of = &session;
    margins(scores, l.n_experts, spec_.routers[layer].n_used, g.margin);
    g.calibration.probabilities(g.margin, g.p);
    if (spec_.trace) {
        spec_.trace->predict(layer, lead, g.p.data());
    }
    if (session.lead > 0 && spec_.settings.uses(lead, session.lead)) {
        cache_->predicted(l.first_unit, g.p.data(), l.n_experts);
        const bool late = lead == kLeadBlock || lead == kLeadParts;
        read_ahead_guessed_locked(layer, spec_.routers[layer].n_used, late ? Priority::refined : Priority::speculative, g.p);
    }
}

// Reads what is likely enough, likeliest first; drops queued reads that no longer are.
void Engine::read_ahead_guessed_locked(uint32_t layer, uint32_t n_used, Priority priority, const std::vector<float> & p) {
    const MoeLayer & l = weights.moe_layers[layer];
    if (cache_->n_slots() < 3 * n_used) {
        return; // no room beside what demand needs
    }
    uint32_t n_waiting = 0;
    std::vector<uint32_t> order;
    for (uint32_t e = 0; e < l.n_experts; ++e) {
        const uint32_t unit = l.first_unit + e;
        if (spec_.ahead->waiting(unit)) {
            n_waiting++;
            if (p[e] < 0.5f * spec_.least_p()) {
                n_waiting -= cancel_ahead_locked(layer, e);
            } else if (priority == Priority::refined) {
                promote_unit_locked(layer, e, priority);
            }
        } else if (p[e] >= spec_.least_p() && !whole_unit_locked(unit, uint32_t(l.parts.size()))) {
            order.push_back(e);
        }
    }
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return p[a] > p[b]; });
    std::vector<ReadRequest> requests;
    for (uint32_t e : order) {
        const uint32_t unit = l.first_unit + e;
        if (n_waiting >= std::min(2 * n_used, cache_->n_slots() / 4) || (!cache_->resident(unit) && !admit_ahead_locked(unit))) {
            break;
        }
        n_waiting++;
        const uint64_t before = stats_.needed_bytes;
        for (uint32_t part = 0; part < l.parts.size(); ++part) {
            start_part_locked(layer, e, part, priority, requests);
        }
        spec_.ahead->begin(unit, stats_.needed_bytes - before);
    }
    scheduler_->submit(requests);
}

bool Engine::admit_ahead_locked(uint32_t unit) {
    std::vector<uint32_t> evicted;
    const bool ok = cache_->admit_ahead(unit, evicted);
    note_evicted_locked(evicted);
    return ok;
}

void Engine::note_evicted_locked(const std::vector<uint32_t> & evicted) {
    for (uint32_t u : evicted) {
        drop_parts_locked(u);
        spec_.ahead->evicted(u, unit_part_bytes(u));
    }
    stats_.n_evictions += evicted.size();
}

uint64_t Engine::unit_part_bytes(uint32_t unit) const {
    const MoeLayer & l = weights.moe_layers[layer_of_unit_[unit]];
    if (l.bundle) {
        return l.record_bytes();
    }
    uint64_t n = 0;
    for (uint32_t p = 0; p < l.parts.size(); ++p) {
        n += l.part_bytes(p);
    }
    return n;
}

void Engine::promote_unit_locked(uint32_t layer, uint32_t expert, Priority priority) {
    const MoeLayer & l = weights.moe_layers[layer];
    if (record_pending_[l.first_unit + expert] > 0) {
        scheduler_->promote(tag(kRecord, l.first_unit + expert), priority);
    }
    for (uint32_t part = 0; part < l.parts.size(); ++part) {
        const uint64_t id = uint64_t(l.first_unit + expert) * MoeLayer::kMaxParts + part;
        if (part_pending_[id] > 0) {
            scheduler_->promote(tag(kPart, id), priority);
        }
    }
}

// The read of a part, or of the whole record, was withdrawn.
void Engine::note_withdrawn_locked(uint32_t unit, uint64_t n_bytes) {
    stats_.needed_bytes -= n_bytes;
    spec_.ahead->withdraw_bytes(n_bytes);
    cache_->unpin(unit);
}

// True if nothing of the unit is in memory or on its way any more: then it is as if it had never been asked for.
bool Engine::cancel_ahead_locked(uint32_t layer, uint32_t expert) {
    const MoeLayer & l = weights.moe_layers[layer];
    const uint32_t unit = l.first_unit + expert;
    if (record_pending_[unit] > 0 && scheduler_->withdraw(tag(kRecord, unit), record_pending_[unit])) {
        record_pending_[unit] = 0;
        for (uint32_t part = 0; part < l.parts.size(); ++part) {
            part_state(unit, part).store(uint8_t(Load::absent));
        }
        note_withdrawn_locked(unit, l.record_bytes());
    }
    for (uint32_t part = 0; part < l.parts.size(); ++part) {
        const uint64_t id = uint64_t(unit) * MoeLayer::kMaxParts + part;
        if (part_pending_[id] > 0 && scheduler_->withdraw(tag(kPart, id), part_pending_[id])) {
            part_pending_[id] = 0;
            part_state_[id].store(uint8_t(Load::absent));
            note_withdrawn_locked(unit, l.part_bytes(part));
        }
    }
    for (uint32_t part = 0; part < l.parts.size(); ++part) {
        if (Load(part_state(unit, part).load()) != Load::absent) {
            return false; // some of it is here or coming
        }
    }
    if (cache_->pinned(unit)) {
        return false;
    }
    spec_.ahead->forget(unit);
    cache_->evict(unit);
    return true;
}

// How a unit's use finds it. Before the run pins or starts anything.
Arrival Engine::arrival_locked(uint32_t unit, uint32_t n_parts) const {
    const bool ahead = spec_.ahead->holds(unit);
    const bool whole = whole_unit_locked(unit, n_parts);
    return whole ? (ahead ? Arrival::ahead : Arrival::hit) : ahead && cache_->resident(unit) ? Arrival::late : Arrival::missed;
}

// The layer has chosen: settle what was guessed about it and tell retention and trace.
void Engine::chosen_locked(Session & session, const MoeRun & run, const float * logits, bool pass) {
    const MoeLayer & l = weights.moe_layers[run.layer];
    const uint32_t n_parts = uint32_t(l.parts.size());
    std::vector<uint32_t> used(run.experts.begin(), run.experts.end());
    std::sort(used.begin(), used.end());
    std::vector<Arrival> arrival;
    for (uint32_t e : used) {
        const uint32_t unit = l.first_unit + e;
        arrival.push_back(arrival_locked(unit, n_parts));
        settle_use_locked(unit, arrival.back());
    }
    const Router * router = run.layer < spec_.routers.size() ? &spec_.routers[run.layer] : nullptr;
    const bool scored = logits && router && router->matrix && session.n_tokens == 1;
    if (scored) {
        scores_.resize(l.n_experts);
        router->finish(logits, scores_.data(), 0, l.n_experts);
        margins(scores_.data(), l.n_experts, router->n_used, margin_);
    }
    if (!pass) {
        cache_->ranked(l.first_unit, scored ? margin_.data() : nullptr, l.n_experts);
    }
    if (spec_.trace) {
        spec_.trace->need(run.layer, pass, used, arrival, scored ? margin_.data() : nullptr);
    }
    learn_guesses_locked(session, run.layer, used);
    pass_ahead_locked(run.layer);
}

// Its turn has come: what waits still was not chosen.
void Engine::pass_ahead_locked(uint32_t layer) {
    const MoeLayer & l = weights.moe_layers[layer];
    for (uint32_t u = l.first_unit; u < l.first_unit + l.n_experts && spec_.ahead->n_waiting() > 0; ++u) {
        if (spec_.ahead->waiting(u)) {
            spec_.ahead->pass(u);
        }
    }
}

void Engine::settle_use_locked(uint32_t unit, Arrival arrival) {
    const uint64_t n_bytes = unit_part_bytes(unit);
    if (spec_.ahead->holds(unit)) {
        spec_.ahead->use(unit, n_bytes, arrival == Arrival::late);
    } else if (arrival == Arrival::missed) {
        spec_.waste.judge_demand(n_bytes);
    }
}

void Engine::learn_guesses_locked(Session & session, uint32_t layer, const std::vector<uint32_t> & used) {
    const uint32_t n = weights.moe_layers[layer].n_experts;
    std::vector<uint8_t> is_used(n, 0);
    for (uint32_t e : used) {
        is_used[e] = 1;
    }
    for (uint8_t lead = 1; lead < kLeads; ++lead) {
        Guess & g = spec_.guess(layer, lead);
        if (g.of != &session) {
            continue;
        }
        g.of = nullptr;
        std::vector<uint32_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        const size_t k = used.size();
        std::partial_sort(order.begin(), order.begin() + std::min<size_t>(n, 2 * k), order.end(),
            [&](uint32_t a, uint32_t b) { return g.p[a] > g.p[b]; });
        for (size_t i = 0; i < std::min<size_t>(n, 2 * k); ++i) {
            spec_.recall[lead].k  += i < k && is_used[order[i]];
            spec_.recall[lead].k2 += is_used[order[i]];
        }
        spec_.recall[lead].n += k;
        g.calibration.learn(g.margin, g.p, is_used);
    }
}

// ---- graph node ----------------------------------------------------------------------------------------------------

void op_guess(ggml_tensor * dst, int ith, int nth, void *) {
    const OpParams p = op_params(dst);
    Session & session = *p.session;
    Engine & engine = *session.engine;
    const uint8_t lead = uint8_t(p.part);
    if (session.failed.load(std::memory_order_relaxed)) {
        return;
    }
    const Router & router = engine.router(uint32_t(p.index));
    if (!router.matrix) {
        return;
    }
    const int64_t n = dst->ne[0];
    thread_local std::vector<uint8_t> scratch;
    scratch.resize(std::max(scratch.size(), router.scratch_bytes()));
    router.scores((const float *) dst->src[0]->data, scratch.data(), (float *) dst->data, ith * n / nth, (ith + 1) * n / nth);
    if (session.guessing.fetch_add(1, std::memory_order_acq_rel) == nth - 1) {
        session.guessing.store(0, std::memory_order_relaxed); // the next node starts behind a barrier
        engine.guessed(session, uint32_t(p.index), lead, (const float *) dst->data);
    }
}

} // namespace ls
