// A model on a device with less memory than it needs: logits are the bytes of the whole model on that device, at every budget of
// device and host memory. Runs where a build has a GPU backend and there is a device, Mesa's software Vulkan driver included.
#include "check.h"
#include "toy_run.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <utility>

using check::Streaming;
using check::ToyModel;

namespace {

constexpr int32_t kAll = -1;

void require_device() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const enum ggml_backend_dev_type type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) {
            return;
        }
    }
    REQUIRE(!getenv("LEANSTREAM_TEST_DEVICE")); // somebody counts on one
    SKIP("no device: build with -DGGML_VULKAN=ON and set GGML_VK_VISIBLE_DEVICES=0 for the software driver");
}

// a batch of many tokens, one of a few, then single ones
std::vector<float> run(ToyModel & m) {
    std::vector<float> out = m.logits(0, 64, 10);
    const std::vector<float> few = m.logits(0, 3, 6, 7);
    out.insert(out.end(), few.begin(), few.end());
    return out;
}

// level: of host memory
Streaming on_device(uint64_t device_budget, double level = check::kUnlimited, int32_t n_gpu_layers = kAll) {
    Streaming s(level);
    s.n_gpu_layers = n_gpu_layers;
    s.device_budget_bytes = device_budget;
    return s;
}

struct Range { uint64_t low, high; };

Range range(const std::string & path, bool device_inexact = false) {
    Streaming s = on_device(0);
    s.device_inexact = device_inexact;
    s.host_cost = 1;
    ToyModel everything(path, s);
    return {everything.device_number("minimum_budget_bytes"), everything.device_number("full_budget_bytes")};
}

void exact_at_every_device_budget(const char * name) {
    require_device();
    const std::string path = check::toy(name);
    ToyModel whole(path, 2, 99);
    const std::vector<float> expected = run(whole);
    REQUIRE(!expected.empty());
    const Range r = range(path);
    REQUIRE(r.low <= r.high); // the same where all matrices fit two stages
    for (const uint64_t device_budget : {r.low, (3 * r.low + r.high) / 4, (r.low + r.high) / 2, r.high}) {
        ToyModel m(path, on_device(device_budget));
        const std::string what = std::string(name) + " at " + std::to_string(device_budget) + " of device memory";
        check::same_logits(run(m), expected, what);
        CHECK_EQ(m.error().status, LS_OK);
        const ls_stats cold = m.stats();
        CHECK_EQ(cold.device_budget_bytes, device_budget);
        CHECK(cold.device_used_bytes <= device_budget);
        CHECK_EQ(cold.device_copied_bytes == 0, device_budget == r.high);
        CHECK_EQ(cold.device_syncs == 0, device_budget == r.high);
        check::same_logits(run(m), expected, what + ", warm");
    }
}

// mean Kullback-Leibler divergence of two models' next tokens
double divergence(const std::vector<float> & p, const std::vector<float> & q, size_t n_vocab) {
    double sum = 0;
    for (size_t row = 0; row < p.size(); row += n_vocab) {
        const float * a = p.data() + row, * b = q.data() + row;
        const double most_a = *std::max_element(a, a + n_vocab), most_b = *std::max_element(b, b + n_vocab);
        double sum_a = 0, sum_b = 0, dot = 0;
        for (size_t i = 0; i < n_vocab; ++i) {
            const double e = std::exp(a[i] - most_a);
            sum_a += e;
            sum_b += std::exp(b[i] - most_b);
            dot   += e * ((a[i] - most_a) - (b[i] - most_b));
        }
        sum += dot / sum_a - std::log(sum_a) + std::log(sum_b);
    }
    return sum / double(p.size() / n_vocab);
}

// Neurons that fire are summed on the host, those that the file holds for the device there. The device is no farther from the host than
// with the file that the lean one was made from.
void lean_at_every_budget(const char * name, uint32_t fidelity, bool summed_there) {
    require_device();
    const std::string path = check::toy(name);
    Streaming s = on_device(0);
    s.fidelity = fidelity;
    ToyModel everything(path, s);
    const std::vector<float> expected = run(everything);
    REQUIRE(!expected.empty());
    const ls_stats stats = everything.stats();
    CHECK_EQ(stats.device_syncs, 2 * everything.n_layers() * stats.n_graphs);
    CHECK_EQ(stats.device_hits > 0, summed_there);
    CHECK(stats.device_misses > 0);

    Streaming host;
    host.fidelity = fidelity;
    ToyModel without(path, host);
    const std::string source = check::toy("sources/" + std::string(name).substr(0, std::string(name).rfind('_')));
    ToyModel source_there(source, 2, 99), source_here(source);
    CHECK(divergence(run(without), expected, everything.n_vocab()) < 2 * divergence(run(source_here), run(source_there), everything.n_vocab()));

    const uint64_t low = everything.device_number("minimum_budget_bytes"), high = everything.device_number("full_budget_bytes");
    for (const auto & [device_budget, level] : {std::pair<uint64_t, double>{low, check::kUnlimited}, {(low + high) / 2, check::kMinimum},
                                                {high, check::kMinimum}}) {
        s = on_device(device_budget, level);
        s.fidelity = fidelity;
        ToyModel m(path, s);
        const std::string what = path + " at " + std::to_string(device_budget) + " of device memory, host level " + std::to_string(level);
        check::same_logits(run(m), expected, what);
        check::same_logits(run(m), expected, what + ", warm");
        CHECK(m.stats().device_used_bytes <= device_budget);
    }
}

} // namespace

TEST(neurons)                  { lean_at_every_budget("dense_arcee_lean", 0, false); }
TEST(gated_neurons)            { lean_at_every_budget("dense_tied_lean", 0, false); }
TEST(neurons_for_a_device)     { lean_at_every_budget("dense_arcee_device", 0, true); }
TEST(gated_for_a_device)       { lean_at_every_budget("dense_tied_device", 0, true); }
TEST(neurons_by_their_sketch)  { lean_at_every_budget("dense_arcee_faithful", 1, false); }

// A record in place of three slices: the same experts.
TEST(bundled_experts) {
    require_device();
    ToyModel whole(check::toy("moe_qwen3"), 2, 99);
    const std::vector<float> expected = run(whole);
    const std::string path = check::toy("moe_qwen3_lean");
    const Range r = range(path);
    for (const uint64_t device_budget : {r.low, (r.low + r.high) / 2, r.high}) {
        ToyModel m(path, on_device(device_budget, check::kMinimum));
        check::same_logits(run(m), expected, path + " at " + std::to_string(device_budget) + " of device memory");
    }
}

// Blocks of the host keep its own path.
TEST(neurons_of_some_blocks) {
    require_device();
    const std::string path = check::toy("dense_arcee_device");
    ToyModel everything(path, on_device(0, check::kUnlimited, 3));
    const std::vector<float> expected = run(everything);
    REQUIRE(!expected.empty());
    ToyModel m(path, on_device(everything.device_number("minimum_budget_bytes"), check::kMinimum, 3));
    check::same_logits(run(m), expected, "least device memory");
}

TEST(moe_qwen3)      { exact_at_every_device_budget("moe_qwen3"); }
TEST(moe_bias)       { exact_at_every_device_budget("moe_bias"); }
TEST(moe_merged)     { exact_at_every_device_budget("moe_merged"); }
TEST(moe_dense_lead) { exact_at_every_device_budget("moe_dense_lead"); }
TEST(dense_untied)   { exact_at_every_device_budget("dense_untied"); }
TEST(dense_tied)     { exact_at_every_device_budget("dense_tied"); }

// Device and host both short: experts and matrices come from disk, through host memory, to the device.
TEST(both_budgets_at_their_minimum) {
    require_device();
    for (const char * name : {"moe_qwen3", "dense_untied"}) {
        const std::string path = check::toy(name);
        ToyModel whole(path, 2, 99);
        const std::vector<float> expected = run(whole);
        const Range r = range(path);
        ToyModel m(path, on_device(r.low, check::kMinimum));
        check::same_logits(run(m), expected, name);
        check::same_logits(run(m), expected, std::string(name) + " again");
        CHECK(m.stats().read_bytes > 0);
    }
}

// What the device ranks first is read before its layer chooses.
TEST(experts_read_ahead) {
    require_device();
    const std::string path = check::toy("moe_qwen3");
    ToyModel whole(path, 2, 99);
    const std::vector<float> expected = run(whole);
    ToyModel m(path, on_device(range(path).low, check::kMiddle));
    check::same_logits(run(m), expected, "cold");
    check::same_logits(run(m), expected, "warm");
    const ls_stats s = m.stats();
    CHECK(s.n_ahead > 0);
    CHECK_EQ(s.n_ahead >= s.n_ahead_used + s.n_ahead_wasted, true);
    CHECK_EQ(ls_model_set_speculation(m.streamed(), 0, 1), LS_OK);
    ls_model_reset_stats(m.streamed());
    check::same_logits(run(m), expected, "switched off");
    CHECK_EQ(m.stats().n_ahead, 0u);
}

// n_gpu_layers as llama.cpp reads it: the other blocks stay with the host's own path.
TEST(some_blocks_on_the_device) {
    require_device();
    const std::string path = check::toy("moe_qwen3");
    ToyModel whole(path, 2, 2);
    const std::vector<float> expected = run(whole);
    REQUIRE(!expected.empty());
    ToyModel everything(path, on_device(0, check::kUnlimited, 2));
    check::same_logits(run(everything), expected, "everything resident");
    ToyModel m(path, on_device(everything.device_number("minimum_budget_bytes"), check::kUnlimited, 2));
    check::same_logits(run(m), expected, "least device memory");
}

namespace {

Streaming inexact(uint64_t device_budget, double host_cost) {
    Streaming s = on_device(device_budget);
    s.device_inexact = true;
    s.host_cost = host_cost;
    return s;
}

constexpr double kFree = 1.0 / 64; // the host computes all that it can
constexpr size_t kVocab = 512;     // of the toy models

void some_experts_on_the_host(const char * name) {
    require_device();
    const std::string path = check::toy(name);
    ToyModel whole(path, 2, 99);
    const std::vector<float> expected = run(whole);
    ToyModel host(path);
    const double limit = divergence(expected, run(host), kVocab); // where the host computes everything
    const Range r = range(path, true);
    for (const double cost : {1.0, kFree}) {
        ToyModel m(path, inexact(r.low, cost));
        const std::vector<float> got = run(m);
        REQUIRE(got.size() == expected.size());
        CHECK(divergence(expected, got, kVocab) <= limit);
        const ls_stats s = m.stats();
        CHECK(s.device_host_experts > 0);
        CHECK(s.device_host_experts < s.device_misses); // a prompt's are copied
        ToyModel again(path, inexact(r.low, cost));
        check::same_logits(run(again), got, "the same tokens at the same cost");
    }
}

} // namespace

TEST(host_experts_qwen3)      { some_experts_on_the_host("moe_qwen3"); }
TEST(host_experts_dense_lead) { some_experts_on_the_host("moe_dense_lead"); }

// Nothing is missing, or the host cannot take part (biases are on the device, gate and up are one tensor): the same bytes.
TEST(no_experts_for_the_host) {
    require_device();
    for (const char * name : {"moe_qwen3", "moe_bias", "moe_merged"}) {
        const std::string path = check::toy(name);
        ToyModel whole(path, 2, 99);
        const Range r = range(path, true);
        ToyModel m(path, inexact(std::string(name) == "moe_qwen3" ? r.high : r.low, kFree));
        check::same_logits(run(m), run(whole), name);
        CHECK_EQ(m.stats().device_host_experts, 0u);
    }
}

TEST(host_cost_is_measured) {
    require_device();
    const std::string path = check::toy("moe_qwen3");
    ToyModel m(path, inexact(range(path, true).low, 0));
    char * json = nullptr;
    REQUIRE(ls_model_plan_json(m.streamed(), 0, 0, 0, &json) == LS_OK);
    const std::string plan = json, key = "\"host_cost\":";
    ls_string_free(json);
    REQUIRE(plan.find(key) != std::string::npos);
    const double cost = std::strtod(plan.c_str() + plan.find(key) + key.size(), nullptr);
    CHECK(cost > 0);
    CHECK_EQ(std::log2(cost), std::round(std::log2(cost)));
}

TEST(too_small_a_device_budget_is_refused) {
    require_device();
    const std::string path = check::toy("moe_qwen3");
    const Range r = range(path);
    std::string message;
    try {
        ToyModel m(path, on_device(r.low - (1u << 20)));
    } catch (const std::exception & e) {
        message = e.what();
    }
    CHECK(message.find("device budget") != std::string::npos);
    ToyModel m(path, on_device(r.low));
    CHECK_EQ(ls_model_set_device_budget(m.streamed(), r.high), LS_ERR_STATE);
}

TEST(two_contexts_take_turns) {
    require_device();
    const std::string path = check::toy("moe_qwen3");
    ToyModel whole(path, 2, 99);
    const std::vector<float> expected = whole.logits();
    Streaming s = on_device(0);
    s.n_contexts = 2;
    ToyModel everything(path, s);
    s.device_budget_bytes = everything.device_number("minimum_budget_bytes");
    ToyModel m(path, s);
    std::vector<float> second;
    std::thread other([&] { second = m.logits(1); });
    check::same_logits(m.logits(0), expected, "first");
    other.join();
    check::same_logits(second, expected, "second");
}
