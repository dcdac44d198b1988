#include "model.h"

#include "json.h"

#include "llama-ext.h"

#include <algorithm>
#include <set>

using namespace ls;

static EngineOptions engine_options(const ls_options & o) {
    EngineOptions e;
    if (o.io_backend > 2) {
        throw Error(LS_ERR_ARGUMENT, format("io_backend %u: choose 0 (best), 1 (pread) or 2 (io_uring)", o.io_backend));
    }
    if (o.io_backend == 2 && !uring_available()) {
        throw Error(LS_ERR_UNSUPPORTED, "io_uring is not available here (library built without liburing, or refused by the kernel); "
            "use the pread backend");
    }
    if (o.n_io_threads > 256 || o.io_depth > 1024 || o.n_ring_slots > 1024 || o.chunk_bytes > (64u << 20)) {
        throw Error(LS_ERR_ARGUMENT, "options out of range: at most 256 I/O threads, 1024 reads in flight, 1024 ring slots and reads "
            "of 64 MiB");
    }
    if (!(o.host_cost >= 0 && o.host_cost <= 1024)) {
        throw Error(LS_ERR_ARGUMENT, format("host_cost %g: from 0 (measured) to 1024", o.host_cost));
    }
    e.io.backend   = IoOptions::Backend(o.io_backend);
    e.io.n_threads = o.n_io_threads ? o.n_io_threads : e.io.n_threads;
    e.io.depth     = o.io_depth ? o.io_depth : e.io.depth;
    e.direct_io    = o.direct_io != 0;
    e.n_ring_slots = o.n_ring_slots;
    e.repack       = o.repack != 0;
    if (o.chunk_bytes) {
        e.chunk_bytes = page_ceil(o.chunk_bytes);
    }
    return e;
}

static void write_lean(Json & j, const LeanFile & lean) {
    auto o = j.object();
    j.key("layout").string(lean.layers.empty() ? "experts" : lean.faithful ? "faithful" : "exact");
    j.key("n_neuron_layers").number(uint32_t(lean.layers.size()));
    j.key("thresholds");
    auto list = j.array();
    for (const ThresholdSetting & t : lean.thresholds) {
        auto setting = j.object();
        j.key("max_kl").number(double(t.max_kl));
        j.key("kl").number(double(t.kl));
    }
}

ls_model::ls_model(const char * path, const ls_options & options)
    : options(options), index(read_index(path)), engine(index, engine_options(options)), buffer_type(make_buffer_type(this)),
      overrides{{".*", &buffer_type}, {nullptr, nullptr}} {
    // names as in llama.cpp's src/llama-arch.cpp
    for (const char * refused : {"graniteswitch", "kimi-k3"}) {
        if (index.arch == refused) {
            throw Error(LS_ERR_UNSUPPORTED, format("architecture %s cannot be streamed: it multiplies its FFN weights outside "
                "llama.cpp's shared builders; load it without memory_budget", refused)).path(path);
        }
    }
}

Session & ls_model::session(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Session> & s = sessions_[ctx];
    if (!s) {
        s = std::make_unique<Session>();
        s->engine  = &engine;
        s->context = ctx;
        const uint32_t n_outputs = std::max(n_outputs_of_next_context, 1u);
        s->output_bytes = uint64_t(n_outputs) * uint64_t(std::max<int64_t>(0, index.n_vocab())) * sizeof(float);
        engine.add_session(*s);
    }
    return *s;
}

Session * ls_model::find_session(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(ctx);
    return it == sessions_.end() ? nullptr : it->second.get();
}

void ls_model::free_session(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(ctx);
    if (it != sessions_.end()) {
        engine.forget(*it->second);
        sessions_.erase(it);
    }
}

FixedMemory ls_model::measure_fixed(uint64_t baseline_bytes) {
    constexpr uint64_t kMargin = 16u << 20;      // stacks, page tables, staging, allocator slack
    constexpr uint64_t kMinMetadata = 4u << 20;
    FixedMemory f;
    f.baseline = baseline_bytes;
    f.margin   = kMargin;
    if (const DeviceTier * device = engine.device()) {
        f.device_driver = device->driver_bytes();
        f.device_margin = device->margin_bytes();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto & [ctx, session] : sessions_) {
        if (!session->charged) {
            measure_session(ctx, engine.device(), *session);
        }
        f.kv      += session->kv_bytes;
        f.compute += session->fixed_bytes();
        f.device_kv      += session->device_kv_bytes;
        f.device_compute += session->device_compute_bytes;
    }
    // llama.cpp clears KV caches when it makes them, so they are resident already; compute buffers are not
    const uint64_t now = process_resident_bytes();
    const uint64_t grown = now > resident_at_load_bytes ? now - resident_at_load_bytes : 0;
    const uint64_t kv = no_alloc ? 0 : f.kv;
    if (n_measured_ != sessions_.size()) { // once per context: later growth is the host program's
        n_measured_ = sessions_.size();
        metadata_bytes_ = std::max(kMinMetadata, grown > kv ? grown - kv : 0);
    }
    f.metadata = metadata_bytes_;
    return f;
}

void ls::measure_session(const llama_context * ctx, const DeviceTier * device, Session & session) {
    session.kv_bytes = session.compute_bytes = session.device_kv_bytes = session.device_compute_bytes = 0;
    for (const auto & [buffer_type, bytes] : llama_get_memory_breakdown(ctx)) {
        const bool there = device && buffer_type == device->buffer_type();
        (there ? session.device_kv_bytes : session.kv_bytes)           += bytes.context;
        (there ? session.device_compute_bytes : session.compute_bytes) += bytes.compute;
    }
}

bool ls_model::use_device(int32_t n_gpu_layers, int32_t main_gpu) {
    ggml_backend_dev_t device = n_gpu_layers != 0 && !options.repack ? find_device(main_gpu) : nullptr; // repacked weights are the host's
    devices[0] = device;
    if (!device) {
        return false;
    }
    const int32_t n_layers = int32_t(index.n_layer);
    const int32_t n = n_gpu_layers < 0 ? n_layers + 1 : n_gpu_layers; // as llama_model::n_gpu_layers()
    const DevicePlacement placement = {device, std::max(n_layers + 1 - n, 0), options.device_inexact != 0, options.host_cost};
    all_on_device = n > n_layers;
    engine.use_device(std::make_unique<DeviceTier>(placement, uint32_t(index.tensors.size()), index.n_expert_used));
    return true;
}

static uint32_t blocks_streamed(const Weights & weights, const Plan & plan) {
    std::set<int32_t> blocks;
    for (size_t g = 0; g < plan.pinned.size(); ++g) {
        if (!plan.pinned[g]) {
            for (const Weight * w : weights.groups[g].members) {
                blocks.insert(std::atoi(w->entry->name.c_str() + 4)); // "blk.N."
            }
        }
    }
    return uint32_t(blocks.size());
}

static void write_memory(Json & j, const FixedMemory & f, const PlanInput & in, const Plan & plan) {
    auto o = j.object();
    j.key("baseline_bytes").number(f.baseline);
    j.key("metadata_bytes").number(f.metadata);
    j.key("kv_bytes").number(f.kv);
    j.key("compute_bytes").number(f.compute);
    j.key("margin_bytes").number(f.margin);
    j.key("resident_bytes").number(in.resident_bytes);
    j.key("pinned_bytes").number(plan.pinned_bytes);
    j.key("ring_bytes").number(plan.n_ring_slots * in.ring_slot_bytes);
    j.key("cache_bytes").number(plan.cache_bytes + plan.neuron_cache_bytes);
}

static void write_neurons(Json & j, const ls_model & model, const Plan & plan) {
    uint64_t device_bytes = 0;
    uint32_t n_device_layers = 0;
    for (const NeuronShape & l : model.index.lean.layers) {
        if (const DeviceNeurons * there = model.engine.weights.device_neurons(l.block)) {
            device_bytes += there->down->entry->n_bytes + (there->up ? there->up->entry->n_bytes : 0);
            n_device_layers++;
        }
    }
    auto o = j.object();
    j.key("total_bytes").number(plan.neurons_bytes);
    j.key("capacity_bytes").number(plan.neuron_cache_bytes);
    j.key("resident_bytes").number(model.engine.neurons->resident_bytes());
    j.key("device_bytes").number(device_bytes);
    j.key("n_device_layers").number(n_device_layers);
}

static void write_experts(Json & j, const PlanInput & in, const Plan & plan) {
    auto o = j.object();
    j.key("n_layers").number(uint32_t(in.n_experts.size()));
    j.key("n_experts").number(in.n_experts.empty() ? 0u : in.n_experts[0]);
    j.key("n_used").number(in.n_experts.empty() ? 0u : in.n_expert_used);
    j.key("total_bytes").number(plan.experts_bytes);
    j.key("expert_bytes").number(in.expert_bytes);
    j.key("capacity_bytes").number(plan.cache_bytes);
    j.key("capacity_experts").number(in.expert_bytes ? plan.cache_bytes / in.expert_bytes : uint64_t(0));
    j.key("token_demand_bytes").number(plan.token_demand_bytes);
    j.key("token_demand_experts").number(plan.token_demand_experts);
}

static void write_device(Json & j, const DeviceTier & device, const FixedMemory & f, const DevicePlan & plan) {
    auto o = j.object();
    const uint64_t fixed = f.device_sum();
    const uint64_t stages = plan.n_block_stages * plan.block_stage_bytes + plan.n_expert_stages * plan.expert_stage_bytes;
    uint32_t n_blocks = 0, n_layers = 0, n_slots = 0, n_resident = 0;
    for (bool pinned : plan.pinned) {
        n_blocks += pinned;
    }
    for (size_t i = 0; i < plan.n_slots.size(); ++i) {
        n_layers   += plan.n_slots[i] > 0;
        n_slots    += plan.n_slots[i];
        n_resident += device.layer_resident(uint32_t(i));
    }
    j.key("name").string(device.description());
    j.key("minimum_budget_bytes").number(plan.minimum_bytes);
    j.key("full_budget_bytes").number(plan.full_bytes);
    j.key("budget_bytes").number(plan.budget_bytes);
    j.key("used_bytes").number(plan.used_bytes);
    j.key("driver_bytes").number(f.device_driver);
    j.key("kv_bytes").number(f.device_kv);
    j.key("compute_bytes").number(f.device_compute);
    j.key("margin_bytes").number(f.device_margin);
    j.key("resident_bytes").number(plan.used_bytes - fixed - plan.pinned_bytes - stages - plan.slots_bytes);
    j.key("pinned_bytes").number(plan.pinned_bytes);
    j.key("stage_bytes").number(stages);
    j.key("slots_bytes").number(plan.slots_bytes);
    j.key("n_blocks").number(uint32_t(plan.pinned.size()));
    j.key("n_blocks_pinned").number(n_blocks);
    j.key("n_moe_layers").number(n_layers);
    j.key("n_moe_layers_resident").number(n_resident);
    j.key("n_slots").number(n_slots);
    j.key("host_cost").number(device.host_cost());
}

std::string ls::plan_json(ls_model & model, uint64_t budget_bytes, uint64_t cache_bytes, uint64_t baseline_bytes) {
    Engine & engine = model.engine;
    const bool active = engine.activated();
    if (engine.weights.all().empty()) {
        throw Error(LS_ERR_STATE, "the model is opened but not loaded: there is nothing to plan yet");
    }
    const FixedMemory fixed = active ? engine.fixed() : model.measure_fixed(baseline_bytes);
    const DevicePlan device_plan = engine.device() ? model.engine.plan_device(fixed, !model.no_alloc) : DevicePlan();
    const PlanInput in = engine.plan_input(fixed, budget_bytes ? budget_bytes : engine.budget_bytes(), cache_bytes);
    const Plan plan = make_plan(in);
    Json j;
    {
        auto root = j.object();
        j.key("minimum_budget_bytes").number(plan.minimum_bytes);
        j.key("full_budget_bytes").number(plan.full_bytes);
        j.key("budget_bytes").number(in.budget_bytes);
        j.key("mode").string(plan.mode());
        j.key("memory");
        write_memory(j, fixed, in, plan);
        j.key("dense");
        {
            auto o = j.object();
            j.key("n_groups").number(uint32_t(plan.pinned.size()));
            j.key("n_pinned").number(plan.n_pinned);
            j.key("group_bytes").number(in.ring_slot_bytes);
            j.key("streamed_bytes").number(plan.dense_bytes - plan.pinned_bytes);
            j.key("pinned_bytes").number(plan.pinned_bytes);
            j.key("total_bytes").number(plan.dense_bytes);
            j.key("n_ring_slots").number(plan.n_ring_slots);
            j.key("n_layers_streamed").number(blocks_streamed(engine.weights, plan));
        }
        j.key("experts");
        write_experts(j, in, plan);
        if (engine.device()) {
            j.key("device");
            write_device(j, *engine.device(), fixed, device_plan);
        }
        if (model.index.lean.present) {
            j.key("lean");
            write_lean(j, model.index.lean);
            j.key("neurons");
            write_neurons(j, model, plan);
        }
        j.key("warnings");
        {
            auto list = j.array();
            for (const std::string & w : engine.warnings()) {
                j.string(w);
            }
            for (const std::string & w : plan.warnings) {
                j.string(w);
            }
        }
    }
    return j.text;
}
