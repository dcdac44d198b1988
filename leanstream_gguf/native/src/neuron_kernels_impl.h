// The kernels, written once over a set of vector operations. Included by one file for each instruction set, which defines
// `Simd` first; everything is in an anonymous namespace, and nothing of the standard library's templates is used, so that no
// code compiled for one processor is linked into another's path.
//
// Simd offers: F (32 floats), B (32 signed bytes), zero, load, store, fma(float, F, F), fma(F, F, F), mul(F, F), widen(B),
// bytes(p), nibbles(p), bits(p): 16 where a bit is set, crumbs(p, second): 16 times the 2-bit codes of the first or second half of a
// group of 64, add(B, B), sub(B, int), f16(p), bf16(p).

namespace ls {
namespace {

// 32 rows of a column, from row r (a multiple of 32) on; e: padded rows of the column.
template <ggml_type> struct Column;

template <> struct Column<GGML_TYPE_F32> {
    static Simd::F get(const uint8_t * p, size_t, size_t r) { return Simd::load((const float *) p + r); }
};
template <> struct Column<GGML_TYPE_F16> {
    static Simd::F get(const uint8_t * p, size_t, size_t r) { return Simd::f16(p + 2 * r); }
};
template <> struct Column<GGML_TYPE_BF16> {
    static Simd::F get(const uint8_t * p, size_t, size_t r) { return Simd::bf16(p + 2 * r); }
};
template <> struct Column<GGML_TYPE_Q8_0> {
    static Simd::F get(const uint8_t * p, size_t, size_t r) { return Simd::widen(Simd::bytes(p + r)); }
};
template <> struct Column<GGML_TYPE_Q4_0> {
    static Simd::F get(const uint8_t * p, size_t, size_t r) { return Simd::widen(Simd::sub(Simd::nibbles(p + r / 2), 8)); }
};
template <> struct Column<GGML_TYPE_Q4_1> {
    static Simd::F get(const uint8_t * p, size_t, size_t r) { return Simd::widen(Simd::nibbles(p + r / 2)); }
};
template <> struct Column<GGML_TYPE_Q4_K> : Column<GGML_TYPE_Q4_1> {};
template <> struct Column<GGML_TYPE_Q5_0> {
    static Simd::F get(const uint8_t * p, size_t e, size_t r) {
        return Simd::widen(Simd::sub(Simd::add(Simd::nibbles(p + r / 2), Simd::bits(p + e / 2 + r / 8)), 16));
    }
};
template <> struct Column<GGML_TYPE_Q5_1> {
    static Simd::F get(const uint8_t * p, size_t e, size_t r) {
        return Simd::widen(Simd::add(Simd::nibbles(p + r / 2), Simd::bits(p + e / 2 + r / 8)));
    }
};
template <> struct Column<GGML_TYPE_Q5_K> : Column<GGML_TYPE_Q5_1> {};
template <> struct Column<GGML_TYPE_Q6_K> {
    static Simd::F get(const uint8_t * p, size_t e, size_t r) {
        const Simd::B high = Simd::crumbs(p + e / 2 + r / 64 * 16, r % 64 != 0);
        return Simd::widen(Simd::sub(Simd::add(Simd::nibbles(p + r / 2), high), 32));
    }
};

// Where a group's rows of the planes start, for the row at hand.
struct PlaneRows {
    const uint8_t * d;     // f16
    const uint8_t * m;     // f16: mins, or K-quants' super-mins
    const uint8_t * scale; // bytes: K-quants' sub-scales
    const uint8_t * min;   // bytes: K-quants' sub-mins
};

template <ggml_type type>
PlaneRows plane_rows(const ColumnMatrix & w, uint32_t group) {
    const size_t e = padded_rows(w.n_rows), n_blocks = w.n_neurons / 32, n_super = w.n_neurons / 256;
    const uint8_t * p = w.planes;
    switch (type) {
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q5_0: case GGML_TYPE_Q8_0:
            return { p + 2 * e * group, nullptr, nullptr, nullptr };
        case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_1:
            return { p + 2 * e * group, p + 2 * e * (n_blocks + group), nullptr, nullptr };
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K:
            return { p + 2 * e * (group / 8), p + 2 * e * (n_super + group / 8), p + e * (4 * n_super + group),
                     p + e * (4 * n_super + n_blocks + group) };
        case GGML_TYPE_Q6_K:
            return { p + 2 * e * (group / 16), nullptr, p + e * (2 * n_super + group), nullptr };
        default:
            return { nullptr, nullptr, nullptr, nullptr };
    }
}

// out[0 .. 32) += scales * acc - mins * sum of h
template <ggml_type type>
Simd::F apply(const PlaneRows & at, uint32_t r, Simd::F acc, float h_sum, Simd::F out) {
    switch (type) {
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q5_0: case GGML_TYPE_Q8_0:
            return Simd::fma(Simd::f16(at.d + 2 * r), acc, out);
        case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_1:
            return Simd::fma(h_sum, Simd::f16(at.m + 2 * r), Simd::fma(Simd::f16(at.d + 2 * r), acc, out));
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K: {
            const Simd::F scale = Simd::mul(Simd::f16(at.d + 2 * r), Simd::widen(Simd::bytes(at.scale + r)));
            const Simd::F min   = Simd::mul(Simd::f16(at.m + 2 * r), Simd::widen(Simd::bytes(at.min + r)));
            return Simd::fma(-h_sum, min, Simd::fma(scale, acc, out));
        }
        case GGML_TYPE_Q6_K: {
            const Simd::F scale = Simd::mul(Simd::f16(at.d + 2 * r), Simd::widen(Simd::bytes(at.scale + r)));
            return Simd::fma(scale, acc, out);
        }
        default:
            return Simd::fma(1.0f, acc, out);
    }
}

// The last rows where n_rows is no multiple of 32: out ends there, columns and planes do not.
void copy_floats(float * to, const float * from, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        to[i] = from[i];
    }
}

// What fires for one token: the k-th is column of[k], with coefficient h[k].
struct Firing {
    uint8_t of[kMaxGroup];
    float   h[kMaxGroup];
    float   h_sum;
    uint32_t n;
};

void find_firing(const ColumnGroup & g, uint32_t token, Firing & f) {
    const float * h = g.h + token * g.h_stride;
    f.n = 0;
    f.h_sum = 0.0f;
    for (uint32_t c = 0; c < g.n_columns; ++c) {
        const float v = h[g.positions[c]];
        if (v != 0.0f) {
            f.of[f.n] = uint8_t(c);
            f.h[f.n++] = v;
            f.h_sum += v;
        }
    }
}

template <ggml_type type>
void apply_at(const PlaneRows & planes, uint32_t r, uint32_t r1, Simd::F acc, float h_sum, float * out) {
    if (r + 32 <= r1) {
        Simd::store(out + r, apply<type>(planes, r, acc, h_sum, Simd::load(out + r)));
        return;
    }
    float last[32] = {};
    copy_floats(last, out + r, r1 - r);
    Simd::store(last, apply<type>(planes, r, acc, h_sum, Simd::load(last)));
    copy_floats(out + r, last, r1 - r);
}

// One token: columns are unpacked straight into the sum.
template <ggml_type type>
void accumulate_one(const ColumnMatrix & w, const ColumnGroup & g, uint32_t r0, uint32_t r1, float * out) {
    const PlaneRows planes = plane_rows<type>(w, g.group);
    const size_t e = padded_rows(w.n_rows);
    Firing f;
    find_firing(g, 0, f);
    const uint8_t * columns[kMaxGroup];
    for (uint32_t i = 0; i < f.n; ++i) {
        columns[i] = g.columns[f.of[i]];
    }
    for (uint32_t r = r0; r < r1; r += 32) {
        Simd::F acc = Simd::zero();
        for (uint32_t i = 0; i < f.n; ++i) {
            acc = Simd::fma(f.h[i], Column<type>::get(columns[i], e, r), acc);
        }
        apply_at<type>(planes, r, r1, acc, f.h_sum, out);
    }
}

constexpr uint32_t kTokensAtOnce = 32;

// Several tokens: the group's columns are unpacked once. The same sums in the same order as for one token.
template <ggml_type type>
void accumulate_many(const ColumnMatrix & w, const ColumnGroup & g, uint32_t t0, uint32_t n, uint32_t r0, uint32_t r1, float * out,
                     size_t stride) {
    const PlaneRows planes = plane_rows<type>(w, g.group);
    const size_t e = padded_rows(w.n_rows);
    Firing firing[kTokensAtOnce];
    for (uint32_t t = 0; t < n; ++t) {
        find_firing(g, t0 + t, firing[t]);
    }
    float unpacked[32 * kMaxGroup];
    for (uint32_t r = r0; r < r1; r += 32) {
        for (uint32_t c = 0; c < g.n_columns; ++c) {
            Simd::store(unpacked + 32 * c, Column<type>::get(g.columns[c], e, r));
        }
        for (uint32_t t = 0; t < n; ++t) {
            const Firing & f = firing[t];
            if (f.n == 0) {
                continue;
            }
            Simd::F acc = Simd::zero();
            for (uint32_t i = 0; i < f.n; ++i) {
                acc = Simd::fma(f.h[i], Simd::load(unpacked + 32 * f.of[i]), acc);
            }
            apply_at<type>(planes, r, r1, acc, f.h_sum, out + (t0 + t) * stride);
        }
    }
}

template <ggml_type type>
void accumulate(const ColumnMatrix & w, const ColumnGroup & g, uint32_t r0, uint32_t r1, float * out, size_t stride) {
    if (g.n_tokens == 1) {
        accumulate_one<type>(w, g, r0, r1, out);
        return;
    }
    for (uint32_t t = 0; t < g.n_tokens; t += kTokensAtOnce) {
        accumulate_many<type>(w, g, t, g.n_tokens - t < kTokensAtOnce ? g.n_tokens - t : kTokensAtOnce, r0, r1, out, stride);
    }
}

AccumulateFn accumulate_for(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:  return accumulate<GGML_TYPE_F32>;
        case GGML_TYPE_F16:  return accumulate<GGML_TYPE_F16>;
        case GGML_TYPE_BF16: return accumulate<GGML_TYPE_BF16>;
        case GGML_TYPE_Q4_0: return accumulate<GGML_TYPE_Q4_0>;
        case GGML_TYPE_Q4_1: return accumulate<GGML_TYPE_Q4_1>;
        case GGML_TYPE_Q5_0: return accumulate<GGML_TYPE_Q5_0>;
        case GGML_TYPE_Q5_1: return accumulate<GGML_TYPE_Q5_1>;
        case GGML_TYPE_Q8_0: return accumulate<GGML_TYPE_Q8_0>;
        case GGML_TYPE_Q4_K: return accumulate<GGML_TYPE_Q4_K>;
        case GGML_TYPE_Q5_K: return accumulate<GGML_TYPE_Q5_K>;
        case GGML_TYPE_Q6_K: return accumulate<GGML_TYPE_Q6_K>;
        default: return nullptr;
    }
}

} // namespace
} // namespace ls
