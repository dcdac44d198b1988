// Which of llama.cpp's backends computes a context's blocks on the device.
#include "model.h"

#include "json.h"

#include "llama-context.h"

ggml_backend_t ls::device_backend(const llama_context * ctx, ggml_backend_dev_t device) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == device) {
            return backend;
        }
    }
    return nullptr;
}

void ls::run_on_host(const llama_context * ctx, ggml_tensor * node) {
    ggml_backend_sched_t sched = ctx->get_sched();
    ggml_backend_sched_set_tensor_backend(sched, node, ggml_backend_sched_get_backend(sched, ggml_backend_sched_get_n_backends(sched) - 1));
}

bool ls::is_observed(const llama_context * ctx) {
    return ctx->get_cparams().cb_eval != nullptr;
}

// As llama.cpp lists them: discrete ones, integrated ones only where there are no others.
static std::vector<ggml_backend_dev_t> usable_devices() {
    std::vector<ggml_backend_dev_t> found;
    for (const enum ggml_backend_dev_type type : {GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU}) {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(i);
            if (ggml_backend_dev_type(dev) == type && std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev))) != "RPC") {
                found.push_back(dev);
            }
        }
        if (!found.empty()) {
            break;
        }
    }
    return found;
}

ggml_backend_dev_t ls::find_device(int32_t index) {
    const std::vector<ggml_backend_dev_t> devices = usable_devices();
    if (devices.empty()) {
        return nullptr;
    }
    if (index < 0 || size_t(index) >= devices.size()) {
        throw Error(LS_ERR_ARGUMENT, format("main_gpu %d: there are %zu devices", index, devices.size()));
    }
    return devices[size_t(index)];
}

std::string ls::devices_json() {
    Json j;
    {
        auto list = j.array();
        for (ggml_backend_dev_t dev : usable_devices()) {
            size_t free_bytes = 0, memory_bytes = 0;
            ggml_backend_dev_memory(dev, &free_bytes, &memory_bytes);
            auto o = j.object();
            j.key("name").string(ggml_backend_dev_name(dev));
            j.key("description").string(ggml_backend_dev_description(dev));
            j.key("backend").string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)));
            j.key("integrated").boolean(ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU);
            j.key("memory_bytes").number(uint64_t(memory_bytes));
            j.key("free_bytes").number(uint64_t(free_bytes));
        }
    }
    return j.text;
}
