// The C API: every call catches what the rooms throw and turns it into a status.
#include "leanstream.h"

#include "crc32c.h"
#include "hooks.h"
#include "model.h"
#include "json.h"
#include "probe.h"
#include "replay.h"

#include <cstring>
#include <new>

using namespace ls;

namespace {

thread_local ls_error last_error = {};

template <typename F>
ls_status guarded(F && body) {
    try {
        body();
        return LS_OK;
    } catch (const Error & e) {
        last_error = e.info;
    } catch (const std::bad_alloc &) {
        last_error = Error(LS_ERR_MEMORY, "out of memory").info;
    } catch (const std::exception & e) {
        last_error = Error(LS_ERR_INTERNAL, e.what()).info;
    } catch (...) {
        last_error = Error(LS_ERR_INTERNAL, "unknown exception").info;
    }
    return ls_status(last_error.status);
}

template <typename T>
T & checked(T * pointer, const char * name) {
    if (!pointer) {
        throw Error(LS_ERR_ARGUMENT, format("%s must not be NULL", name));
    }
    return *pointer;
}

char * copy_string(const std::string & s) {
    char * out = new char[s.size() + 1];
    memcpy(out, s.c_str(), s.size() + 1);
    return out;
}

} // namespace

extern "C" {

ls_status ls_install(void) {
    return guarded([] { install_hooks(); });
}

void ls_last_error(ls_error * out) {
    if (out) {
        *out = last_error;
    }
}

void ls_string_free(char * string) {
    delete[] string;
}

const char * ls_llama_commit(void) {
    return LS_LLAMA_COMMIT;
}

void ls_struct_sizes(uint64_t out[4]) {
    if (!out) {
        return;
    }
    out[0] = sizeof(ls_error);
    out[1] = sizeof(ls_options);
    out[2] = sizeof(ls_memory);
    out[3] = sizeof(ls_stats);
}

ls_status ls_model_open(const char * path, const ls_options * options, ls_model ** out) {
    return guarded([&] {
        ls_options defaults = {};
        defaults.direct_io = 1;
        checked(out, "out") = nullptr;
        *out = new ls_model(&checked(path, "path"), options ? *options : defaults);
    });
}

void ls_model_close(ls_model * model) {
    guarded([&] {
        load_abandon(model);
        delete model;
    });
}

ls_status ls_model_index_json(ls_model * model, char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out"); // before the string is made
        text = copy_string(checked(model, "model").index.json());
    });
}

ls_status ls_load_begin(ls_model * model, int32_t no_alloc) {
    return guarded([&] {
        ls_model & m = checked(model, "model");
        if (m.engine.activated()) {
            throw Error(LS_ERR_STATE, "this model is loaded already; open it again for a second load");
        }
        if (m.options.repack && m.index.n_expert_used > 0) {
            const std::string & path = m.index.shards.front().path;
            throw Error(LS_ERR_UNSUPPORTED, format("%s has experts, which stream in the file's layout: leave out repack", path.c_str())).path(path);
        }
        m.engine.neurons->set_fidelity(choose_fidelity(m.index, m.options.fidelity, m.options.max_kl));
        m.no_alloc = no_alloc != 0;
        m.resident_at_load_bytes = process_resident_bytes();
        load_begin(m);
    });
}

ls_status ls_load_limit_outputs(ls_model * model, uint32_t n_outputs_max) {
    return guarded([&] { checked(model, "model").n_outputs_limit = n_outputs_max; });
}

void ls_load_end(void) {
    load_end();
}

ls_status ls_model_activate(ls_model * model, uint64_t budget_bytes, uint64_t cache_bytes, uint64_t baseline_bytes) {
    return guarded([&] {
        ls_model & m = checked(model, "model");
        if (m.no_alloc) {
            throw Error(LS_ERR_STATE, "the model was loaded for measuring only (no_alloc)");
        }
        m.engine.activate(m.measure_fixed(baseline_bytes), budget_bytes, cache_bytes);
    });
}

ls_status ls_model_set_budget(ls_model * model, uint64_t budget_bytes, uint64_t cache_bytes) {
    return guarded([&] { checked(model, "model").engine.set_budget(budget_bytes, cache_bytes); });
}

ls_status ls_model_set_device_budget(ls_model * model, uint64_t device_budget_bytes) {
    return guarded([&] {
        ls_model & m = checked(model, "model");
        if (m.engine.activated()) {
            throw Error(LS_ERR_STATE, "device memory is divided when the model is activated; open it again for another device budget");
        }
        m.engine.set_device_budget(device_budget_bytes);
    });
}

ls_status ls_model_set_policy(ls_model * model, const char * name, const char * params_json) {
    return guarded([&] {
        const std::string policy = &checked(name, "name");
        checked(model, "model").engine.set_policy(policy, parse_policy_params(policy, params_json ? params_json : ""));
    });
}

ls_status ls_model_set_speculation(ls_model * model, uint32_t depth, uint32_t stages) {
    return guarded([&] { checked(model, "model").engine.set_speculation(depth, stages); });
}

ls_status ls_model_speculation_json(ls_model * model, char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out");
        text = copy_string(checked(model, "model").engine.speculation_json());
    });
}

ls_status ls_model_set_fidelity(ls_model * model, uint32_t fidelity, double max_kl) {
    return guarded([&] {
        ls_model & m = checked(model, "model");
        m.engine.neurons->set_fidelity(choose_fidelity(m.index, fidelity, max_kl));
    });
}

ls_status ls_model_set_thresholds(ls_model * model, const int32_t * blocks, const float * values, size_t n_values, double max_kl) {
    return guarded([&] {
        if (n_values > 0) {
            checked(values, "values");
        }
        checked(model, "model").engine.neurons->set_thresholds(blocks, values, n_values, max_kl);
    });
}

ls_status ls_model_fidelity_json(ls_model * model, char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out");
        const ls_model & m = checked(model, "model");
        text = copy_string(fidelity_json(m.index, *m.engine.neurons->fidelity()));
    });
}

ls_status ls_model_pin(ls_model * model, int32_t layer, const int32_t * ids, size_t n_ids) {
    return guarded([&] {
        if (n_ids > 0) {
            checked(ids, "ids");
        }
        checked(model, "model").engine.pin_experts(layer, ids, n_ids);
    });
}

ls_status ls_model_trace_begin(ls_model * model, const char * path, const char * note_json) {
    return guarded([&] { checked(model, "model").engine.trace_begin(&checked(path, "path"), note_json ? note_json : ""); });
}

ls_status ls_model_trace_end(ls_model * model) {
    return guarded([&] { checked(model, "model").engine.trace_end(); });
}

ls_status ls_model_plan_json(ls_model * model, uint64_t budget_bytes, uint64_t cache_bytes, uint64_t baseline_bytes, char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out");
        text = copy_string(plan_json(checked(model, "model"), budget_bytes, cache_bytes, baseline_bytes));
    });
}

ls_status ls_model_get_memory(ls_model * model, ls_memory * out) {
    return guarded([&] { checked(model, "model").engine.get_memory(checked(out, "out")); });
}

ls_status ls_model_get_stats(ls_model * model, ls_stats * out) {
    return guarded([&] { checked(model, "model").engine.get_stats(checked(out, "out")); });
}

void ls_model_reset_stats(ls_model * model) {
    guarded([&] { checked(model, "model").engine.reset_stats(); });
}

ls_status ls_context_take_error(ls_model * model, const void * llama_ctx) {
    return guarded([&] {
        Session * session = checked(model, "model").find_session((const llama_context *) llama_ctx);
        if (session && session->error.status != LS_OK) {
            Error e(ls_status(session->error.status), "");
            e.info = session->error;
            session->error = {};
            throw e;
        }
    });
}

ls_status ls_trace_replay_json(const char * path, const char * policy, const char * params_json, uint32_t n_capacity,
                               uint64_t n_warmup_tokens, char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out");
        ReplayOptions options;
        options.policy          = &checked(policy, "policy");
        options.params_json     = params_json ? params_json : "";
        options.n_capacity      = n_capacity;
        options.n_warmup_tokens = n_warmup_tokens;
        const ReplayResult r = replay(&checked(path, "path"), options);
        Json j;
        {
            auto o = j.object();
            j.key("n_tokens").number(r.n_tokens);
            j.key("n_uses").number(r.n_uses);
            j.key("n_misses").number(r.n_misses);
            j.key("missed_bytes").number(r.missed_bytes);
            j.key("n_oversized").number(r.n_oversized);
            j.key("ns_per_use").number(r.ns_per_use);
        }
        text = copy_string(j.text);
    });
}

ls_status ls_trace_summary_json(const char * path, char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out");
        text = copy_string(trace_summary_json(&checked(path, "path")));
    });
}

ls_status ls_probe_reads(const char * path, uint64_t block_bytes, uint32_t depth, uint32_t sequential, uint32_t duration_ms,
                         uint32_t io_backend, double * bytes_per_second, double * reads_per_second, uint32_t * used_direct) {
    return guarded([&] {
        const ProbeResult r = probe_reads(&checked(path, "path"), block_bytes, depth, sequential != 0, duration_ms, io_backend);
        checked(bytes_per_second, "bytes_per_second") = r.bytes_per_second;
        checked(reads_per_second, "reads_per_second") = r.reads_per_second;
        checked(used_direct, "used_direct") = r.direct;
    });
}

bool ls_flag_is_set(void * flag) {
    // The writer is an interpreter that stores one byte; nothing else is published through it.
    return flag != nullptr && *static_cast<const volatile uint8_t *>(flag) != 0;
}

int32_t ls_have_io_uring(void) {
    return uring_available();
}

ls_status ls_devices_json(char ** out) {
    return guarded([&] {
        char *& text = checked(out, "out");
        text = copy_string(devices_json());
    });
}

ls_status ls_crc32c_rows(const void * data, uint64_t n_rows, uint64_t row_bytes, uint32_t * out) {
    return guarded([&] {
        for (uint64_t i = 0; i < n_rows; ++i) {
            (&checked(out, "out"))[i] = crc32c(&checked(static_cast<const uint8_t *>(data), "data") + i * row_bytes, row_bytes);
        }
    });
}

} // extern "C"
