// Toy models decoded through llama.h, streamed or not: what the engine tests compare.
#pragma once

#include "leanstream.h"
#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

namespace check {

// Path of a toy model that the test fixture wrote; skips the test where it could not.
std::string toy(const std::string & name);

// Sanitizers are some ten times slower, and ggml's own barriers spin: fewer steps there.
constexpr bool sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#else
    return false;
#endif
}
constexpr int kPrompt = 64, kSteps = sanitized() ? 3 : 16;
// for several contexts at once
constexpr int kThreadsShared = sanitized() ? 1 : 2;
constexpr int rounds(int n) { return sanitized() ? (n + 2) / 3 : n; }

// How much memory a streamed model gets, between its own minimum and all of it.
constexpr double kMinimum = 0, kMiddle = 0.5, kFull = 1, kUnlimited = 2;

struct Streaming {
    double   level       = kUnlimited;
    uint64_t extra_bytes = 0;
    uint64_t cache_bytes = 0;
    uint32_t io_backend  = 1; // pread
    uint32_t n_contexts  = 1;
    int32_t  n_threads   = 2;
    uint32_t fidelity    = 0;
    int32_t  n_gpu_layers = 0;
    uint64_t device_budget_bytes = 0; // 0 = what is free
    bool     device_inexact = false;
    double   host_cost    = 0;
    ggml_backend_sched_eval_callback observer = nullptr;
    void *   observer_data = nullptr;

    explicit Streaming(double level = kUnlimited) : level(level) {}
};

// A model and its contexts: 128 tokens, micro-batches of 32.
class ToyModel {
public:
    explicit ToyModel(const std::string & path, int32_t n_threads = 2, int32_t n_gpu_layers = 0); // unstreamed, weights as in the file
    ToyModel(const std::string & path, const Streaming & stream);
    ~ToyModel();
    ToyModel(const ToyModel &) = delete;

    llama_context * context(uint32_t i = 0) const { return contexts_[i]; }
    void add_context(); // after activation: charged at its first decode
    void drop_context();
    // what the destructor does, step by step
    void free_model();
    void close();

    // From an empty context: the prompt at once, then step by step. Logits of every token, [n_tokens][n_vocab].
    // Empty if a decode failed; error(i) has the cause then.
    std::vector<float> logits(uint32_t i = 0, int n_prompt = kPrompt, int n_steps = kSteps, uint32_t seed = 1);
    ls_error error(uint32_t i = 0);

    ls_model * streamed() const { return stream_; }
    ls_stats stats() const;
    uint64_t n_layers() const { return uint64_t(llama_model_n_layer(model_)); }
    uint64_t n_vocab() const { return uint64_t(llama_vocab_n_tokens(llama_model_get_vocab(model_))); }
    uint64_t plan_number(const char * key) const; // of the plan in force
    uint64_t device_number(const char * key) const; // of the plan's device part
    uint64_t file_offset(const char * tensor) const;
    uint64_t minimum() const { return plan_number("minimum_budget_bytes"); }
    uint64_t full() const    { return plan_number("full_budget_bytes"); }
    uint64_t budget(double level) const; // bytes; 0 = unlimited

private:
    bool decode(llama_context * ctx, std::vector<llama_token> tokens, std::vector<float> & out);

    int32_t       n_threads_;
    ls_model *    stream_ = nullptr;
    llama_model * model_ = nullptr;
    std::vector<llama_context *> contexts_;
};

// Same bytes; a difference is reported with its first place.
bool same_logits(const std::vector<float> & got, const std::vector<float> & expected, const std::string & what);

} // namespace check
