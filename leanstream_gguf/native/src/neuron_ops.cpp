#include "neuron_ops.h"

#include "engine.h"
#include "ops.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

// Neurons that fire for any token, in original order, group by group.
void list_firing(const ggml_tensor * a, const NeuronLayer & layer, NeuronRun & run) {
    const uint32_t n_ff = layer.shape->n_ff, n_words = (n_ff + 63) / 64;
    run.bitmap.assign(2 * n_words, 0);
    for (int64_t t = 0; t < a->ne[1]; ++t) {
        mark_firing(row_of(a, t), n_ff, layer.threshold, run.bitmap.data() + n_words);
    }
    std::vector<uint64_t> & bits = run.bitmap;
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
}

// a *= up * x for the neurons of the wave, which the threads share out
void multiply_rows(const Neurons & n, const ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor * a = dst->src[0], * x = dst->src[2], * quantized = dst->src[3];
    const NeuronShape & s = *n.layer.shape;
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(s.other.type);
    const size_t x_bytes = ggml_row_size(traits->vec_dot_type, s.n_embd);
    const uint32_t begin = n.run.groups[n.run.wave_begin].first;
    const uint32_t end = n.run.groups[n.run.wave_end - 1].first + n.run.groups[n.run.wave_end - 1].n;
    const uint32_t first = begin + uint32_t(uint64_t(end - begin) * uint32_t(ith) / uint32_t(nth));
    const uint32_t last  = begin + uint32_t(uint64_t(end - begin) * uint32_t(ith + 1) / uint32_t(nth));
    for (uint32_t i = first; i < last; ++i) {
        const uint8_t * row = n.run.records[i] + s.other.at;
        for (int64_t t = 0; t < a->ne[1]; ++t) {
            float & h = row_of(a, t)[n.run.positions[i]];
            if (h != 0.0f) {
                const char * in = quantized ? (const char *) quantized->data + t * x_bytes : (const char *) x->data + t * x->nb[1];
                float dot;
                traits->vec_dot(int(s.n_embd), &dot, 0, row, 0, in, 0, 1);
                h *= dot;
            }
        }
    }
}

// output rows r0 .. r1 += the wave's neurons
void add_columns(const Neurons & n, const ggml_tensor * dst, uint32_t r0, uint32_t r1) {
    const ggml_tensor * a = dst->src[0];
    const uint64_t down_at = n.layer.shape->down.at;
    for (uint32_t i = n.run.wave_begin; i < n.run.wave_end; ++i) {
        const NeuronRun::Group & g = n.run.groups[i];
        const uint8_t * columns[kMaxGroup];
        for (uint32_t c = 0; c < g.n; ++c) {
            columns[c] = n.run.records[g.first + c] + down_at;
        }
        const ColumnGroup group = { g.group, g.n, columns, n.run.positions.data() + g.first, uint32_t(a->ne[1]), (const float *) a->data,
                                    a->nb[1] / sizeof(float) };
        n.layer.accumulate(n.layer.matrix, group, r0, r1, (float *) dst->data, dst->nb[1] / sizeof(float));
    }
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
    n.run.layer = &n.layer;
    n.run.groups.clear();
    n.run.positions.clear();
    if (n.session.failed.load()) {
        return;
    }
    list_firing(dst->src[0], n.layer, n.run);
    if (!n.run.groups.empty()) {
        n.store.begin(n.run, nth);
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
        bool ok = n.store.wait_wave(n.run, wave);
        done = n.run.wave_end;
        if (ok && n.layer.shape->gated) {
            multiply_rows(n, dst, ith, nth);
            ok = n.store.wait_rows(n.run);
        }
        if (!ok) { // what is computed is thrown away, but reaches the KV cache before: it must be finite
            n.session.engine->fail(n.session, n.store.error());
            zero_rows(dst, r0, r1);
            return;
        }
        add_columns(n, dst, r0, r1);
        if (n.run.threads_left.fetch_sub(1) == 1) {
            n.store.next_wave(n.run, nth);
        }
    }
    if (n.session.failed.load()) {
        zero_rows(dst, r0, r1);
    }
}

} // namespace ls
