#include "repacked.h"

#include "status.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace ls {

namespace {

constexpr int64_t  kRows       = 64;              // a multiple of every interleave
constexpr uint64_t kPieceBytes = 2u << 20;
constexpr uint32_t kMaxThreads = 4;

ggml_backend_buffer_type_t repack_type() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : nullptr;
    const auto list = reg ? (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts") : nullptr;
    for (ggml_backend_buffer_type_t * type = list ? list(cpu) : nullptr; type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) {
            return *type;
        }
    }
    return nullptr;
}

struct Piece {
    const ggml_tensor * twin;
    int64_t first, n; // rows
};

void convert_piece(const Piece & piece, std::vector<uint8_t> & staging) {
    ggml_tensor rows = *piece.twin;
    rows.ne[1] = piece.n;
    rows.nb[2] = rows.nb[3] = rows.nb[1] * size_t(piece.n);
    rows.data  = (uint8_t *) piece.twin->data + size_t(piece.first) * rows.nb[1];
    staging.resize(ggml_nbytes(&rows));
    memcpy(staging.data(), rows.data, staging.size());
    ggml_backend_tensor_set(&rows, staging.data(), 0, staging.size());
}

} // namespace

Repacked::Repacked() {
    ggml_backend_buffer_type_t type = repack_type();
    buffer_ = type ? ggml_backend_buft_alloc_buffer(type, page_size()) : nullptr;
    if (!buffer_) {
        throw Error(LS_ERR_UNSUPPORTED, "this build of llama.cpp has no repacked weights (CPU_REPACK); leave out repack");
    }
    ggml_backend_buffer_set_usage(buffer_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
}

Repacked::~Repacked() {
    ggml_backend_buffer_free(buffer_);
}

ggml_tensor * Repacked::twin(Weight & w) {
    if (w.twin || !w.multiplied || w.on_device || (w.use != Use::dense && w.use != Use::resident)) {
        return w.twin;
    }
    ggml_tensor t = *w.tensor;
    t.buffer = buffer_;
    t.extra  = nullptr;
    t.data   = w.home ? w.home : ggml_backend_buffer_get_base(buffer_); // a load that only measures has no memory
    ggml_backend_buffer_init_tensor(buffer_, &t);
    if (t.extra) {
        twins_.push_back(t);
        w.twin = &twins_.back();
    }
    return w.twin;
}

RepackedFn Repacked::kernel(const ggml_tensor & twin) const {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    // a twin of this type is interleaved by 8 rows and 8 bytes on every x86 processor
    return usable && twin.type == GGML_TYPE_Q4_0 ? repacked_q4_0_avx512() : nullptr;
#else
    return nullptr;
#endif
}

void Repacked::convert(Weights & weights) {
    std::vector<Piece> pieces;
    for (const Weight & w : weights.all()) {
        if (!w.twin) {
            continue;
        }
        const int64_t n_rows = w.twin->ne[1], step = std::max(kRows, int64_t(kPieceBytes / w.twin->nb[1]) / kRows * kRows);
        for (int64_t first = 0; first < n_rows; first += step) {
            pieces.push_back({ w.twin, first, std::min(step, n_rows - first) });
        }
    }
    std::atomic<size_t> next{0};
    const auto work = [&] {
        std::vector<uint8_t> staging;
        for (size_t i = next.fetch_add(1); i < pieces.size(); i = next.fetch_add(1)) {
            convert_piece(pieces[i], staging);
        }
    };
    std::vector<std::thread> threads;
    for (uint32_t i = 1; i < std::min(kMaxThreads, std::thread::hardware_concurrency()); ++i) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & t : threads) {
        t.join();
    }
}

} // namespace ls
