#include "host_cost.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

namespace ls {

namespace {

constexpr double kMostCost = 1024;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

// One expert's products with one row, this thread's share of their rows.
void multiply(const HostExperts & host, uint32_t expert, const std::vector<uint8_t> & input, int ith, int nth) {
    float out = 0;
    for (uint32_t p = 0; p < host.layer.parts.size(); ++p) {
        const ggml_tensor * w = host.layer.parts[p]->tensor;
        const uint8_t * rows = host.memory(p, expert);
        const ggml_vec_dot_t vec_dot = ggml_get_type_traits_cpu(w->type)->vec_dot;
        for (int64_t r = w->ne[1] * ith / nth; r < w->ne[1] * (ith + 1) / nth; ++r) {
            vec_dot(int(w->ne[0]), &out, 0, rows + r * w->nb[1], 0, input.data(), 0, 1);
        }
    }
}

// Once over all experts: they come from memory and not from a processor's cache, as when a token needs them.
double compute_seconds(const HostExperts & host, int n_threads) {
    size_t input_bytes = 0;
    for (const Weight * w : host.layer.parts) {
        const ggml_type type = ggml_get_type_traits_cpu(w->tensor->type)->vec_dot_type;
        input_bytes = std::max(input_bytes, ggml_row_size(type, w->tensor->ne[0]));
    }
    const std::vector<uint8_t> input(input_bytes, 0);
    std::atomic<int> ready{0};
    std::vector<double> seconds(static_cast<size_t>(n_threads));
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t) {
        threads.emplace_back([&, t] {
            for (ready++; ready.load() < n_threads;) {
                std::this_thread::yield();
            }
            const Clock::time_point begin = Clock::now();
            for (uint32_t e : host.experts) {
                multiply(host, e, input, t, n_threads);
            }
            seconds[size_t(t)] = seconds_since(begin);
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
    return *std::max_element(seconds.begin(), seconds.end());
}

double copy_seconds(const HostExperts & host, const std::vector<ggml_tensor *> & stage, ggml_backend_t backend) {
    ggml_backend_synchronize(backend);
    const Clock::time_point begin = Clock::now();
    for (uint32_t e : host.experts) {
        for (uint32_t p = 0; p < stage.size(); ++p) {
            ggml_backend_tensor_set_async(backend, stage[p], host.memory(p, e), e * stage[p]->nb[2], stage[p]->nb[2]);
        }
    }
    ggml_backend_synchronize(backend);
    return seconds_since(begin);
}

} // namespace

uint32_t host_share(uint32_t n, double cost) {
    uint32_t best = 0;
    const auto time = [&](uint32_t k) { return std::max(double(n - k), k * cost); };
    for (uint32_t k = 1; k <= n; ++k) {
        best = time(k) < time(best) ? k : best;
    }
    return best;
}

double measure_host_cost(const HostExperts & host, const std::vector<ggml_tensor *> & stage, ggml_backend_t backend, int n_threads) {
    if (host.experts.empty()) {
        return kMostCost; // nothing fits into host memory
    }
    const double compute = compute_seconds(host, n_threads), copy = copy_seconds(host, stage, backend);
    return std::exp2(std::round(std::log2(std::clamp(compute / std::max(copy, 1e-9), 1 / kMostCost, kMostCost))));
}

} // namespace ls
