#include "check.h"
#include "support.h"

#include "neuron_guess.h"
#include "predictor.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cmath>
#include <cstring>

using namespace ls;

namespace {

constexpr int64_t kEmbd = 64, kExperts = 12, kUsed = 3;

// A router as build_moe_ffn makes one, computed by ggml, beside what find_router() makes of it.
struct Graph {
    explicit Graph(ggml_type type = GGML_TYPE_F32, bool sigmoid = false, bool bias = false, bool choice_bias = false, bool norm = true) {
        ctx = ggml_init({16 << 20, nullptr, false});
        buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 64);
        x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kEmbd, 1);
        fill(x, 1);
        matrix = weight(ggml_new_tensor_2d(ctx, type, kEmbd, kExperts), 2);
        ggml_tensor * cur = norm ? ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-5f), weight(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, kEmbd), 3)) : x;
        logits = ggml_mul_mat(ctx, matrix, cur);
        ggml_tensor * t = logits;
        if (bias) {
            t = ggml_add(ctx, t, weight(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, kExperts), 4));
        }
        t = sigmoid ? ggml_sigmoid(ctx, t) : ggml_soft_max(ctx, t);
        if (choice_bias) {
            t = ggml_add(ctx, t, weight(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, kExperts), 5));
        }
        ids = ggml_argsort_top_k(ctx, t, kUsed);
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, ids);
        ggml_graph_compute_with_ctx(ctx, graph, 1);
    }
    ~Graph() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    void fill(ggml_tensor * t, uint64_t seed) {
        check::Random random(seed);
        std::vector<float> v(size_t(ggml_nelements(t)));
        for (float & f : v) {
            f = float(random.below(2000)) / 1000.0f - 1.0f;
        }
        if (t->type == GGML_TYPE_F32) {
            memcpy(t->data, v.data(), v.size() * sizeof(float));
        } else {
            ggml_get_type_traits_cpu(t->type)->from_float(v.data(), t->data, int64_t(v.size()));
        }
    }
    ggml_tensor * weight(ggml_tensor * t, uint64_t seed) {
        fill(t, seed);
        t->buffer = buffer; // what tells a weight from an input
        return t;
    }

    // the experts that the graph chose are those with a positive margin
    void check_agrees() {
        const ggml_tensor * found = nullptr;
        const Router r = find_router(ids, found);
        REQUIRE(r.matrix == matrix);
        CHECK(found == logits);
        CHECK_EQ(r.n_used, kUsed);
        std::vector<uint8_t> scratch(r.scratch_bytes());
        std::vector<float> scores(kExperts), margin, again(kExperts);
        r.scores((const float *) x->data, scratch.data(), scores.data(), 0, 5);
        r.scores((const float *) x->data, scratch.data(), scores.data(), 5, kExperts);
        r.finish((const float *) logits->data, again.data(), 0, kExperts);
        for (int e = 0; e < kExperts; ++e) {
            CHECK(std::fabs(scores[size_t(e)] - again[size_t(e)]) < 2e-2f);
        }
        margins(scores.data(), kExperts, kUsed, margin);
        std::vector<int> chosen(kExperts, 0);
        for (int i = 0; i < kUsed; ++i) {
            chosen[size_t(((const int32_t *) ids->data)[i])] = 1;
        }
        for (int e = 0; e < kExperts; ++e) {
            CHECK_EQ(margin[size_t(e)] > 0, chosen[size_t(e)] != 0);
        }
    }

    ggml_context * ctx;
    ggml_backend_buffer_t buffer;
    ggml_tensor * x, * matrix, * logits, * ids;
};

} // namespace

TEST(softmax_router) { Graph().check_agrees(); }
TEST(sigmoid_router_with_choice_bias) { Graph(GGML_TYPE_F32, true, false, true).check_agrees(); }
TEST(router_with_bias) { Graph(GGML_TYPE_F32, false, true).check_agrees(); }
TEST(router_on_the_bare_residual) { Graph(GGML_TYPE_F32, false, false, false, false).check_agrees(); }
TEST(half_precision_router) { Graph(GGML_TYPE_F16).check_agrees(); }

TEST(what_is_not_understood_is_not_predicted) {
    const ggml_tensor * logits = nullptr;
    Graph softmax_with_choice_bias(GGML_TYPE_F32, false, false, true); // its order is not that of the logits
    CHECK(find_router(softmax_with_choice_bias.ids, logits).matrix == nullptr);
    Graph g;
    CHECK(find_router(g.x, logits).matrix == nullptr);
    CHECK(logits == nullptr);
}

TEST(margins_of_all_or_none_are_zero) {
    const float scores[3] = {1, 2, 3};
    std::vector<float> m;
    for (uint32_t k : {0u, 3u, 4u}) {
        margins(scores, 3, k, m);
        CHECK_EQ(m, (std::vector<float>{0, 0, 0}));
    }
    margins(scores, 3, 1, m);
    CHECK_EQ(m, (std::vector<float>{-1.5f, -0.5f, 0.5f}));
}

// Outcomes that follow p = 1 / (1 + exp(-(3 m + offset))): predicted probabilities become the true frequencies.
TEST(calibration_learns_scale_and_offsets) {
    check::Random random(11);
    Calibration c;
    c.reset(3);
    const float offset[3] = {0.0f, 2.0f, -2.0f};
    std::vector<float> m(3), p;
    double error = 0;
    for (int t = 0; t < 20000; ++t) {
        std::vector<uint8_t> used(3);
        std::vector<float> truth(3);
        for (int i = 0; i < 3; ++i) {
            m[size_t(i)] = float(random.below(2001)) / 1000.0f - 1.0f;
            truth[size_t(i)] = 1.0f / (1.0f + std::exp(-(3.0f * m[size_t(i)] + offset[i])));
            used[size_t(i)] = float(random.below(1000000)) / 1e6f < truth[size_t(i)];
        }
        c.probabilities(m, p);
        for (int i = 0; i < 3 && t >= 10000; ++i) {
            error += std::fabs(p[size_t(i)] - truth[size_t(i)]) / 30000;
        }
        c.learn(m, p, used);
    }
    CHECK(error < 0.08);
}

TEST(firing_is_learnt_from_scores_of_any_size) {
    constexpr uint32_t kNeurons = 96;
    for (const float size : {0.01f, 1.0f, 300.0f}) {
        FiringModel model;
        model.reset(kNeurons);
        check::Random random(7);
        std::vector<float> score(kNeurons), p;
        std::vector<uint8_t> fired(kNeurons);
        double first = 0, last = 0;
        for (int turn = 0; turn < 400; ++turn) {
            for (uint32_t i = 0; i < kNeurons; ++i) {
                const float v = float(random.below(2000)) / 1000.0f - 1.0f;
                fired[i] = v + (i % 3 == 0 ? 0.5f : -0.3f) > 0; // a neuron's own drift between the guess and its turn
                score[i] = size * v;
            }
            model.note_size(score.data());
            model.probabilities(score.data(), p);
            double error = 0;
            for (uint32_t i = 0; i < kNeurons; ++i) {
                CHECK(p[i] >= 0 && p[i] <= 1);
                error += std::fabs(double(p[i]) - fired[i]) / kNeurons;
            }
            (turn < 20 ? first : last) += turn < 20 ? error / 20 : turn >= 380 ? error / 20 : 0;
            model.learn(score.data(), fired);
        }
        CHECK(last < 0.7 * first);
    }
}

TEST(firing_survives_numbers_that_are_none) {
    FiringModel model;
    model.reset(4);
    const std::vector<float> score = {NAN, INFINITY, -INFINITY, 0.0f};
    std::vector<float> p;
    model.note_size(score.data());
    model.probabilities(score.data(), p);
    model.learn(score.data(), {1, 0, 1, 0});
    model.probabilities(score.data(), p);
    for (const float v : p) {
        CHECK(v >= 0 && v <= 1);
    }
}
