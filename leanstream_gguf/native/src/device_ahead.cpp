// What the device tier does ahead of a layer's choice: the device ranks the experts of the layer after the next, those first in the
// ranking are read from the drive and copied to slots while the layers between are computed.
#include "device_tier.h"

#include "engine.h"

#include "ggml-backend-impl.h"

#include <algorithm>

namespace ls {

// Give back what the device has read ahead for layers before; have it wait for what is on its way to this one.
void DeviceTier::settle_ahead(Engine & engine, Session & session, uint32_t layer) {
    for (Ahead & a : ahead_) {
        if (a.waited) {
            engine.release_experts(a.units);
            a.units.clear();
            a.layer = -1;
            a.waited = false;
        } else if (a.layer == int32_t(layer)) {
            ggml_backend_event_wait(session.device_backend, a.copied);
            a.waited = true;
        }
    }
}

// Experts of the next layer that were ranked first two layers before it, as far as they are in host memory: copied beside compute.
void DeviceTier::copy_ahead(Engine & engine, uint32_t layer) {
    const int32_t next = layers_[layer].next_streamed;
    Ranking * const ranking = next < 0 ? nullptr : ranking_of(uint32_t(next));
    const auto free = std::find_if(std::begin(ahead_), std::end(ahead_), [](const Ahead & a) { return a.layer < 0; });
    if (!ranking || free == std::end(ahead_)) {
        return;
    }
    Layer & l = layers_[size_t(next)];
    n_runs_++; // what is ranked first is not given up for what is ranked later
    std::vector<uint32_t> missing;
    for (int64_t t = 0; t < ranking->n_tokens; ++t) {
        for (uint32_t i = 0; i < n_expert_used_; ++i) {
            const uint32_t e = uint32_t(ranking->experts[size_t(t) * l.slot_of.size() + i]);
            if (e >= l.slot_of.size()) {
                continue;
            }
            if (l.slot_of[e] >= 0) {
                l.used_in[size_t(l.slot_of[e])] = n_runs_;
            } else if (engine.expert_ready(uint32_t(next), e) && std::find(missing.begin(), missing.end(), e) == missing.end()) {
                missing.push_back(e);
            }
        }
    }
    const size_t n = engine.fetch_experts(uint32_t(next), missing, 0, false);
    for (size_t i = 0; i < n; ++i) {
        free->units.push_back(engine.unit_of(uint32_t(next), missing[i]));
        if (engine.expert_ready(uint32_t(next), missing[i]) && give_slot(l, missing[i], false)) {
            put_expert(engine, copy_backend_, uint32_t(next), missing[i], l.slots, uint32_t(l.slot_of[missing[i]]));
        }
    }
    if (n > 0) {
        free->layer = next;
        ggml_backend_event_record(free->copied, copy_backend_);
    }
}

// The ranking's way to the host. Where experts come from the drive it is awaited, which takes microseconds, and reads begin at once;
// otherwise it is there when the next layer's ids are.
void DeviceTier::take_ranking(Session & session, uint32_t layer, const ggml_tensor * ranked) {
    if (!ranked || ranked->ne[1] > kSlotTokens) {
        return;
    }
    Ranking & r = rankings_[layers_[layer].order % std::size(rankings_)];
    r.layer    = layer_to_rank(layer);
    r.n_tokens = ranked->ne[1];
    if (from_drive_) {
        ggml_backend_tensor_get(ranked, r.experts, 0, ggml_nbytes(ranked));
        counters.syncs++;
    } else {
        ggml_backend_tensor_get_async(session.device_backend, ranked, r.experts, 0, ggml_nbytes(ranked));
    }
}

DeviceTier::Ranking * DeviceTier::ranking_of(uint32_t layer) {
    const auto found = std::find_if(std::begin(rankings_), std::end(rankings_), [&](const Ranking & r) { return r.layer == int32_t(layer); });
    return found == std::end(rankings_) ? nullptr : &*found;
}

// The layer has chosen: how often is what is ranked first, second, ... among it?
void DeviceTier::learn_ranking(uint32_t layer, const ggml_tensor * ids) {
    constexpr float kRate = 0.01f;
    Ranking * const r = ranking_of(layer);
    if (!r) {
        return;
    }
    const size_t n_experts = layers_[layer].slot_of.size();
    for (int64_t t = 0; t < std::min(r->n_tokens, ids->ne[1]); ++t) {
        const int32_t * chosen = (const int32_t *) ((const char *) ids->data + t * ids->nb[1]);
        for (size_t i = 0; i < rank_p_.size(); ++i) {
            const bool right = std::find(chosen, chosen + ids->ne[0], r->experts[size_t(t) * n_experts + i]) != chosen + ids->ne[0];
            rank_p_[i] += kRate * (float(right) - rank_p_[i]);
        }
    }
    r->layer = -1;
}

// Reads of what was just ranked first and neither the device nor the host has.
void DeviceTier::read_ahead(Engine & engine, Session & session, uint32_t layer) {
    const int32_t ahead = layer_to_rank(layer);
    const Ranking * r = ahead < 0 ? nullptr : ranking_of(uint32_t(ahead));
    if (!r) {
        return;
    }
    const Layer & l = layers_[size_t(ahead)];
    p_.assign(l.slot_of.size(), 0.0f);
    for (int64_t t = 0; t < r->n_tokens; ++t) {
        for (size_t i = 0; i < rank_p_.size(); ++i) {
            const uint32_t e = uint32_t(r->experts[size_t(t) * p_.size() + i]);
            if (e < p_.size() && l.slot_of[e] < 0) {
                p_[e] = std::max(p_[e], rank_p_[i]);
            }
        }
    }
    engine.ranked(session, uint32_t(ahead), n_expert_used_, p_);
}

} // namespace ls
