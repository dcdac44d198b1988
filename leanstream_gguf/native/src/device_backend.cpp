// Which of llama.cpp's backends computes a context's blocks on the device.
#include "model.h"

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

// As llama.cpp lists them: discrete ones, integrated ones only where there are no others.
ggml_backend_dev_t ls::find_device(int32_t index) {
    for (const enum ggml_backend_dev_type type : {GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU}) {
        int32_t n = 0;
        ggml_backend_dev_t first = nullptr;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(i);
            if (ggml_backend_dev_type(dev) != type || std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev))) == "RPC") {
                continue;
            }
            first = first ? first : dev;
            if (n++ == index) {
                return dev;
            }
        }
        if (first) {
            throw Error(LS_ERR_ARGUMENT, format("main_gpu %d: there are %d devices", index, n));
        }
    }
    return nullptr;
}
