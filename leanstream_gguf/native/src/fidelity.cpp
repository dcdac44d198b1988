#include "fidelity.h"

#include "json.h"
#include "status.h"

#include <algorithm>
#include <cmath>

namespace ls {

namespace {

const std::string & path_of(const Index & index) {
    return index.shards.front().path;
}

[[noreturn]] void unsupported(const Index & index, const std::string & message) {
    throw Error(LS_ERR_UNSUPPORTED, path_of(index) + message).path(path_of(index));
}

void check_layout(const Index & index, Fidelity::Kind kind) {
    const LeanFile & lean = index.lean;
    if (kind != Fidelity::Kind::exact && lean.layers.empty()) {
        unsupported(index, " has no layers stored neuron by neuron, so only fidelity exact works; leanstream repack makes such a file");
    }
    if (!lean.layers.empty() && lean.faithful != (kind == Fidelity::Kind::faithful)) {
        unsupported(index, lean.faithful
            ? " has layout faithful, which holds the deciding rows in the clusters: use fidelity faithful, or repack with layout exact"
            : " has layout exact, without the sketch that fidelity faithful needs: repack with layout faithful");
    }
}

const ThresholdSetting & measured_setting(const Index & index, double max_kl) {
    const std::vector<ThresholdSetting> & settings = index.lean.thresholds;
    const ThresholdSetting * best = nullptr;
    std::string known;
    for (const ThresholdSetting & s : settings) {
        known += (known.empty() ? "" : ", ") + format("%g", double(s.max_kl));
        const bool allowed = max_kl <= 0 || double(s.max_kl) <= max_kl * (1 + 1e-6);
        if (allowed && (!best || (max_kl > 0 ? s.max_kl > best->max_kl : s.max_kl < best->max_kl))) {
            best = &s;
        }
    }
    if (!best) {
        unsupported(index, known.empty()
            ? " holds no measured thresholds; repack it with a calibration that has them (leanstream calibrate --max-kl)"
            : format(" holds thresholds measured for a KL of %s, none up to %g", known.c_str(), max_kl));
    }
    return *best;
}

size_t layer_of(const Index & index, int32_t block) {
    const std::vector<NeuronShape> & layers = index.lean.layers;
    const auto found = std::find_if(layers.begin(), layers.end(), [&](const NeuronShape & s) { return s.block == block; });
    if (found == layers.end()) {
        throw Error(LS_ERR_ARGUMENT, format("layer %d has no neurons in clusters, and so no threshold", block));
    }
    return size_t(found - layers.begin());
}

} // namespace

Fidelity choose_fidelity(const Index & index, uint32_t kind, double max_kl) {
    if (kind > 2 || !(max_kl >= 0)) {
        throw Error(LS_ERR_ARGUMENT, "fidelity must be 0 (exact), 1 (faithful) or 2 (threshold), and max_kl not negative");
    }
    Fidelity f;
    f.kind = Fidelity::Kind(kind);
    f.thresholds.assign(index.lean.layers.size(), 0.0f);
    check_layout(index, f.kind);
    if (f.kind == Fidelity::Kind::threshold) {
        const ThresholdSetting & s = measured_setting(index, max_kl);
        f.max_kl = s.max_kl;
        f.kl     = s.kl;
        f.thresholds = s.values;
    }
    return f;
}

Fidelity change_thresholds(const Index & index, const Fidelity & now, const int32_t * blocks, const float * values, size_t n_values,
                           double max_kl) {
    const ThresholdSetting & measured = measured_setting(index, max_kl); // also where its values are not asked for: no calibration, no thresholds
    if (now.kind != Fidelity::Kind::threshold) {
        throw Error(LS_ERR_STATE, "thresholds change the output, and the fidelity in force is not threshold: set that first");
    }
    if (!(max_kl >= 0) || (n_values == 0 && max_kl == 0) || (!blocks && n_values > 1)) {
        throw Error(LS_ERR_ARGUMENT, "give one threshold, one for each layer named, or the KL divergence whose measured ones to take");
    }
    Fidelity f = now;
    f.max_kl = f.kl = 0; // by hand: nobody has measured that
    if (n_values == 0) {
        f.thresholds = measured.values;
    }
    for (size_t i = 0; i < n_values; ++i) {
        if (!(values[i] >= 0) || std::isinf(values[i])) {
            throw Error(LS_ERR_ARGUMENT, "a threshold is a finite number and not negative");
        }
        if (!blocks) {
            std::fill(f.thresholds.begin(), f.thresholds.end(), values[i]);
        } else {
            f.thresholds[layer_of(index, blocks[i])] = values[i];
        }
    }
    for (size_t l = 0; l < f.thresholds.size() && max_kl > 0; ++l) {
        if (f.thresholds[l] > measured.values[l] * (1 + 1e-6f)) {
            throw Error(LS_ERR_ARGUMENT, format("a threshold of %g for layer %d is more than the %g that was measured for a KL divergence of %g",
                double(f.thresholds[l]), index.lean.layers[l].block, double(measured.values[l]), double(measured.max_kl)));
        }
    }
    for (const ThresholdSetting & s : index.lean.thresholds) {
        if (s.values == f.thresholds) {
            f.max_kl = s.max_kl;
            f.kl     = s.kl;
        }
    }
    return f;
}

std::string fidelity_json(const Index & index, const Fidelity & fidelity) {
    static const char * const names[] = { "exact", "faithful", "threshold" };
    Json j;
    {
        auto top = j.object();
        const auto measured = [&](const char * key, float value) {
            j.key(key);
            value > 0 ? j.number(double(value)) : j.raw("null");
        };
        j.key("name").string(names[uint32_t(fidelity.kind)]);
        measured("max_kl", fidelity.max_kl);
        measured("kl", fidelity.max_kl > 0 ? fidelity.kl : 0);
        j.key("thresholds");
        auto list = j.object();
        for (size_t l = 0; l < fidelity.thresholds.size() && fidelity.kind == Fidelity::Kind::threshold; ++l) {
            j.key(std::to_string(index.lean.layers[l].block)).number(double(fidelity.thresholds[l]));
        }
    }
    return j.text;
}

} // namespace ls
