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

struct Streaming {
    uint64_t budget_bytes = 0; // 0 = everything resident
    uint64_t cache_bytes  = 0;
    uint32_t io_backend   = 1; // pread
    uint32_t n_contexts   = 1;
};

// A model and its contexts. n_threads 2, context 128, micro-batches of 32.
class ToyModel {
public:
    explicit ToyModel(const std::string & path);                 // unstreamed, weights as in the file
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
    std::vector<float> logits(uint32_t i = 0, int n_prompt = 64, int n_steps = 16, uint32_t seed = 1);
    ls_error error(uint32_t i = 0);

    ls_model * streamed() const { return stream_; }
    ls_stats stats() const;
    // of the plan for this budget; 0 = the one in force
    uint64_t plan_number(const char * key, uint64_t budget_bytes = 0) const;
    uint64_t file_offset(const char * tensor) const;
    uint64_t minimum() const { return plan_number("minimum_budget_bytes"); }
    uint64_t full() const    { return plan_number("full_budget_bytes"); }

private:
    bool decode(llama_context * ctx, std::vector<llama_token> tokens, std::vector<float> & out);

    ls_model *    stream_ = nullptr;
    llama_model * model_ = nullptr;
    std::vector<llama_context *> contexts_;
};

// Loads to measure: minimum and full budget of a toy model with one context.
struct Budgets { uint64_t minimum, middle, full; };
Budgets budgets(const std::string & path, uint32_t n_contexts = 1);

// Same bytes; a difference is reported with its first place.
bool same_logits(const std::vector<float> & got, const std::vector<float> & expected, const std::string & what);

} // namespace check
