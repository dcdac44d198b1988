// Rows of one expert's matrix times one input, shared among the threads of a graph node.
#pragma once

#include "ggml-cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace ls {

// Rows r0 .. r1 of w, whose first byte is `weights`, times x (in the type that w's kernel multiplies with), to out[r0 .. r1).
inline void dot_rows(const ggml_tensor & w, const uint8_t * weights, const char * x, float * out, int64_t r0, int64_t r1) {
    const ggml_vec_dot_t vec_dot = ggml_get_type_traits_cpu(w.type)->vec_dot;
    for (int64_t r = r0; r < r1; ++r) {
        vec_dot(int(w.ne[0]), out + r, 0, weights + r * w.nb[1], 0, x, 0, 1);
    }
}

// Below this many bytes a thread, sharing a counter costs more than an uneven split (10 % of zoo-moe's speed).
constexpr size_t kSmallExpert = 64 * 1024;

// Calls fn(r0, r1) until this thread has done its part of w's rows. next: of this expert and product, 0 before the first thread.
template <typename Fn> void share_rows(const ggml_tensor & w, int ith, int nth, std::atomic<int32_t> & next, Fn && fn) {
    const int64_t m = w.ne[1];
    if (m * w.nb[1] < kSmallExpert * size_t(nth)) {
        fn(m * ith / nth, m * (ith + 1) / nth);
        return;
    }
    // four chunks a thread even out a core that is taken away
    const int64_t chunk = std::max<int64_t>(16, (m + 4 * nth - 1) / (4 * nth));
    for (int64_t r = next.fetch_add(1, std::memory_order_relaxed) * chunk; r < m;
         r = next.fetch_add(1, std::memory_order_relaxed) * chunk) {
        fn(r, std::min(m, r + chunk));
    }
}

} // namespace ls
