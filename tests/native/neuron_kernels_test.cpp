// Every kernel set and type against a float64 sum of ggml's own dequantised weights, odd sizes included.
#include "check.h"

#include "neuron_kernels.h"

#include "lean_down.h"

#include <cmath>
#include <random>
#include <vector>

using namespace ls;

namespace {

constexpr uint32_t kNeurons = 512;

struct Firing {
    std::vector<std::vector<uint32_t>> neurons; // [token] ascending
    std::vector<std::vector<float>> h;          // [token][k]
};

Firing random_firing(uint32_t n_tokens, double density, std::mt19937 & rng) {
    std::uniform_real_distribution<double> u(0, 1);
    std::normal_distribution<float> value;
    Firing f;
    f.neurons.resize(n_tokens);
    f.h.resize(n_tokens);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        for (uint32_t j = 0; j < kNeurons; ++j) {
            if (u(rng) < density) {
                f.neurons[t].push_back(j);
                f.h[t].push_back(value(rng));
            }
        }
    }
    return f;
}

// Runs the kernel group by group, as the op does.
std::vector<float> run(AccumulateFn kernel, const lean::Down & w, const Firing & f, uint32_t r0, uint32_t r1) {
    const ColumnMatrix matrix = { column_format(w.type), w.n_rows, kNeurons, w.planes.data() };
    const uint32_t n_tokens = uint32_t(f.neurons.size()), group = matrix.format->group;
    const size_t stride = w.n_rows + 3;
    std::vector<float> out(stride * n_tokens, 0.0f);
    std::vector<float> h(size_t(n_tokens) * kNeurons, 0.0f);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        for (size_t k = 0; k < f.neurons[t].size(); ++k) {
            h[t * kNeurons + (f.neurons[t][k] + 7) % kNeurons] = f.h[t][k];
        }
    }
    for (uint32_t g = 0; g < kNeurons / group; ++g) {
        std::vector<const uint8_t *> columns;
        std::vector<uint32_t> positions;
        for (uint32_t j = g * group; j < (g + 1) * group; ++j) {
            columns.push_back(w.columns[j].data());
            positions.push_back((j + 7) % kNeurons); // some other order than the original one
        }
        kernel(matrix, { g, group, columns.data(), positions.data(), n_tokens, h.data(), kNeurons }, r0, r1, out.data(), stride);
    }
    return out;
}

void compare(const lean::Down & w, const Firing & f, const std::vector<float> & out, uint32_t r0, uint32_t r1, const char * what) {
    const size_t stride = w.n_rows + 3;
    for (uint32_t t = 0; t < f.neurons.size(); ++t) {
        for (uint32_t r = 0; r < stride; ++r) {
            double sum = 0, size = 1e-12;
            for (size_t k = 0; k < f.neurons[t].size() && r >= r0 && r < r1; ++k) {
                const double term = double(f.h[t][k]) * double(w.values[size_t(r) * kNeurons + f.neurons[t][k]]);
                sum += term;
                size += std::fabs(term);
            }
            // minus a min costs digits: q d and m are as large as the largest weight
            const double error = std::fabs(double(out[t * stride + r]) - sum) / size;
            if (error > 2e-5) {
                check::failed(__FILE__, __LINE__, std::string(what) + ": row " + std::to_string(r) + " of " + std::to_string(w.n_rows) +
                    ", type " + ggml_type_name(w.type) + ", relative error " + std::to_string(error));
                return;
            }
        }
    }
}

const KernelSet kSets[] = { KernelSet::portable, KernelSet::avx2, KernelSet::avx512, KernelSet::neon };
const char * const kNames[] = { "portable", "avx2", "avx512", "neon" };
const ggml_type kTypes[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
    GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K };

} // namespace

TEST(sums_agree_with_float64) {
    std::mt19937 rng(1);
    for (ggml_type type : kTypes) {
        for (uint32_t n_rows : { 1u, 31u, 33u, 64u, 100u, 129u, 640u }) {
            const lean::Down w = lean::random_down(type, kNeurons, n_rows, rng);
            for (int s = 0; s < 4; ++s) {
                if (!kernel_set_usable(kSets[s])) {
                    continue;
                }
                const AccumulateFn kernel = accumulate_kernel(kSets[s], type);
                REQUIRE(kernel != nullptr);
                for (double density : { 0.0, 0.05, 1.0 }) {
                    const Firing f = random_firing(1, density, rng);
                    compare(w, f, run(kernel, w, f, 0, n_rows), 0, n_rows, kNames[s]);
                }
                const Firing f = random_firing(5, 0.1, rng);
                compare(w, f, run(kernel, w, f, 0, n_rows), 0, n_rows, kNames[s]);
            }
        }
    }
}

TEST(a_batch_gives_the_bits_of_single_tokens) {
    std::mt19937 rng(2);
    for (ggml_type type : kTypes) {
        const lean::Down w = lean::random_down(type, kNeurons, 100, rng);
        const Firing all = random_firing(70, 0.08, rng); // more than the kernel takes at once
        for (KernelSet set : kSets) {
            if (!kernel_set_usable(set)) {
                continue;
            }
            const AccumulateFn kernel = accumulate_kernel(set, type);
            const std::vector<float> batch = run(kernel, w, all, 0, 100);
            for (uint32_t t = 0; t < 70; ++t) {
                const Firing one = { { all.neurons[t] }, { all.h[t] } };
                const std::vector<float> alone = run(kernel, w, one, 0, 100);
                CHECK(std::equal(alone.begin(), alone.begin() + 100, batch.begin() + t * 103));
            }
        }
    }
}

TEST(threads_split_rows_without_a_trace) {
    std::mt19937 rng(3);
    for (ggml_type type : kTypes) {
        const lean::Down w = lean::random_down(type, kNeurons, 200, rng);
        const Firing f = random_firing(1, 0.2, rng);
        const AccumulateFn kernel = accumulate_kernel(best_kernel_set(), type);
        const std::vector<float> whole = run(kernel, w, f, 0, 200);
        const std::vector<float> low = run(kernel, w, f, 0, 96), high = run(kernel, w, f, 96, 200);
        for (uint32_t r = 0; r < 200; ++r) {
            CHECK_EQ(whole[r], r < 96 ? low[r] : high[r]);
            CHECK_EQ(r < 96 ? high[r] : low[r], 0.0f);
        }
    }
}

TEST(types_without_a_kernel_are_named) {
    CHECK(column_format(GGML_TYPE_IQ2_XXS) == nullptr);
    CHECK(accumulate_kernel(KernelSet::portable, GGML_TYPE_IQ2_XXS) == nullptr);
    CHECK(kernel_set_usable(best_kernel_set()));
}
