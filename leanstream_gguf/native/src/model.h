// One opened model: index, engine, the buffer type that its tensors live in, and the sessions of its contexts.
#pragma once

#include "engine.h"
#include "index.h"

#include "ggml-backend-impl.h"
#include "llama.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>

struct ls_model {
    ls_model(const char * path, const ls_options & options);

    // Session of a context, made at its first graph.
    ls::Session & session(const llama_context * ctx);
    // nullptr if this model has none for it
    ls::Session * find_session(const llama_context * ctx);
    void free_session(const llama_context * ctx);

    // What llama.cpp holds beside the weights, from its contexts and from the process.
    ls::FixedMemory measure_fixed(uint64_t baseline_bytes);

    const ls_options options;
    ls::Index  index;
    ls::Engine engine;
    ggml_backend_buffer_type buffer_type;
    llama_model_tensor_buft_override overrides[2];

    // The blocks that n_gpu_layers names run on the main_gpu-th device, if there is one. False: on the host.
    bool use_device(int32_t n_gpu_layers, int32_t main_gpu);
    ggml_backend_dev_t devices[2] = {nullptr, nullptr}; // for llama.cpp: one device or none, and the end of the list
    bool     all_on_device = false;       // every block and the output

    bool     no_alloc = false;            // measuring: nothing is loaded
    uint64_t resident_at_load_bytes = 0;  // of the process, when loading began
    uint32_t n_outputs_limit = 0;         // logit rows that a context may ask for at once; 0 = llama.cpp's choice
    uint32_t n_outputs_of_next_context = 0;

private:
    std::mutex mutex_;
    std::map<const llama_context *, std::unique_ptr<ls::Session>> sessions_;
    size_t   n_measured_ = 0;      // contexts that metadata_bytes_ was measured with
    uint64_t metadata_bytes_ = 0;
};

namespace ls {

// the model behind a buffer type of ours, or nullptr
ls_model * model_of(ggml_backend_buffer_type_t buffer_type);
ggml_backend_buffer_type make_buffer_type(ls_model * model);

// What llama.cpp allocated for a context.
void measure_session(const llama_context * ctx, const DeviceTier * device, Session & session);

// device_backend.cpp
ggml_backend_t device_backend(const llama_context * ctx, ggml_backend_dev_t device);
// somebody looks at the results of single nodes (cb_eval)
bool is_observed(const llama_context * ctx);
// this node of the graph that is being built runs on the host, whatever stands beside it
void run_on_host(const llama_context * ctx, ggml_tensor * node);
std::string devices_json(); // as ls_devices_json()
ggml_backend_dev_t find_device(int32_t index); // nullptr: there is none; throws Error(LS_ERR_ARGUMENT) for a bad index

std::string plan_json(ls_model & model, uint64_t budget_bytes, uint64_t cache_bytes, uint64_t baseline_bytes);

} // namespace ls
