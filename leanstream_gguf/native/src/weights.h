// Every weight of a loaded model: where it lies on disk, where in memory, and how the graphs use it.
#pragma once

#include "index.h"
#include "memory.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

struct ggml_cgraph;

namespace ls {

enum class Use : uint8_t {
    resident, // read at activation, stays: norms, biases, routers, the output matrix, and whatever no graph has shown yet
    rows,     // only looked up by row: read row by row
    dense,    // a matrix of a layer: part of a dense group, pinned or streamed
    expert,   // stacked expert matrices: streamed expert by expert
    neurons,  // rearranged feed-forward matrices: in clusters of neurons, which the neuron store keeps
};

struct Weight {
    const IndexEntry * entry = nullptr;
    ggml_tensor * tensor = nullptr;
    uint8_t * home = nullptr;  // own address of its first byte; memory only while resident or pinned
    Use use = Use::resident;
    int32_t group = -1;        // dense: index into groups
    int32_t layer = -1;        // expert: index into moe_layers
    int32_t part = -1;         // expert: index into the layer's parts
    bool in_memory = false;    // looked up by row, and all rows are at home
    bool multiplied = false;   // every use is a plain product with a float32 input
    ggml_tensor * twin = nullptr; // what graphs multiply with instead, if weights are repacked (repacked.h)
    bool on_device = false;    // its block runs on the device, which holds a twin of it (device_tier.h)

    int32_t block() const;     // transformer block, "blk.N.", or -1
};

// Matrices that are read and released together, in graph order.
struct DenseGroup {
    std::vector<Weight *> members;
    std::vector<uint64_t> slot_offset; // [member] of the page that holds its first byte
    uint64_t n_bytes = 0;              // page-rounded, what a ring slot takes
    uint64_t home_bytes = 0;           // what the pinned members take, large pages across their borders included
    int32_t  block = -1;               // transformer block of the first member
    bool     on_device = false;        // all members are; then they are of one block
};

// One layer's experts. A part is one stacked tensor: gate, up, down, or merged gate and up, in graph order.
struct MoeLayer {
    static constexpr uint32_t kMaxParts = 4;

    int32_t  block = -1;      // transformer block, "blk.N."
    uint32_t n_experts = 0;
    uint32_t first_unit = 0;  // cache unit of expert 0, assigned with the groups
    std::vector<Weight *> parts;
    const IndexEntry * bundle = nullptr;    // rearranged file: all parts of an expert side by side, one record an expert
    const IndexEntry * checksums = nullptr; // of the records

    uint64_t part_bytes(uint32_t part) const { return parts[part]->tensor->nb[2]; }
    uint64_t record_offset(uint32_t expert) const { return bundle->offset + expert * record_bytes(); }
    uint64_t record_bytes() const { return uint64_t(bundle->ne[0]); }
    uint64_t file_offset(uint32_t part, uint32_t expert) const {
        return parts[part]->entry->offset + expert * (bundle ? record_bytes() : part_bytes(part));
    }
    // where in the expert's slot the part's first byte lies
    uint64_t slot_offset(uint32_t part, uint32_t expert) const;
    uint64_t unit_bytes(uint32_t expert) const { return slot_offset(uint32_t(parts.size()), expert); }
};

// A block's leading neurons as matrices that only a device uses (lean.h). up: nullptr without a gate.
struct DeviceNeurons {
    Weight * up = nullptr, * down = nullptr;
};

class Weights {
public:
    explicit Weights(const Index & index) : index_(index) {}

    // A tensor of our buffer type; nullptr if the file has no such tensor.
    Weight * add(ggml_tensor * tensor, uint8_t * home);
    Weight * find(const ggml_tensor * tensor);
    const Weight * find_name(const std::string & name) const; // linear; nullptr if no graph has used it
    // Tensors that llama.cpp does not know: they are used where the block's down projection would be, if that is on a device.
    void add_device_neurons(int32_t block, const DeviceNeurons & neurons);
    const DeviceNeurons * device_neurons(int32_t block) const; // nullptr: none, or the block is not on the device

    // Learn from a graph, in its order, how each weight is used, and form groups and layers. Until freeze() a later graph
    // may still change what an earlier one said; afterwards nothing changes. Throws Error(LS_ERR_UNSUPPORTED).
    void learn(const ggml_cgraph * graph, ggml_backend_buffer_type_t buffer_type);
    // No further learning: weights that no graph has used stay resident.
    void freeze() { frozen_ = true; }

    std::vector<DenseGroup> groups;
    std::vector<MoeLayer>   moe_layers;
    // is this weight used on the device by this node? None: there is no device.
    std::function<bool(const Weight & w, const ggml_tensor * node, int source)> on_device;

    const std::deque<Weight> & all() const { return weights_; }
    std::deque<Weight> & all() { return weights_; }
    // its rows are looked up on the host, though the device has it as a matrix
    bool looked_up(const Weight & w) const { return w.on_device && w.entry->name == "token_embd.weight"; }
    uint64_t resident_bytes() const;
    uint64_t largest_group_bytes() const;
    uint64_t largest_expert_bytes() const;

private:
    void learn_use(Weight & w, const ggml_tensor * node, int source);
    bool learn_expert(Weight & w, const ggml_tensor * node);
    void learn_again(Weight & w, const ggml_tensor * node);
    void learn_device_neurons(const Weight & w, bool there);
    void form_groups();

    const Index & index_;
    std::deque<Weight> weights_;
    std::unordered_map<const ggml_tensor *, Weight *> by_tensor_;
    std::unordered_set<const ggml_tensor *> seen_;
    std::unordered_map<int32_t, DeviceNeurons> device_neurons_; // [block]
    std::vector<Weight *> dense_order_;
    std::unordered_map<const ggml_tensor *, uint32_t> layer_of_ids_; // within one graph
    bool frozen_ = false;
};

// transformer block in a tensor's name, "blk.N.", or -1
int32_t block_of(const std::string & name);

// bytes of address space that a weight takes at home: its pages, and one for its distance to the page start
inline uint64_t home_bytes(uint64_t n_bytes) {
    return page_ceil(n_bytes + page_size());
}

// pages that n_bytes starting at file offset touch, in bytes
inline uint64_t span_bytes(uint64_t offset, uint64_t n_bytes) {
    return page_ceil(offset % page_size() + n_bytes);
}

} // namespace ls
