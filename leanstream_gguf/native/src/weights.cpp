#include "weights.h"

#include "status.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace ls {

namespace {

constexpr uint64_t kMinDenseBytes  = 16 * 1024;  // smaller matrices are not worth a read of their own
constexpr uint64_t kMinExpertBytes = 4 * 1024;
constexpr uint64_t kGroupBytes     = 4u << 20;   // small matrices share a group up to this size ...
constexpr uint64_t kMinGroups      = 16;         // ... or a smaller one, so that a small model can be streamed too

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

bool streamable(const Weight & w, const ggml_tensor * node, int source) {
    return node->op == GGML_OP_MUL_MAT && source == 0 && node->src[0] == w.tensor && ggml_n_dims(w.tensor) == 2 &&
        block_of(w.entry->name) >= 0 && w.entry->n_bytes >= kMinDenseBytes &&
        w.entry->name.find(".ffn_gate_inp.") == std::string::npos; // routers are small, and guesses need them at any time
}

bool plain_product(const Weight & w, const ggml_tensor * node, int source) {
    return node->op == GGML_OP_MUL_MAT && source == 0 && node->src[0] == w.tensor && ggml_n_dims(w.tensor) == 2 &&
        node->src[1]->type == GGML_TYPE_F32 && node->ne[3] == 1;
}

} // namespace

int32_t block_of(const std::string & name) {
    int32_t n = -1;
    return sscanf(name.c_str(), "blk.%d.", &n) == 1 ? n : -1;
}

int32_t Weight::block() const {
    return block_of(entry->name);
}

uint64_t MoeLayer::slot_offset(uint32_t part, uint32_t expert) const {
    if (bundle) { // as in the file
        const uint64_t start = record_offset(expert) % page_size();
        return part < parts.size() ? start + parts[part]->entry->part_offset : page_ceil(start + record_bytes());
    }
    uint64_t at = 0;
    for (uint32_t p = 0; p < part; ++p) {
        at += span_bytes(file_offset(p, expert), part_bytes(p));
    }
    return part < parts.size() ? at + file_offset(part, expert) % page_size() : at;
}

Weight * Weights::add(ggml_tensor * tensor, uint8_t * home) {
    const IndexEntry * entry = index_.find(ggml_get_name(tensor));
    if (!entry || entry->n_bytes != ggml_nbytes(tensor)) {
        return nullptr;
    }
    weights_.emplace_back();
    Weight & w = weights_.back();
    w.entry  = entry;
    w.tensor = tensor;
    w.home   = home;
    w.use    = entry->bundle >= 0 ? Use::neurons : Use::resident; // what no graph uses takes no memory if it is rearranged
    by_tensor_[tensor] = &w;
    return &w;
}

Weight * Weights::find(const ggml_tensor * tensor) {
    const auto it = by_tensor_.find(tensor);
    return it == by_tensor_.end() ? nullptr : it->second;
}

const Weight * Weights::find_name(const std::string & name) const {
    const auto it = std::find_if(weights_.begin(), weights_.end(), [&](const Weight & w) { return w.entry->name == name; });
    return it == weights_.end() ? nullptr : &*it;
}

void Weights::add_device_neurons(int32_t block, const DeviceNeurons & neurons) {
    for (Weight * w : {neurons.up, neurons.down}) {
        if (w) {
            w->use = Use::neurons; // until a graph has a device for it
        }
    }
    device_neurons_[block] = neurons;
}

const DeviceNeurons * Weights::device_neurons(int32_t block) const {
    const auto it = device_neurons_.find(block);
    return it == device_neurons_.end() || !it->second.down->on_device ? nullptr : &it->second;
}

// Stacked experts that share the ids tensor of one routing decision form one layer.
bool Weights::learn_expert(Weight & w, const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT_ID || node->src[0] != w.tensor || w.tensor->ne[2] < 2 || w.tensor->ne[3] != 1 ||
        block_of(w.entry->name) < 0 || w.tensor->nb[2] < kMinExpertBytes) {
        return false;
    }
    const auto known = layer_of_ids_.find(node->src[2]);
    MoeLayer * layer = known == layer_of_ids_.end() ? nullptr : &moe_layers[known->second];
    if (!layer || layer->n_experts != uint32_t(w.tensor->ne[2]) || layer->parts.size() == MoeLayer::kMaxParts) {
        layer_of_ids_[node->src[2]] = uint32_t(moe_layers.size());
        moe_layers.emplace_back();
        layer = &moe_layers.back();
        layer->block     = block_of(w.entry->name);
        layer->n_experts = uint32_t(w.tensor->ne[2]);
        if (w.entry->bundle >= 0) {
            layer->bundle    = &index_.tensors[size_t(w.entry->bundle)];
            layer->checksums = index_.find(format("blk.%d.ffn_exps.checksums.lean", layer->block));
        }
    }
    if (w.entry->bundle >= 0 && &index_.tensors[size_t(w.entry->bundle)] != layer->bundle) {
        return false;
    }
    w.use   = Use::expert;
    w.layer = int32_t(layer - moe_layers.data());
    w.part  = int32_t(layer->parts.size());
    layer->parts.push_back(&w);
    return true;
}

void Weights::learn_use(Weight & w, const ggml_tensor * node, int source) {
    if (w.entry->bundle >= 0 && index_.lean.layer_of(w.block())) {
        w.use = Use::neurons;
        return;
    }
    const bool looked_up_only = w.entry->name == "per_layer_token_embd.weight" ||
        (w.entry->name == "token_embd.weight" && index_.find("output.weight"));
    if (looked_up_only && node->op == GGML_OP_GET_ROWS && node->src[0] == w.tensor) {
        w.use = Use::rows;
    } else if (streamable(w, node, source)) {
        w.use = Use::dense;
        dense_order_.push_back(&w);
    } else if (!learn_expert(w, node)) {
        if (w.entry->bundle >= 0) {
            throw Error(LS_ERR_UNSUPPORTED, format("'%s' is stored expert by expert, but this model uses it in another way; use the file it "
                "was made from (leanstream unpack restores it)", w.entry->name.c_str()));
        }
        w.use = Use::resident;
    }
}

void Weights::learn_again(Weight & w, const ggml_tensor * node) {
    if (w.use == Use::expert && (node->op != GGML_OP_MUL_MAT_ID || node->src[0] != w.tensor)) {
        throw Error(LS_ERR_UNSUPPORTED, format("expert tensor '%s' is also used outside mul_mat_id: this architecture cannot be "
            "streamed yet", w.entry->name.c_str()));
    }
    if ((w.use == Use::dense && is_view(node)) || (w.use == Use::rows && node->op != GGML_OP_GET_ROWS)) {
        w.use = Use::resident; // a view keeps an address, so the weight must not move; a product needs all rows
    }
}

// w: a matrix in clusters, of which the device could multiply with a part (there) or not.
void Weights::learn_device_neurons(const Weight & w, bool there) {
    const auto it = device_neurons_.find(w.block());
    if (it == device_neurons_.end() || it->second.down->on_device) {
        return;
    }
    if (!there) {
        device_neurons_.erase(it);
        return;
    }
    if (w.entry->name.find("ffn_down.weight") == std::string::npos) {
        return; // up comes first
    }
    for (Weight * copy : {it->second.up, it->second.down}) {
        if (copy) {
            copy->use = Use::dense;
            copy->on_device = true;
            dense_order_.push_back(copy);
        }
    }
}

void Weights::learn(const ggml_cgraph * graph, ggml_backend_buffer_type_t buffer_type) {
    if (frozen_) {
        return;
    }
    layer_of_ids_.clear();
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        for (int s = 0; s < GGML_MAX_SRC; ++s) {
            const ggml_tensor * src = node->src[s];
            if (!src || !src->buffer || src->buffer->buft != buffer_type) {
                continue;
            }
            ggml_tensor * tensor = const_cast<ggml_tensor *>(src->view_src ? src->view_src : src);
            Weight * w = find(tensor);
            w = w ? w : add(tensor, nullptr); // a load that only measures allocates nothing
            if (!w) {
                throw Error(LS_ERR_UNSUPPORTED, format("the graph uses a weight '%s' that the file does not hold", ggml_get_name(src)));
            }
            const bool there = on_device && on_device(*w, node, s);
            const bool first = seen_.insert(w->tensor).second;
            w->multiplied = (first || w->multiplied) && plain_product(*w, node, s);
            if (first) {
                learn_use(*w, node, s);
            } else {
                learn_again(*w, node);
            }
            if (w->use != Use::neurons) {
                w->on_device = w->on_device || there;
            } else { // clusters are the host's
                learn_device_neurons(*w, there);
            }
        }
    }
    form_groups();
}

void Weights::form_groups() {
    uint64_t largest = 0, total = 0;
    for (const Weight * w : dense_order_) {
        largest = std::max(largest, span_bytes(w->entry->offset, w->entry->n_bytes));
        total += w->entry->n_bytes;
    }
    const uint64_t limit = std::max(largest, std::min(kGroupBytes, total / kMinGroups));
    groups.clear();
    for (Weight * w : dense_order_) {
        if (w->use != Use::dense) {
            continue;
        }
        const uint64_t bytes = span_bytes(w->entry->offset, w->entry->n_bytes);
        const bool other_place = !groups.empty() && (groups.back().on_device != w->on_device ||
            (w->on_device && groups.back().block != block_of(w->entry->name)));
        if (groups.empty() || other_place || groups.back().n_bytes + bytes > limit) {
            groups.emplace_back();
            groups.back().block = block_of(w->entry->name);
            groups.back().on_device = w->on_device;
        }
        DenseGroup & g = groups.back();
        w->group = int32_t(groups.size() - 1);
        g.members.push_back(w);
        g.slot_offset.push_back(g.n_bytes);
        g.n_bytes += bytes;
        g.home_bytes += home_bytes(w->entry->n_bytes);
    }
    uint32_t unit = 0;
    for (MoeLayer & l : moe_layers) {
        l.first_unit = unit;
        unit += l.n_experts;
    }
}

uint64_t Weights::resident_bytes() const {
    uint64_t n = 0;
    for (const Weight & w : weights_) {
        if (w.use == Use::resident && !w.on_device) {
            n += home_bytes(w.entry->n_bytes);
        }
    }
    return n;
}

uint64_t Weights::largest_group_bytes() const {
    uint64_t n = 0;
    for (const DenseGroup & g : groups) {
        n = std::max(n, g.n_bytes);
    }
    return n;
}

uint64_t Weights::largest_expert_bytes() const {
    uint64_t n = 0;
    for (const MoeLayer & l : moe_layers) {
        for (uint32_t e = 0; e < l.n_experts; ++e) {
            n = std::max(n, l.unit_bytes(e));
        }
    }
    return n;
}

} // namespace ls
