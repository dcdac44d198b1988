#include "lean.h"

#include "index.h"
#include "neuron_kernels.h"
#include "status.h"

#include "gguf.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <type_traits>

namespace ls {

namespace {

constexpr uint32_t kVersion = 1;

const Shard & shard_of(const Index & index) { return index.shards.front(); }

[[noreturn]] void corrupt(const Index & index, const std::string & what) {
    throw Error(LS_ERR_FORMAT, format("%s: %s; the file was changed after it was made: repack the model again", shard_of(index).path.c_str(),
        what.c_str())).path(shard_of(index).path);
}

// Keys of the file by name and type.
class Keys {
public:
    Keys(const gguf_context * g, const Index & index) : g_(g), index_(index) {}

    bool has(const char * key) const { return gguf_find_key(g_, key) >= 0; }

    std::string text(const char * key) const { return gguf_get_val_str(g_, find(key, GGUF_TYPE_STRING)); }
    uint32_t number(const char * key) const { return gguf_get_val_u32(g_, find(key, GGUF_TYPE_UINT32)); }
    bool flag(const char * key) const { return gguf_get_val_bool(g_, find(key, GGUF_TYPE_BOOL)); }

    template <typename T> std::vector<T> numbers(const char * key) const {
        const gguf_type type = std::is_same_v<T, float> ? GGUF_TYPE_FLOAT32 : sizeof(T) == 8 ? GGUF_TYPE_UINT64 : GGUF_TYPE_UINT32;
        const int64_t id = find(key, GGUF_TYPE_ARRAY);
        if (gguf_get_arr_type(g_, id) != type) {
            corrupt(index_, format("key %s holds another type", key));
        }
        const T * data = (const T *) gguf_get_arr_data(g_, id);
        return std::vector<T>(data, data + gguf_get_arr_n(g_, id));
    }

    template <typename T> std::vector<T> numbers(const char * key, size_t n) const {
        std::vector<T> v = numbers<T>(key);
        if (v.size() != n) {
            corrupt(index_, format("key %s has %zu entries, %zu belong there", key, v.size(), n));
        }
        return v;
    }

    std::vector<std::string> texts(const char * key) const {
        const int64_t id = find(key, GGUF_TYPE_ARRAY);
        if (gguf_get_arr_type(g_, id) != GGUF_TYPE_STRING) {
            corrupt(index_, format("key %s holds no strings", key));
        }
        std::vector<std::string> v;
        for (size_t i = 0; i < gguf_get_arr_n(g_, id); ++i) {
            v.push_back(gguf_get_arr_str(g_, id, i));
        }
        return v;
    }

private:
    int64_t find(const char * key, gguf_type type) const {
        const int64_t id = gguf_find_key(g_, key);
        if (id < 0 || gguf_get_kv_type(g_, id) != type) {
            corrupt(index_, format("key %s is missing or of another type", key));
        }
        return id;
    }

    const gguf_context * g_;
    const Index & index_;
};

int32_t id_of(const Index & index, const std::string & name) {
    const auto it = index.by_name.find(name);
    return it == index.by_name.end() ? -1 : int32_t(it->second);
}

// product of the shape in bytes; 0 if it does not fit the type or overflows
uint64_t bytes_of(ggml_type type, const int64_t * ne) {
    uint64_t rows = 1;
    for (int d = 0; d < GGML_MAX_DIMS; ++d) {
        if (ne[d] <= 0 || ne[d] >= int64_t(1) << 40) {
            return 0;
        }
        rows *= d > 0 ? uint64_t(ne[d]) : 1;
        if (rows >= uint64_t(1) << 40) {
            return 0;
        }
    }
    return ne[0] % ggml_blck_size(type) == 0 ? ggml_row_size(type, ne[0]) * rows : 0;
}

void read_virtual(const Keys & keys, Index & index) {
    const std::vector<std::string> names = keys.texts("leanstream.virtual.names"), bundles = keys.texts("leanstream.virtual.bundle");
    const auto types   = keys.numbers<uint32_t>("leanstream.virtual.types", names.size());
    const auto ne      = keys.numbers<uint64_t>("leanstream.virtual.ne", 4 * names.size());
    const auto offsets = keys.numbers<uint64_t>("leanstream.virtual.offset", names.size());
    if (bundles.size() != names.size()) {
        corrupt(index, "leanstream.virtual.bundle has another length than the names");
    }
    for (size_t i = 0; i < names.size(); ++i) {
        IndexEntry e;
        e.name        = names[i];
        e.type        = ggml_type(types[i]);
        e.bundle      = id_of(index, bundles[i]);
        e.part_offset = offsets[i];
        if (types[i] >= GGML_TYPE_COUNT || ggml_blck_size(e.type) == 0 || e.bundle < 0) {
            corrupt(index, format("'%s' has an unknown type or no bundle '%s'", e.name.c_str(), bundles[i].c_str()));
        }
        for (int d = 0; d < GGML_MAX_DIMS; ++d) {
            e.ne[d] = int64_t(ne[4 * i + d]);
        }
        e.n_bytes = bytes_of(e.type, e.ne);
        const IndexEntry & bundle = index.tensors[size_t(e.bundle)];
        e.shard  = bundle.shard;
        e.offset = bundle.offset + e.part_offset;
        if (e.n_bytes == 0 || e.part_offset >= uint64_t(bundle.ne[0])) {
            corrupt(index, format("'%s' has an impossible shape or offset", e.name.c_str()));
        }
        // stacked experts: every slice lies inside its record
        if (e.ne[2] > 1 && (e.ne[2] != bundle.ne[1] || e.part_offset + e.n_bytes / uint64_t(e.ne[2]) > uint64_t(bundle.ne[0]))) {
            corrupt(index, format("'%s' does not fit the records of '%s'", e.name.c_str(), bundles[i].c_str()));
        }
        if (!index.by_name.emplace(e.name, index.tensors.size()).second) {
            corrupt(index, format("tensor '%s' occurs twice", e.name.c_str()));
        }
        index.tensors.push_back(e);
    }
}

NeuronShape::Part part_of(const Index & index, const std::string & name, uint64_t n_bytes) {
    const IndexEntry * e = index.find(name);
    NeuronShape::Part p;
    if (e) {
        p.type = e->type;
        p.at = e->bundle >= 0 ? e->part_offset : NeuronShape::kAbsent;
        p.n_bytes = n_bytes ? n_bytes : ggml_row_size(e->type, e->ne[0]);
    }
    return p;
}

void check_layer(const Index & index, const NeuronShape & l, uint64_t alignment) {
    const std::string at = format("blk.%d.ffn", l.block);
    const auto tensor = [&](int32_t id, const char * what) -> const IndexEntry & {
        if (id < 0) {
            corrupt(index, format("%s.%s.lean is missing", at.c_str(), what));
        }
        return index.tensors[size_t(id)];
    };
    if (l.cluster_size == 0 || l.cluster_size > l.n_ff || l.n_clusters != (l.n_ff + l.cluster_size - 1) / l.cluster_size) {
        corrupt(index, at + " has an impossible cluster size");
    }
    if (l.n_hot > l.n_clusters || l.stride != (l.cluster_bytes() + alignment - 1) / alignment * alignment) {
        corrupt(index, at + ".clusters.lean has another stride than its records need");
    }
    const IndexEntry & clusters = tensor(l.clusters, "clusters"), & sums = tensor(l.checksums, "checksums"), & perm = tensor(l.perm, "perm");
    if (uint64_t(clusters.ne[0]) != l.stride || clusters.ne[1] != l.n_clusters || clusters.n_bytes != l.stride * l.n_clusters) {
        corrupt(index, at + ".clusters.lean has another shape than its keys say");
    }
    if (sums.type != GGML_TYPE_I32 || sums.ne[0] != l.n_clusters || perm.type != GGML_TYPE_I32 || perm.ne[0] != l.n_ff) {
        corrupt(index, at + ".checksums.lean or .perm.lean has another shape than its keys say");
    }
    const ColumnFormat & format_of_down = *column_format(l.down.type);
    const uint64_t planes = plane_bytes(format_of_down, l.n_ff, l.n_embd);
    if (planes && tensor(l.planes, "planes").n_bytes < planes) {
        corrupt(index, at + ".planes.lean is too small");
    }
    if (l.deciding.present() && tensor(l.sketch, "sketch").n_bytes != uint64_t(l.n_ff) * sketch_row_bytes(l.n_embd)) {
        corrupt(index, at + ".sketch.lean has another size than its keys say");
    }
    uint64_t end = 0;
    for (const NeuronShape::Part * p : { &l.deciding, &l.other, &l.down }) {
        if (p->present()) {
            if (p->at != end) {
                corrupt(index, at + ": the parts of a neuron's record are not where they belong");
            }
            end = p->at + (p->n_bytes + 15) / 16 * 16;
        }
    }
}

// Leading neurons as matrices: the layer's columns side by side in down's own type and, if it is gated, its up rows.
void read_device_neurons(NeuronShape & l, Index & index) {
    const std::string at = format("blk.%d.ffn.", l.block);
    l.device_down = id_of(index, at + "device_down.lean");
    l.device_up   = l.gated ? id_of(index, at + "device_up.lean") : -1;
    const auto fits = [&](int32_t id, ggml_type type, uint32_t ne0, uint32_t ne1) {
        return id >= 0 && index.tensors[size_t(id)].type == type && index.tensors[size_t(id)].ne[0] == ne0 && index.tensors[size_t(id)].ne[1] == ne1;
    };
    if (index.lean.faithful || l.n_device > l.n_ff || !fits(l.device_down, l.down.type, l.n_device, l.n_embd) ||
        (l.gated && !fits(l.device_up, l.other.type, l.n_embd, l.n_device))) {
        corrupt(index, at + "device_down.lean or device_up.lean does not fit the layer");
    }
}

void read_layers(const Keys & keys, Index & index) {
    const auto blocks = keys.numbers<uint32_t>("leanstream.neurons.layers");
    const size_t n = blocks.size();
    const auto cluster_size = keys.numbers<uint32_t>("leanstream.neurons.cluster_size", n), n_hot = keys.numbers<uint32_t>("leanstream.neurons.n_hot", n);
    const auto density = keys.numbers<float>("leanstream.neurons.density", n);
    const std::string deciding = keys.text("leanstream.neurons.deciding");
    const bool gated = keys.flag("leanstream.neurons.gated");
    const uint64_t alignment = keys.number("leanstream.alignment");
    if ((alignment != 512 && alignment != 4096) || deciding != (gated ? "ffn_gate" : "ffn_up")) {
        corrupt(index, "leanstream.alignment or leanstream.neurons.deciding has an impossible value");
    }
    const bool for_device = keys.has("leanstream.neurons.n_device");
    const auto n_device = for_device ? keys.numbers<uint32_t>("leanstream.neurons.n_device", n) : std::vector<uint32_t>(n, 0);
    std::vector<float> margin(n, 0.0f);
    if (index.lean.faithful) {
        margin = keys.numbers<float>("leanstream.sketch.margin", n);
    }
    for (size_t i = 0; i < n; ++i) {
        const std::string at = format("blk.%u.", blocks[i]);
        const IndexEntry * decides = index.find(at + deciding + ".weight"), * down = index.find(at + "ffn_down.weight");
        const IndexEntry * up = index.find(at + "ffn_up.weight");
        if (!decides || !down || !up || down->bundle < 0 || (gated && up->bundle < 0) || (decides->bundle >= 0) != index.lean.faithful ||
            down->ne[0] != decides->ne[1] || up->ne[0] != decides->ne[0] || up->ne[1] != decides->ne[1]) {
            corrupt(index, at + "ffn: its tensors do not fit together");
        }
        if (!column_format(down->type)) {
            throw Error(LS_ERR_UNSUPPORTED, format("%s holds down columns of type %s, for which there is no kernel; repack with "
                "--down-type q8_0", shard_of(index).path.c_str(), ggml_type_name(down->type))).path(shard_of(index).path);
        }
        NeuronShape l;
        l.block = int32_t(blocks[i]);
        l.gated = gated;
        l.n_ff = uint32_t(down->ne[0]);
        l.n_embd = uint32_t(down->ne[1]);
        l.cluster_size = cluster_size[i];
        l.n_hot = n_hot[i];
        l.density = density[i];
        l.sketch_margin = margin[i];
        l.deciding = part_of(index, at + deciding + ".weight", 0);
        l.other = gated ? part_of(index, at + "ffn_up.weight", 0) : NeuronShape::Part();
        l.down = part_of(index, at + "ffn_down.weight", column_bytes(*column_format(down->type), l.n_embd));
        for (const NeuronShape::Part * p : { &l.deciding, &l.other, &l.down }) {
            l.record_bytes += p->present() ? (p->n_bytes + 15) / 16 * 16 : 0;
        }
        l.clusters  = id_of(index, at + "ffn.clusters.lean");
        l.checksums = id_of(index, at + "ffn.checksums.lean");
        l.perm      = id_of(index, at + "ffn.perm.lean");
        l.planes    = id_of(index, at + "ffn.planes.lean");
        l.sketch    = id_of(index, at + "ffn.sketch.lean");
        l.n_clusters = l.clusters >= 0 ? uint32_t(index.tensors[size_t(l.clusters)].ne[1]) : 0;
        l.stride     = l.clusters >= 0 ? uint64_t(index.tensors[size_t(l.clusters)].ne[0]) : 0;
        check_layer(index, l, alignment);
        l.n_device = n_device[i];
        if (l.n_device > 0) {
            read_device_neurons(l, index);
        }
        index.lean.layers.push_back(l);
    }
    if (keys.has("leanstream.threshold.max_kl")) {
        const auto max_kl = keys.numbers<float>("leanstream.threshold.max_kl");
        const auto kl = keys.numbers<float>("leanstream.threshold.kl", max_kl.size());
        const auto values = keys.numbers<float>("leanstream.threshold.values", max_kl.size() * n);
        for (size_t s = 0; s < max_kl.size(); ++s) {
            index.lean.thresholds.push_back({ max_kl[s], kl[s], { values.begin() + long(s * n), values.begin() + long((s + 1) * n) } });
        }
    }
}

bool ends_with(const std::string & s, const char * end) {
    const size_t n = strlen(end);
    return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

} // namespace

const NeuronShape * LeanFile::layer_of(int32_t block) const {
    for (const NeuronShape & l : layers) {
        if (l.block == block) {
            return &l;
        }
    }
    return nullptr;
}

void read_lean(const gguf_context * g, Index & index) {
    const Keys keys(g, index);
    if (!keys.has("leanstream.version")) {
        return;
    }
    const uint32_t version = keys.number("leanstream.version");
    if (version != kVersion) {
        throw Error(LS_ERR_UNSUPPORTED, format("%s is a lean file of version %u, this library reads version %u; install the version "
            "that made it, or repack the model", shard_of(index).path.c_str(), version, kVersion)).path(shard_of(index).path);
    }
    const std::string layout = keys.text("leanstream.layout");
    if (layout != "exact" && layout != "faithful" && layout != "experts") {
        corrupt(index, format("unknown layout '%s'", layout.c_str()));
    }
    index.lean.present  = true;
    index.lean.faithful = layout == "faithful";
    read_virtual(keys, index);
    if (keys.has("leanstream.neurons.layers")) {
        read_layers(keys, index);
    }
}

gguf_context * open_lean(const Index & index, ggml_context ** out_ctx) {
    struct Free {
        void operator()(gguf_context * g) const { gguf_free(g); }
        void operator()(ggml_context * c) const { ggml_free(c); }
    };
    std::unique_ptr<gguf_context, Free> file(gguf_init_from_file(shard_of(index).path.c_str(), { /*no_alloc=*/ true, nullptr }));
    std::unique_ptr<ggml_context, Free> ctx(ggml_init({ ggml_tensor_overhead() * (index.tensors.size() + 1), nullptr, /*no_alloc=*/ true }));
    if (!file || !ctx) {
        return nullptr;
    }
    std::unique_ptr<gguf_context, Free> shown(gguf_init_empty());
    gguf_set_kv(shown.get(), file.get());
    for (int64_t i = gguf_get_n_kv(file.get()); i-- > 0;) {
        const std::string key = gguf_get_key(file.get(), i);
        if (key.rfind("leanstream.", 0) == 0 || key == "general.alignment") { // offsets are only checked against the file's length
            gguf_remove_key(shown.get(), key.c_str());
        }
    }
    for (const IndexEntry & e : index.tensors) {
        if (!ends_with(e.name, ".lean")) {
            ggml_tensor * t = ggml_new_tensor(ctx.get(), e.type, GGML_MAX_DIMS, e.ne);
            ggml_set_name(t, e.name.c_str());
            gguf_add_tensor(shown.get(), t);
        }
    }
    *out_ctx = ctx.release();
    return shown.release();
}

} // namespace ls
