// Speed of one variant of one model, measured by hand or by scripts/gpu_table.py: prompt and generation, teacher-forced, with a
// hash of every logit. Prints one JSON line.
//
//   device_speed --model F --text F --engine stock|leanstream [--ngl N] [--cpu-moe N] [--mmap] [--device-budget BYTES]
//                [--budget BYTES] [--prompt N] [--steps N] [--rounds N] [--threads N] [--ubatch N] [--flash-attn 0|1] [--logits FILE]
//                [--inexact [--host-cost X]] [--io-backend N] [--io-depth N]
//   device_speed --bus            rate of copies from page-locked memory to the device, and the time of two waits for it
//   device_speed --drive FILE     rate of random reads past the page cache: the best of the shapes that streaming uses, [bytes, in flight, bytes/s]
#include "leanstream.h"
#include "llama.h"

#include "ggml-backend.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Options {
    std::map<std::string, std::string> values;
    const std::string & text(const char * key, const std::string & otherwise) const {
        const auto it = values.find(key);
        return it == values.end() ? otherwise : it->second;
    }
    int64_t number(const char * key, int64_t otherwise) const { return has(key) ? atoll(values.at(key).c_str()) : otherwise; }
    bool has(const char * key) const { return values.count(key) > 0; }
};

[[noreturn]] void stop(const std::string & what) {
    fprintf(stderr, "device_speed: %s\n", what.c_str());
    exit(1);
}

void require(ls_status status, const char * what) {
    if (status != LS_OK) {
        ls_error e = {};
        ls_last_error(&e);
        stop(std::string(what) + ": " + e.message);
    }
}

const std::pair<const char *, uint64_t ls_stats::*> kCounters[] = {
    {"n_tokens", &ls_stats::n_tokens}, {"device_copied_bytes", &ls_stats::device_copied_bytes}, {"device_hits", &ls_stats::device_hits},
    {"device_misses", &ls_stats::device_misses}, {"device_syncs", &ls_stats::device_syncs}, {"device_host_experts", &ls_stats::device_host_experts},
    {"hits", &ls_stats::hits}, {"misses", &ls_stats::misses}, {"stall_ns", &ls_stats::stall_ns}, {"n_reads", &ls_stats::n_reads},
    {"read_bytes", &ls_stats::read_bytes}, {"read_busy_ns", &ls_stats::read_busy_ns}, {"n_ahead", &ls_stats::n_ahead},
    {"n_ahead_used", &ls_stats::n_ahead_used}, {"n_ahead_late", &ls_stats::n_ahead_late}, {"ahead_wasted_bytes", &ls_stats::ahead_wasted_bytes},
};

struct Run {
    explicit Run(const Options & o) : options(o) {}

    const Options & options;
    ls_model * stream = nullptr;
    llama_model * model = nullptr;
    llama_context * ctx = nullptr;
    std::vector<llama_token> tokens;
    uint64_t hash = 1469598103934665603ull; // FNV-1a over the bytes of the logits
    FILE * logits = nullptr;
    std::vector<double> prompt_rate, step_rate;
    ls_stats prompt_stats = {}, step_stats = {}; // of the timed rounds
    double load_seconds = 0;

    void load() {
        const Clock::time_point begin = Clock::now();
        const std::string & path = options.text("model", "");
        const bool streamed = options.text("engine", "stock") == "leanstream";
        llama_model_params mp = llama_model_default_params();
        mp.n_gpu_layers = int32_t(options.number("ngl", -1));
        mp.use_extra_bufts = false;
        mp.split_mode = LLAMA_SPLIT_MODE_NONE;
        mp.load_mode = options.has("mmap") ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
        std::vector<std::string> patterns; // as llama.cpp's --n-cpu-moe N
        for (int64_t i = 0; i < options.number("cpu-moe", 0); ++i) {
            patterns.push_back("blk\\." + std::to_string(i) + "\\.ffn_(up|down|gate|gate_up)_(ch|)exps");
        }
        std::vector<llama_model_tensor_buft_override> overrides;
        for (const std::string & p : patterns) {
            overrides.push_back({p.c_str(), ggml_backend_cpu_buffer_type()});
        }
        overrides.push_back({nullptr, nullptr});
        mp.tensor_buft_overrides = overrides.data();
        if (streamed) {
            ls_options lo = {};
            lo.direct_io = 1;
            lo.n_io_threads = 8;
            lo.io_backend = uint32_t(options.number("io-backend", 0));
            lo.io_depth = uint32_t(options.number("io-depth", 0));
            lo.device_inexact = options.has("inexact");
            lo.host_cost = atof(options.text("host-cost", "0").c_str());
            require(ls_install(), "ls_install");
            require(ls_model_open(path.c_str(), &lo, &stream), "open");
            require(ls_model_set_device_budget(stream, uint64_t(options.number("device-budget", 0))), "device budget");
            require(ls_load_begin(stream, 0), "load");
            require(ls_load_limit_outputs(stream, 1), "outputs");
        }
        model = llama_model_load_from_file(path.c_str(), mp);
        if (!model) {
            stop("cannot load " + path);
        }
        llama_context_params cp = llama_context_default_params();
        cp.n_ctx = uint32_t(options.number("prompt", 512) + options.number("steps", 128) + 64);
        cp.n_batch = cp.n_ubatch = uint32_t(options.number("ubatch", 512));
        cp.n_threads = cp.n_threads_batch = int32_t(options.number("threads", 16));
        if (options.has("flash-attn")) {
            cp.flash_attn_type = options.number("flash-attn", 0) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        }
        cp.op_offload = true; // stock's default; a streamed model turns it off
        ctx = llama_init_from_model(model, cp);
        ls_load_end();
        if (!ctx) {
            stop("no context");
        }
        if (streamed) {
            require(ls_model_activate(stream, uint64_t(options.number("budget", 0)), 0, 0), "activate");
        }
        load_seconds = seconds_since(begin);
    }

    void tokenize() {
        std::ifstream in(options.text("text", ""));
        std::stringstream all;
        all << in.rdbuf();
        const std::string text = all.str();
        const size_t wanted = size_t(options.number("prompt", 512) + options.number("steps", 128));
        tokens.resize(text.size() + 8);
        const int32_t n = llama_tokenize(llama_model_get_vocab(model), text.c_str(), int32_t(text.size()), tokens.data(),
            int32_t(tokens.size()), false, false);
        if (n < int32_t(wanted)) {
            stop("--text has too few tokens");
        }
        tokens.resize(wanted);
    }

    void note_logits() {
        const float * row = llama_get_logits_ith(ctx, -1);
        const size_t n_bytes = size_t(llama_vocab_n_tokens(llama_model_get_vocab(model))) * sizeof(float);
        const uint64_t * words = (const uint64_t *) row;
        for (size_t i = 0; i < n_bytes / 8; ++i) {
            hash = (hash ^ words[i]) * 1099511628211ull;
        }
        if (logits) {
            fwrite(row, 1, n_bytes, logits);
        }
    }

    void decode(size_t first, size_t n) {
        if (llama_decode(ctx, llama_batch_get_one(tokens.data() + first, int32_t(n))) != 0) {
            ls_error e = {};
            if (stream && ls_context_take_error(stream, ctx) != LS_OK) {
                ls_last_error(&e);
            }
            stop(std::string("decode failed: ") + e.message);
        }
    }

    // Adds what was counted since the last call.
    void count(ls_stats & sum) {
        ls_stats s = {};
        if (!stream) {
            return;
        }
        require(ls_model_get_stats(stream, &s), "stats");
        ls_model_reset_stats(stream);
        for (const auto & [name, counter] : kCounters) {
            sum.*counter += s.*counter;
        }
    }

    // One round: the prompt, then the steps one by one. The first rounds warm caches and CUDA graphs up and are not timed.
    void round(bool timed) {
        const size_t n_prompt = size_t(options.number("prompt", 512)), n_batch = size_t(options.number("ubatch", 512));
        llama_memory_clear(llama_get_memory(ctx), true);
        hash = 1469598103934665603ull;
        Clock::time_point begin = Clock::now();
        for (size_t at = 0; at < n_prompt; at += n_batch) {
            decode(at, std::min(n_batch, n_prompt - at));
        }
        note_logits();
        if (timed) {
            prompt_rate.push_back(double(n_prompt) / seconds_since(begin));
            count(prompt_stats);
        }
        begin = Clock::now();
        double noting = 0;
        for (size_t at = n_prompt; at < tokens.size(); ++at) {
            decode(at, 1);
            llama_synchronize(ctx);
            const Clock::time_point pause = Clock::now();
            note_logits();
            noting += seconds_since(pause);
        }
        if (timed) {
            step_rate.push_back(double(tokens.size() - n_prompt) / (seconds_since(begin) - noting));
            count(step_stats);
        }
    }
};

// Copies of an expert's size, in order, and round trips of a few bytes.
void measure_bus() {
    ggml_backend_dev_t dev = nullptr;
    for (size_t i = 0; i < ggml_backend_dev_count() && !dev; ++i) {
        ggml_backend_dev_t d = ggml_backend_dev_get(i);
        dev = ggml_backend_dev_type(d) == GGML_BACKEND_DEVICE_TYPE_GPU ? d : nullptr;
    }
    if (!dev || !ggml_backend_dev_host_buffer_type(dev)) {
        stop("no device with page-locked memory");
    }
    constexpr size_t kPiece = 1 << 20, kTotal = 256 << 20;
    constexpr int kTrips = 500;
    ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
    ggml_backend_buffer_t host = ggml_backend_buft_alloc_buffer(ggml_backend_dev_host_buffer_type(dev), kTotal);
    ggml_context * ctx = ggml_init({ggml_tensor_overhead() * 4, nullptr, true});
    ggml_tensor * t = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, int64_t(kTotal));
    ggml_backend_buffer_t device = ggml_backend_alloc_ctx_tensors(ctx, backend);
    char * from = (char *) ggml_backend_buffer_get_base(host);
    memset(from, 1, kTotal);
    double best = 0;
    for (int round = 0; round < 5; ++round) {
        const Clock::time_point begin = Clock::now();
        for (size_t at = 0; at < kTotal; at += kPiece) {
            ggml_backend_tensor_set_async(backend, t, from + at, at, kPiece);
        }
        ggml_backend_synchronize(backend);
        best = std::max(best, double(kTotal) / seconds_since(begin));
    }
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kTrips; ++i) {
        ggml_backend_tensor_set_async(backend, t, from, 0, 64);
        ggml_backend_synchronize(backend);
        ggml_backend_tensor_get(t, from, 0, 64);
    }
    const double trip = seconds_since(begin) / kTrips;
    printf("{\"bus_bytes_per_s\":%.0f,\"two_waits_s\":%.9f}\n", best, trip);
    ggml_backend_buffer_free(device);
    ggml_backend_buffer_free(host);
    ggml_free(ctx);
    ggml_backend_free(backend);
}

// Each shape twice, in both orders: some virtual drives give more to whoever comes first.
void measure_drive(const std::string & file) {
    constexpr std::pair<uint64_t, uint32_t> kShapes[] = {{1u << 20, 4}, {1u << 20, 16}, {1u << 20, 64}, {4u << 20, 8}};
    constexpr size_t kMany = std::size(kShapes);
    double sum[kMany] = {}, best = 0;
    for (size_t i = 0; i < 2 * kMany; ++i) {
        const size_t shape = i < kMany ? i : 2 * kMany - 1 - i;
        double bytes = 0, reads = 0;
        uint32_t direct = 0;
        require(ls_probe_reads(file.c_str(), kShapes[shape].first, kShapes[shape].second, 0, 300, 0, &bytes, &reads, &direct), "drive");
        if (!direct) {
            stop("the page cache of " + file + " cannot be bypassed: its rate says nothing about the drive");
        }
        sum[shape] += bytes / 2;
        best = std::max(best, sum[shape]);
    }
    printf("{\"shapes\":[");
    for (size_t i = 0; i < kMany; ++i) {
        printf("%s[%llu,%u,%.0f]", i ? "," : "", (unsigned long long) kShapes[i].first, kShapes[i].second, sum[i]);
    }
    printf("],\"drive_bytes_per_s\":%.0f}\n", best);
}

void print_list(const char * key, const std::vector<double> & values) {
    printf("\"%s\":[", key);
    for (size_t i = 0; i < values.size(); ++i) {
        printf("%s%.2f", i ? "," : "", values[i]);
    }
    printf("],");
}

void print_stats(const char * key, const ls_stats & s) {
    printf(",\"%s\":{", key);
    for (const auto & [name, counter] : kCounters) {
        printf("%s\"%s\":%llu", counter == kCounters[0].second ? "" : ",", name, (unsigned long long) (s.*counter));
    }
    printf("}");
}

void print(Run & run) {
    print_list("prompt_tokens_per_s", run.prompt_rate);
    print_list("tokens_per_s", run.step_rate);
    printf("\"load_s\":%.2f,\"logits_hash\":\"%016llx\"", run.load_seconds, (unsigned long long) run.hash);
    if (run.stream) {
        char * plan = nullptr;
        require(ls_model_plan_json(run.stream, 0, 0, 0, &plan), "plan");
        print_stats("prompt_stats", run.prompt_stats);
        print_stats("decode_stats", run.step_stats);
        printf(",\"plan\":%s", plan);
        ls_string_free(plan);
    }
}

} // namespace

int main(int argc, char ** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string key = std::string(argv[i]).substr(std::min<size_t>(2, strlen(argv[i])));
        const bool has_value = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
        options.values[key] = has_value ? argv[++i] : "";
    }
    if (!getenv("LS_VERBOSE")) {
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                fputs(text, stderr);
            }
        }, nullptr);
    }
    llama_backend_init();
    if (options.has("bus")) {
        measure_bus();
        return 0;
    }
    if (options.has("drive")) {
        measure_drive(options.text("drive", ""));
        return 0;
    }
    Run run(options);
    run.load();
    run.tokenize();
    const int64_t n_rounds = options.number("rounds", 3);
    run.round(false);
    if (run.stream) {
        ls_model_reset_stats(run.stream);
    }
    for (int64_t i = 0; i < n_rounds; ++i) {
        if (i + 1 == n_rounds && options.has("logits")) {
            run.logits = fopen(options.text("logits", "").c_str(), "wb");
        }
        run.round(true);
    }
    if (run.logits) {
        fclose(run.logits);
    }
    printf("{");
    print(run);
    printf("}\n");
    fflush(stdout);
    llama_free(run.ctx);
    llama_model_free(run.model);
    ls_model_close(run.stream);
    return 0;
}
