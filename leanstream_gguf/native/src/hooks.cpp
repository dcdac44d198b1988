#include "hooks.h"

#include "graph_pass.h"
#include "model.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "llama-stream.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace ls {

namespace {

thread_local ls_model * loading = nullptr;

// contexts that use streamed weights; a context's address is enough to find its model
std::mutex contexts_mutex;
std::unordered_map<const llama_context *, ls_model *> contexts;

ls_model * model_of_context(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    const auto it = contexts.find(ctx);
    return it == contexts.end() ? nullptr : it->second;
}

ls_model * model_of_graph(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            if (src && src->buffer) {
                if (ls_model * model = model_of(src->buffer->buft)) {
                    return model;
                }
            }
        }
    }
    return nullptr;
}

void model_params(llama_model_params * params) {
    if (!loading) {
        return;
    }
    params->tensor_buft_overrides = loading->overrides;
    params->load_mode       = LLAMA_LOAD_MODE_NONE;
    params->lazy_mode       = LLAMA_LAZY_MODE_OFF;
    params->use_extra_bufts = false; // the form of the weights belongs to the model, not to the budget
    params->check_tensors   = false; // would read everything
    params->no_alloc        = loading->no_alloc;
    params->split_mode      = LLAMA_SPLIT_MODE_NONE;
    try {
        params->n_gpu_layers = loading->use_device(params->n_gpu_layers, params->main_gpu) ? params->n_gpu_layers : 0;
        params->devices      = loading->devices;
        params->main_gpu     = loading->devices[0] ? 0 : -1;
    } catch (const std::exception &) {
        // no such device: llama.cpp refuses main_gpu itself, with a message
    }
}

void context_params(const llama_model *, llama_context_params * params) {
    if (!loading) {
        return;
    }
    if (loading->n_outputs_limit && !params->embeddings) {
        params->n_outputs_max = std::min(loading->n_outputs_limit, params->n_batch);
    }
    params->op_offload = false;
    loading->n_outputs_of_next_context = params->n_outputs_max ? params->n_outputs_max : params->n_batch;
}

bool owns(const ggml_tensor * weight) {
    return weight->buffer && model_of(weight->buffer->buft);
}

int64_t tokens_of(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_leafs; ++i) {
        if (strcmp(graph->leafs[i]->name, "inp_tokens") == 0 || strcmp(graph->leafs[i]->name, "inp_embd") == 0) {
            return graph->leafs[i]->type == GGML_TYPE_I32 ? graph->leafs[i]->ne[0] : graph->leafs[i]->ne[1];
        }
    }
    return 0;
}

bool graph_built(const llama_context * ctx, ggml_context * ctx0, ggml_cgraph * graph) {
    ls_model * model = model_of_graph(graph);
    if (!model) {
        return true;
    }
    Session & session = model->session(ctx);
    try {
        {
            std::lock_guard<std::mutex> lock(contexts_mutex);
            contexts[ctx] = model;
        }
        model->engine.weights.learn(graph, &model->buffer_type);
        const int n_threads = std::max({llama_n_threads(const_cast<llama_context *>(ctx)), llama_n_threads_batch(const_cast<llama_context *>(ctx)), 1});
        const uint64_t work = model->all_on_device ? 0 : ggml_graph_plan(graph, n_threads, nullptr).work_size;
        session.observed = is_observed(ctx);
        const uint32_t n_held = rewrite_graph(model->engine, session, &model->buffer_type, ctx0, graph);
        model->engine.note_graph(session, graph, tokens_of(graph), work + session.tiled_bytes_per_thread * uint64_t(n_threads) + session.awaited_bytes, n_held);
        return true;
    } catch (const Error & e) {
        model->engine.fail(session, e.info);
    } catch (const std::exception & e) {
        model->engine.fail(session, Error(LS_ERR_INTERNAL, e.what()).info);
    }
    return false;
}

bool graph_begin(const llama_context * ctx, const ggml_cgraph * graph) {
    ls_model * model = model_of_context(ctx);
    Session * session = model ? model->find_session(ctx) : nullptr;
    if (!session) {
        return true;
    }
    try {
        if (!session->charged) {
            measure_session(ctx, model->engine.device(), *session);
        }
        if (model->engine.device()) {
            session->device_backend = device_backend(ctx, model->engine.device()->device());
        }
        session->fidelity = model->engine.neurons->fidelity();
        model->engine.begin(*session, graph);
        return true;
    } catch (const Error & e) {
        model->engine.fail(*session, e.info);
    } catch (const std::exception & e) {
        model->engine.fail(*session, Error(LS_ERR_INTERNAL, e.what()).info);
    }
    return false;
}

bool graph_end(const llama_context * ctx) {
    ls_model * model = model_of_context(ctx);
    Session * session = model ? model->find_session(ctx) : nullptr;
    if (!session) {
        return true;
    }
    model->engine.end(*session);
    return !session->failed.load();
}

bool streams(const llama_context * ctx) {
    return model_of_context(ctx) != nullptr;
}

void context_free(const llama_context * ctx) {
    ls_model * model = model_of_context(ctx);
    if (!model) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(contexts_mutex);
        contexts.erase(ctx);
    }
    model->free_session(ctx);
}

gguf_context * open_gguf(const char * path, gguf_init_params params) {
    if (!loading || !loading->index.lean.present || !params.ctx || loading->index.shards.front().path != path) {
        return gguf_init_from_file(path, params);
    }
    try {
        return open_lean(loading->index, params.ctx);
    } catch (const std::exception &) {
        return nullptr;
    }
}

const llama_stream_hooks hooks = {
    LLAMA_STREAM_HOOKS_VERSION, model_params, context_params, owns, graph_built, graph_begin, graph_end, streams, context_free, open_gguf,
};

} // namespace

void install_hooks() {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    const llama_stream_hooks * previous = llama_stream_set_hooks(&hooks);
    if (previous && previous != &hooks) {
        llama_stream_set_hooks(previous);
        throw Error(LS_ERR_STATE, "another library has set streaming hooks in libllama; only one can");
    }
}

void load_begin(ls_model & model) {
    loading = &model;
}

void load_end() {
    loading = nullptr;
}

void load_abandon(const ls_model * model) {
    if (loading == model) {
        loading = nullptr;
    }
}

} // namespace ls
