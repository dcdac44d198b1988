#include "neuron_ops.h"

#include "engine.h"
#include "expert_rows.h"
#include "ops.h"
#include "sketch_row.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

namespace ls {

namespace {

struct Neurons {
    Session & session;
    NeuronStore & store;
    NeuronRun & run;
    const NeuronLayer & layer;
};

Neurons neurons_of(const OpParams & p) {
    NeuronStore & store = *p.session->engine->neurons;
    return { *p.session, store, p.session->neuron_runs[p.run], *store.layer(uint32_t(p.index)) };
}

float * row_of(const ggml_tensor * t, int64_t token) {
    return (float *) ((char *) t->data + token * t->nb[1]);
}

// bits[i / 64] gets bit i % 64 where row[i] is not zero; smaller values than the threshold become zero first
void mark_firing(float * row, uint32_t n, float threshold, uint64_t * bits) {
    if (threshold > 0) {
        for (uint32_t i = 0; i < n; ++i) {
            row[i] = std::fabs(row[i]) < threshold ? 0.0f : row[i]; // NaN stays
        }
    }
    for (uint32_t i = 0; i < n; i += 64) {
        uint64_t word = 0;
        const uint32_t m = std::min(64u, n - i);
        for (uint32_t b = 0; b < m; ++b) {
            word |= uint64_t(row[i + b] != 0.0f) << b;
        }
        bits[i / 64] |= word;
    }
}

template <typename Fn> void for_each_bit(const std::vector<uint64_t> & bits, uint32_t n_words, Fn fn) {
    for (uint32_t w = 0; w < n_words; ++w) {
        for (uint64_t word = bits[w]; word; word &= word - 1) {
            fn(w * 64 + uint32_t(__builtin_ctzll(word)));
        }
    }
}

// Clears the first n bits; returns how many were set.
uint32_t take_leading(uint64_t * bits, uint32_t n) {
    uint32_t n_set = 0;
    for (uint32_t w = 0; w * 64 < n; ++w) {
        const uint64_t mask = n - w * 64 >= 64 ? ~uint64_t(0) : (uint64_t(1) << (n - w * 64)) - 1;
        n_set += uint32_t(__builtin_popcountll(bits[w] & mask));
        bits[w] &= ~mask;
    }
    return n_set;
}

// Neurons that mark(token, bits) marks for any token, in original order, group by group. Those that a device sums are left out:
// returns how many that were.
template <typename Mark> uint32_t list_neurons(int64_t n_tokens, const NeuronLayer & layer, NeuronRun & run, Mark mark) {
    const uint32_t n_words = (layer.shape->n_ff + 63) / 64;
    run.bitmap.assign(2 * n_words, 0);
    for (int64_t t = 0; t < n_tokens; ++t) {
        mark(t, run.bitmap.data() + n_words);
    }
    std::vector<uint64_t> & bits = run.bitmap;
    const uint32_t n_left_out = take_leading(bits.data() + n_words, layer.first_cold);
    for (uint32_t w = 0; w < n_words; ++w) {
        for (uint64_t word = bits[n_words + w]; word; word &= word - 1) {
            const uint32_t original = uint32_t(layer.perm[w * 64 + uint32_t(__builtin_ctzll(word))]);
            bits[original / 64] |= uint64_t(1) << original % 64;
        }
    }
    run.groups.clear();
    run.positions.clear();
    for_each_bit(bits, n_words, [&](uint32_t original) {
        const uint32_t g = original / layer.matrix.format->group;
        if (run.groups.empty() || run.groups.back().group != g) {
            run.groups.push_back({ g, uint32_t(run.positions.size()), 0 });
        }
        run.groups.back().n++;
        run.positions.push_back(layer.position_of[original]);
    });
    return n_left_out;
}

void count_on_device(const Neurons & n, uint32_t n_there) {
    DeviceCounters & counters = n.session.engine->device()->counters;
    counters.hits   += n_there;
    counters.misses += n.run.positions.size();
    counters.syncs  += 2; // for the activations or what they are made from, and for the sum
}

void start_run(const Neurons & n) {
    n.run.layer = &n.layer;
    n.run.groups.clear();
    n.run.positions.clear();
}

bool is_candidate(const NeuronLayer & layer, float score) {
    return !(score <= -layer.shape->sketch_margin); // NaN is one
}

constexpr uint32_t kSketchStage = 512; // neurons between two looks at what will be needed

constexpr float kNever = -1e30f; // what decides for a neuron that is no candidate: 0 after any activation

// share of thread ith of entries begin .. end
std::pair<uint32_t, uint32_t> share(uint32_t begin, uint32_t end, int ith, int nth) {
    return { begin + uint32_t(uint64_t(end - begin) * uint32_t(ith) / uint32_t(nth)),
             begin + uint32_t(uint64_t(end - begin) * uint32_t(ith + 1) / uint32_t(nth)) };
}

std::pair<uint32_t, uint32_t> entries_of_wave(const NeuronRun & run) {
    return { run.groups[run.wave_begin].first, run.groups[run.wave_end - 1].first + run.groups[run.wave_end - 1].n };
}

const char * input_row(const ggml_tensor * x, const ggml_tensor * quantized, ggml_type type, int64_t token) {
    const size_t bytes = quantized ? ggml_row_size(ggml_get_type_traits_cpu(type)->vec_dot_type, x->ne[0]) : x->nb[1];
    return (const char *) (quantized ? quantized : x)->data + token * bytes;
}

// h of one rounding block and token as ggml would round it: entries first .. last of the run
void round_block(const Neurons & n, float * h, uint32_t first, uint32_t last) {
    const ggml_type type = n.layer.rounding_type;
    const uint32_t size = n.layer.rounding_block;
    float x[256] = {};
    uint8_t rounded[1024]; // 256 numbers of any type
    const auto place = [&](uint32_t i) { return uint32_t(n.layer.perm[n.run.positions[i]]) % std::max(size, kMaxGroup); };
    for (uint32_t i = first; i < last; ++i) {
        x[place(i)] = h[n.run.positions[i]];
    }
    const int64_t count = std::max(size, kMaxGroup);
    ggml_get_type_traits_cpu(type)->from_float(x, rounded, count);
    if (type == GGML_TYPE_Q8_K) { // a float and 256 bytes; ggml never needs it back
        float scale;
        memcpy(&scale, rounded, sizeof(scale));
        for (int64_t i = 0; i < count; ++i) {
            x[i] = scale * float(int8_t(rounded[sizeof(scale) + i]));
        }
    } else {
        ggml_get_type_traits(type)->to_float(rounded, x, count);
    }
    for (uint32_t i = first; i < last; ++i) {
        h[n.run.positions[i]] = x[place(i)];
    }
}

// fn(first, last) of the entries of each rounding block of the wave that this thread has
template <typename Fn> void for_own_blocks(const Neurons & n, int ith, int nth, Fn fn) {
    const auto [first_group, last_group] = share(n.run.wave_begin, n.run.wave_end, ith, nth);
    uint32_t g = n.store.block_start(n.run, first_group);
    const uint32_t end = n.store.block_start(n.run, last_group);
    while (g < end) {
        const uint32_t next = n.store.block_end(n.run, g);
        fn(n.run.groups[g].first, n.run.groups[next - 1].first + n.run.groups[next - 1].n);
        g = next;
    }
}

// a *= up * x for the wave's neurons: once for those that are in memory, then for the rest. Each product stands alone, so their order
// does not show.
void multiply_rows(const Neurons & n, const ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor * a = dst->src[0], * x = dst->src[2], * quantized = dst->src[3];
    const NeuronShape & s = *n.layer.shape;
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(s.other.type);
    for_own_blocks(n, ith, nth, [&](uint32_t first, uint32_t last) {
        for (uint32_t i = first; i < last; ++i) {
            if (n.run.computed[i] || !n.store.arrived(n.run, i)) {
                continue;
            }
            n.run.computed[i] = 1;
            const uint8_t * row = n.run.records[i] + s.other.at;
            for (int64_t t = 0; t < a->ne[1]; ++t) {
                float & h = row_of(a, t)[n.run.positions[i]];
                if (h != 0.0f) {
                    float dot;
                    traits->vec_dot(int(s.n_embd), &dot, 0, row, 0, input_row(x, quantized, s.other.type, t), 0, 1);
                    h *= dot;
                }
            }
        }
    });
}

// the wave's coefficients as ggml would round them
void round_coefficients(const Neurons & n, const ggml_tensor * dst, int ith, int nth) {
    for_own_blocks(n, ith, nth, [&](uint32_t first, uint32_t last) {
        for (int64_t t = 0; t < dst->src[0]->ne[1]; ++t) {
            round_block(n, row_of(dst->src[0], t), first, last);
        }
    });
}

// Output rows r0 .. r1 += the wave's neurons from group i on, in order, up to one that is not in memory; returns the first group left.
uint32_t add_columns(const Neurons & n, const ggml_tensor * dst, uint32_t r0, uint32_t r1, uint32_t i) {
    const ggml_tensor * a = dst->src[0];
    const uint64_t down_at = n.layer.shape->down.at;
    for (; i < n.run.wave_end; ++i) {
        const NeuronRun::Group & g = n.run.groups[i];
        const uint8_t * columns[kMaxGroup];
        for (uint32_t c = 0; c < g.n; ++c) {
            if (!n.store.arrived(n.run, g.first + c)) {
                return i;
            }
            columns[c] = n.run.records[g.first + c] + down_at;
        }
        const ColumnGroup group = { g.group, g.n, columns, n.run.positions.data() + g.first, uint32_t(a->ne[1]), (const float *) a->data,
                                    a->nb[1] / sizeof(float) };
        n.layer.accumulate(n.layer.matrix, group, r0, r1, (float *) dst->data, dst->nb[1] / sizeof(float));
    }
    return i;
}

// One wave of a sum, with what is in memory before what is not. False: a read failed.
bool apply_wave(const Neurons & n, const ggml_tensor * dst, uint32_t wave, uint32_t r0, uint32_t r1, int ith, int nth) {
    const bool gated = n.layer.shape->gated, rounds = n.layer.rounding_type != GGML_TYPE_COUNT;
    if (!n.store.wait_taken(n.run, wave)) {
        return false;
    }
    if (gated) {
        multiply_rows(n, dst, ith, nth);
        if (!n.store.wait_wave(n.run, wave)) {
            return false;
        }
        multiply_rows(n, dst, ith, nth);
    }
    if (rounds) {
        round_coefficients(n, dst, ith, nth);
    }
    if ((gated || rounds) && !n.store.wait_rows(n.run)) {
        return false;
    }
    const uint32_t i = add_columns(n, dst, r0, r1, n.run.wave_begin);
    if (!n.store.wait_wave(n.run, wave)) {
        return false;
    }
    add_columns(n, dst, r0, r1, i);
    return true;
}

void zero_rows(const ggml_tensor * dst, uint32_t r0, uint32_t r1) {
    for (int64_t t = 0; t < dst->ne[1]; ++t) {
        std::fill(row_of(dst, t) + r0, row_of(dst, t) + r1, 0.0f);
    }
}

} // namespace

void op_select_neurons(ggml_tensor * dst, int ith, int nth, void *) {
    if (ith != 0) {
        return;
    }
    const Neurons n = neurons_of(op_params(dst));
    start_run(n);
    if (n.session.failed.load()) {
        return;
    }
    const ggml_tensor * a = dst->src[0];
    const float threshold = n.session.fidelity->thresholds[size_t(op_params(dst).index)];
    const uint32_t n_there = list_neurons(a->ne[1], n.layer, n.run, [&](int64_t t, uint64_t * bits) {
        mark_firing(row_of(a, t), n.layer.shape->n_ff, threshold, bits);
    });
    if (op_params(dst).part) {
        count_on_device(n, n_there);
    }
    if (n.run.groups.empty()) {
        n.store.forget_expected(n.run);
    } else {
        n.store.begin(n.run, nth, n.layer.shape->deciding.present() ? nullptr : &n.session, a->ne[1]);
    }
}

void op_decide_rows(ggml_tensor * dst, int ith, int nth, void *) {
    const OpParams p = op_params(dst);
    const ggml_tensor & w = *dst->src[0];
    const char * x = input_row(dst->src[1], dst->src[2], w.type, 0);
    float * out = (float *) dst->data;
    share_chunks(p, uint32_t(w.ne[1]), w.nb[1], ith, nth, [&](uint32_t first, uint32_t last) {
        dot_rows(w, (const uint8_t *) w.data, x, out, first, last);
        expect_firing(p, out, first, last);
    });
}

void expect_firing(const OpParams & p, const float * decided, uint32_t first, uint32_t last) {
    const Neurons n = neurons_of(p);
    if (!n.session.failed.load(std::memory_order_relaxed) && n.session.fidelity->thresholds[size_t(p.index)] <= 0) {
        n.store.expect(n.run, n.layer, decided, first, last, 0.0f);
    }
}

void op_sketch_neurons(ggml_tensor * dst, int ith, int nth, void *) {
    const Neurons n = neurons_of(op_params(dst));
    const ggml_tensor * x = dst->src[0];
    const NeuronShape & s = *n.layer.shape;
    const auto [first, last] = share(0, s.n_ff, ith, nth);
    const size_t row_bytes = sketch_row_bytes(s.n_embd);
    const SketchFn sketch = sketch_kernel();
    SketchRow in(s.n_embd);
    for (int64_t t = 0; t < x->ne[1]; ++t) {
        in.set(row_of(x, t), s.n_embd);
        float * scores = row_of(dst, t);
        for (uint32_t begin = first; begin < last; begin += kSketchStage) {
            const uint32_t end = std::min(last, begin + kSketchStage);
            for (uint32_t i = begin; i < end; ++i) {
                scores[i] = sketch(in.input, n.layer.sketch + i * row_bytes);
            }
            if (x->ne[1] == 1 && !n.session.failed.load(std::memory_order_relaxed)) {
                n.store.expect(n.run, n.layer, scores, begin, end, -s.sketch_margin);
            }
        }
    }
}

void op_select_candidates(ggml_tensor * dst, int ith, int nth, void *) {
    if (ith != 0) {
        return;
    }
    const Neurons n = neurons_of(op_params(dst));
    start_run(n);
    if (n.session.failed.load()) {
        return;
    }
    const ggml_tensor * scores = dst->src[0];
    list_neurons(scores->ne[1], n.layer, n.run, [&](int64_t t, uint64_t * bits) {
        for (uint32_t i = 0; i < n.layer.shape->n_ff; ++i) {
            bits[i / 64] |= uint64_t(is_candidate(n.layer, row_of(scores, t)[i])) << i % 64;
        }
    });
    if (n.run.groups.empty()) {
        n.store.forget_expected(n.run);
    } else {
        n.store.begin(n.run, nth, &n.session, scores->ne[1]);
    }
}

void op_decide_neurons(ggml_tensor * dst, int ith, int nth, void *) {
    const Neurons n = neurons_of(op_params(dst));
    const ggml_tensor * scores = dst->src[0], * x = dst->src[2], * quantized = dst->src[3];
    const NeuronShape & s = *n.layer.shape;
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(s.deciding.type);
    const auto [own_first, own_last] = share(0, s.n_ff, ith, nth);
    for (int64_t t = 0; t < dst->ne[1]; ++t) { // candidates of this share get their value from whichever thread has their row
        for (uint32_t i = own_first; i < own_last; ++i) {
            if (!is_candidate(n.layer, row_of(scores, t)[i])) {
                row_of(dst, t)[i] = kNever;
            }
        }
    }
    const auto decide_arrived = [&] {
        const auto [begin, end] = entries_of_wave(n.run);
        const auto [first, last] = share(begin, end, ith, nth);
        for (uint32_t i = first; i < last; ++i) {
            if (n.run.computed[i] || !n.store.arrived(n.run, i)) {
                continue;
            }
            n.run.computed[i] = 1;
            const uint8_t * row = n.run.records[i] + s.deciding.at;
            const uint32_t at = n.run.positions[i];
            for (int64_t t = 0; t < dst->ne[1]; ++t) {
                if (is_candidate(n.layer, row_of(scores, t)[at])) {
                    traits->vec_dot(int(s.n_embd), row_of(dst, t) + at, 0, row, 0, input_row(x, quantized, s.deciding.type, t), 0, 1);
                }
            }
        }
    };
    const size_t n_groups = n.run.groups.size();
    uint32_t done = 0;
    for (uint32_t wave = 1; done < n_groups && !n.session.failed.load(); ++wave) {
        bool ok = n.store.wait_taken(n.run, wave);
        if (ok) {
            decide_arrived();
            ok = n.store.wait_wave(n.run, wave);
        }
        if (!ok) {
            n.session.engine->fail(n.session, n.store.error());
            return; // the layer's output will be zeros
        }
        decide_arrived();
        done = n.run.wave_end;
        if (n.run.threads_left.fetch_sub(1) == 1) {
            n.store.next_wave(n.run, nth);
        }
    }
}

void op_apply_neurons(ggml_tensor * dst, int ith, int nth, void *) {
    const Neurons n = neurons_of(op_params(dst));
    const uint32_t n_rows = uint32_t(dst->ne[0]), n_chunks = (n_rows + 31) / 32;
    const uint32_t r0 = n_chunks * uint32_t(ith) / uint32_t(nth) * 32;
    const uint32_t r1 = std::min(n_rows, n_chunks * uint32_t(ith + 1) / uint32_t(nth) * 32);
    zero_rows(dst, r0, r1);
    const size_t n_groups = n.run.groups.size();
    uint32_t done = 0;
    for (uint32_t wave = 1; done < n_groups && !n.session.failed.load(); ++wave) {
        const bool ok = apply_wave(n, dst, wave, r0, r1, ith, nth);
        done = n.run.wave_end;
        if (!ok) { // what is computed is thrown away, but reaches the KV cache before: it must be finite
            n.session.engine->fail(n.session, n.store.error());
            zero_rows(dst, r0, r1);
            return;
        }
        if (n.run.threads_left.fetch_sub(1) == 1) {
            n.store.next_wave(n.run, nth);
        }
    }
    if (n.session.failed.load()) {
        zero_rows(dst, r0, r1);
    }
}

} // namespace ls
