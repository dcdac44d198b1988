#include "toy_run.h"

#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <stdexcept>

namespace check {

namespace {

void start_llama() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set([](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR && getenv("LS_TEST_VERBOSE")) {
                fputs(text, stderr);
            }
        }, nullptr);
        llama_backend_init();
    });
}

llama_model * load(const std::string & path, int32_t n_gpu_layers) {
    llama_model_params p = llama_model_default_params();
    p.use_extra_bufts = false; // weights as in the file, as streaming keeps them
    p.n_gpu_layers = n_gpu_layers;
    return llama_model_load_from_file(path.c_str(), p);
}

llama_context * make_context(llama_model * model, int32_t n_threads, const Streaming & s = Streaming()) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = 128;
    p.n_batch = 64;
    p.n_ubatch = 32;
    p.op_offload = false; // as streamed models have it
    p.n_threads = p.n_threads_batch = n_threads;
    p.cb_eval = s.observer;
    p.cb_eval_user_data = s.observer_data;
    return llama_init_from_model(model, p);
}

void require(bool ok, const char * what) {
    if (!ok) {
        ls_error e = {};
        ls_last_error(&e);
        throw std::runtime_error(std::string(what) + " failed: " + e.message);
    }
}

} // namespace

std::string toy(const std::string & name) {
    const std::string path = std::string(LS_TEST_MODELS) + "/" + name + ".gguf";
    if (!std::ifstream(path)) {
        SKIP("no " + path + ": the fixture needs Python with numpy (-DPython_EXECUTABLE=...)");
    }
    return path;
}

ToyModel::ToyModel(const std::string & path, int32_t n_threads, int32_t n_gpu_layers) : n_threads_(n_threads) {
    start_llama();
    model_ = load(path, n_gpu_layers);
    require(model_, "loading");
    add_context();
}

ToyModel::ToyModel(const std::string & path, const Streaming & stream) : n_threads_(stream.n_threads) {
    start_llama();
    ls_options options = {};
    options.io_backend = stream.io_backend;
    options.direct_io  = 1;
    options.fidelity   = stream.fidelity;
    options.device_inexact = stream.device_inexact;
    options.host_cost  = stream.host_cost;
    require(ls_install() == LS_OK, "ls_install");
    require(ls_model_open(path.c_str(), &options, &stream_) == LS_OK, "ls_model_open");
    require(ls_load_begin(stream_, 0) == LS_OK, "ls_load_begin");
    model_ = load(path, stream.n_gpu_layers);
    for (uint32_t i = 0; model_ && i < stream.n_contexts; ++i) {
        contexts_.push_back(make_context(model_, n_threads_, stream));
    }
    ls_load_end();
    require(model_ && contexts_.back(), "loading");
    require(ls_model_set_device_budget(stream_, stream.device_budget_bytes) == LS_OK, "ls_model_set_device_budget");
    const uint64_t n_bytes = stream.level == kUnlimited ? 0 : budget(stream.level) + stream.extra_bytes;
    require(ls_model_activate(stream_, n_bytes, stream.cache_bytes, 0) == LS_OK, "ls_model_activate");
}

ToyModel::~ToyModel() {
    free_model();
    close();
}

void ToyModel::free_model() {
    while (!contexts_.empty()) {
        drop_context();
    }
    llama_model_free(model_);
    model_ = nullptr;
}

void ToyModel::close() {
    ls_model_close(stream_);
    stream_ = nullptr;
}

void ToyModel::add_context() {
    contexts_.push_back(make_context(model_, n_threads_));
    require(contexts_.back(), "llama_init_from_model");
}

void ToyModel::drop_context() {
    if (contexts_.back()) {
        llama_free(contexts_.back());
    }
    contexts_.pop_back();
}

bool ToyModel::decode(llama_context * ctx, std::vector<llama_token> tokens, std::vector<float> & out) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    llama_batch batch = llama_batch_init(int32_t(tokens.size()), 0, 1);
    const llama_pos first = llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1;
    for (size_t i = 0; i < tokens.size(); ++i) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = first + llama_pos(i);
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = 1;
    }
    batch.n_tokens = int32_t(tokens.size());
    const bool ok = llama_decode(ctx, batch) == 0;
    for (size_t i = 0; ok && i < tokens.size(); ++i) {
        const float * row = llama_get_logits_ith(ctx, int32_t(i));
        out.insert(out.end(), row, row + n_vocab);
    }
    llama_batch_free(batch);
    return ok;
}

std::vector<float> ToyModel::logits(uint32_t i, int n_prompt, int n_steps, uint32_t seed) {
    llama_context * ctx = contexts_.at(i);
    const uint32_t n_vocab = uint32_t(llama_vocab_n_tokens(llama_model_get_vocab(model_)));
    std::vector<llama_token> tokens;
    uint32_t state = seed;
    for (int t = 0; t < n_prompt + n_steps; ++t) {
        state = state * 1664525u + 1013904223u;
        tokens.push_back(llama_token(10 + (state >> 8) % (n_vocab - 20)));
    }
    llama_memory_clear(llama_get_memory(ctx), false); // as a program does between two texts: stale data stays
    std::vector<float> out;
    bool ok = decode(ctx, {tokens.begin(), tokens.begin() + n_prompt}, out);
    for (int t = n_prompt; ok && t < n_prompt + n_steps; ++t) {
        ok = decode(ctx, {tokens[size_t(t)]}, out);
    }
    return ok ? out : std::vector<float>();
}

ls_error ToyModel::error(uint32_t i) {
    ls_error e = {};
    if (ls_context_take_error(stream_, contexts_.at(i)) != LS_OK) {
        ls_last_error(&e);
    }
    return e;
}

ls_stats ToyModel::stats() const {
    ls_stats s = {};
    require(ls_model_get_stats(stream_, &s) == LS_OK, "ls_model_get_stats");
    return s;
}

static uint64_t number_after(const std::string & json, const char * key) {
    const size_t at = json.find("\"" + std::string(key) + "\":");
    require(at != std::string::npos, key);
    return strtoull(json.c_str() + at + strlen(key) + 3, nullptr, 10);
}

uint64_t ToyModel::plan_number(const char * key) const {
    char * json = nullptr;
    require(ls_model_plan_json(stream_, 0, 0, 0, &json) == LS_OK, "ls_model_plan_json");
    const uint64_t n = number_after(json, key);
    ls_string_free(json);
    return n;
}

uint64_t ToyModel::budget(double level) const {
    return level == kUnlimited ? 0 : minimum() + uint64_t(level * double(full() - minimum()));
}

uint64_t ToyModel::device_number(const char * key) const {
    char * json = nullptr;
    require(ls_model_plan_json(stream_, 0, 0, 0, &json) == LS_OK, "ls_model_plan_json");
    const std::string text = json;
    ls_string_free(json);
    const size_t at = text.find("\"device\":");
    require(at != std::string::npos, "a device in the plan");
    return number_after(text.substr(at), key);
}

uint64_t ToyModel::file_offset(const char * tensor) const {
    char * json = nullptr;
    require(ls_model_index_json(stream_, &json) == LS_OK, "ls_model_index_json");
    const std::string text = json;
    ls_string_free(json);
    const size_t at = text.find("\"name\":\"" + std::string(tensor));
    require(at != std::string::npos, tensor);
    return number_after(text.substr(at), "offset");
}

bool same_logits(const std::vector<float> & got, const std::vector<float> & expected, const std::string & what) {
    if (got.size() == expected.size() && !got.empty() && memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0) {
        return true;
    }
    size_t i = 0;
    while (i < got.size() && i < expected.size() && memcmp(&got[i], &expected[i], sizeof(float)) == 0) {
        ++i;
    }
    failed(__FILE__, __LINE__, what + ": " + show(got.size()) + " logits of " + show(expected.size()) + ", first difference at " + show(i));
    return false;
}

} // namespace check
