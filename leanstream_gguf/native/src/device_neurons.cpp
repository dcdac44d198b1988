#include "device_neurons.h"

#include "index.h"
#include "status.h"
#include "weights.h"

#include "ggml.h"

namespace ls {

DeviceNeuronTensors::DeviceNeuronTensors(const Index & index, Weights & weights) {
    uint64_t n_bytes = 0, at = 0;
    size_t n_tensors = 0;
    for (const NeuronShape & l : index.lean.layers) {
        for (int32_t id : {l.device_up, l.device_down}) {
            n_bytes   += id >= 0 ? home_bytes(index.tensors[size_t(id)].n_bytes) : 0;
            n_tensors += id >= 0;
        }
    }
    if (n_tensors == 0) {
        return;
    }
    ctx_ = ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, /*no_alloc=*/ true});
    if (!ctx_) {
        throw Error(LS_ERR_MEMORY, "out of memory for the device's tensors");
    }
    space_ = AddressSpace(n_bytes);
    const auto add = [&](int32_t id) -> Weight * {
        if (id < 0) {
            return nullptr;
        }
        const IndexEntry & e = index.tensors[size_t(id)];
        ggml_tensor * t = ggml_new_tensor(ctx_, e.type, GGML_MAX_DIMS, e.ne);
        ggml_set_name(t, e.name.c_str());
        uint8_t * home = space_.base() + at + e.offset % page_size(); // as far from a page as in the file
        space_.commit(space_.base() + at, span_bytes(e.offset, e.n_bytes));
        at += home_bytes(e.n_bytes);
        return weights.add(t, home);
    };
    for (const NeuronShape & l : index.lean.layers) {
        if (l.device_down >= 0) {
            Weight * up = add(l.device_up);
            weights.add_device_neurons(l.block, {up, add(l.device_down)});
        }
    }
}

DeviceNeuronTensors::~DeviceNeuronTensors() {
    ggml_free(ctx_);
}

} // namespace ls
