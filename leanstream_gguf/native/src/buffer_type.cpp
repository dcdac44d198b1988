// The buffer type of a streamed model. It reserves addresses for all tensors; memory comes when the engine reads a weight.
#include "model.h"

#include <cstring>

namespace ls {

namespace {

struct Buffer {
    ls_model *   model;
    AddressSpace space;
};

const char * type_name(ggml_backend_buffer_type_t) {
    return "LeanStream";
}

void buffer_free(ggml_backend_buffer_t buffer) {
    Buffer * b = (Buffer *) buffer->context;
    b->model->engine.abandon_reads(); // a larger budget may still be loading
    delete b;
}

void * buffer_base(ggml_backend_buffer_t buffer) {
    return ((Buffer *) buffer->context)->space.base();
}

// Each tensor starts at the same distance from a page as in the file, so that a read past the page cache lands in place.
ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    Buffer & b = *(Buffer *) buffer->context;
    if (tensor->view_src) {
        return GGML_STATUS_SUCCESS;
    }
    const IndexEntry * entry = b.model->index.find(ggml_get_name(tensor));
    if (!entry || b.model->engine.activated()) {
        return GGML_STATUS_FAILED; // an adapter's tensor, or a second load
    }
    uint8_t * home = (uint8_t *) tensor->data + entry->offset % page_size();
    tensor->data = home;
    b.space.commit((uint8_t *) uintptr_t(page_floor(uintptr_t(home))), span_bytes(entry->offset, entry->n_bytes));
    return b.model->engine.weights.add(tensor, home) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {
    // weights come from the file alone
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {
    // the loader does not read owned tensors; nothing else may write them
}

// Weights that llama.cpp looks at on the host, before or after they are resident: from the file.
void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    Buffer & b = *(Buffer *) buffer->context;
    const IndexEntry * entry = b.model->index.find(ggml_get_name(tensor->view_src ? tensor->view_src : tensor));
    const size_t view_offset = tensor->view_src ? tensor->view_offs : 0;
    if (!entry || !b.model->engine.read_now(entry->shard, entry->offset + view_offset + offset, size, (uint8_t *) data)) {
        memset(data, 0, size);
    }
}

void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset,
    /* .set_tensor    = */ buffer_set,
    /* .get_tensor    = */ buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t n_bytes) {
    try {
        ls_model * model = (ls_model *) type->context;
        if (model->engine.activated()) {
            return nullptr; // a LoRA adapter on a streamed weight would land here
        }
        return ggml_backend_buffer_init(type, buffer_interface, new Buffer{model, AddressSpace(n_bytes)}, n_bytes);
    } catch (const std::exception &) {
        return nullptr;
    }
}

size_t type_alignment(ggml_backend_buffer_type_t) {
    return page_size();
}

// room for the distance to the page start and for the rest of the last page
size_t type_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return home_bytes(ggml_nbytes(tensor));
}

bool type_is_host(ggml_backend_buffer_type_t) {
    return true;
}

} // namespace

ls_model * model_of(ggml_backend_buffer_type_t type) {
    return type && type->iface.get_name == type_name ? (ls_model *) type->context : nullptr;
}

ggml_backend_buffer_type make_buffer_type(ls_model * model) {
    ggml_backend_buffer_type type;
    type.iface.get_name       = type_name;
    type.iface.alloc_buffer   = type_alloc;
    type.iface.get_alignment  = type_alignment;
    type.iface.get_max_size   = nullptr;
    type.iface.get_alloc_size = type_alloc_size;
    type.iface.is_host        = type_is_host;
    type.device  = nullptr;
    type.context = model;
    return type;
}

} // namespace ls
