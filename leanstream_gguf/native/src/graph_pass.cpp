#include "graph_pass.h"

#include "awaited_experts.h"
#include "device_pass.h"
#include "engine.h"
#include "guess_points.h"
#include "model.h"
#include "neuron_guess.h"
#include "neuron_ops.h"
#include "neuron_pass.h"
#include "ops.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace ls {

namespace {

class GraphPass {
public:
    GraphPass(Engine & engine, Session & session, ggml_backend_buffer_type_t buffer_type, ggml_context * ctx0, ggml_cgraph * graph)
        : engine_(engine), session_(session), buffer_type_(buffer_type), ctx0_(ctx0), graph_(graph),
          device_(engine.weights, engine.device(), ctx0, out_, nodes_of_the_host()) {}

    // returns the number of dense groups that are needed at one time
    uint32_t run() {
        find_uses();
        neurons_ = find_neurons(graph_, engine_.weights, *engine_.neurons);
        for (const NeuronMatch & m : neurons_) {
            deciding_.emplace(plain_deciding_product(m), m.layer);
        }
        if (!engine_.device()) { // routers and deciding projections are not in host memory then
            neuron_points_ = find_neuron_guess_points(engine_, neurons_, graph_);
            guess_points_  = find_guess_points(engine_, buffer_type_, graph_);
        }
        for (int i = 0; i < graph_->n_nodes; ++i) {
            ggml_tensor * node = graph_->nodes[i];
            if (rewrite_neurons(node)) {
                continue;
            }
            place_on_device(node);
            acquire_sources(node, i);
            rewrite(node);
            let_it_await(node, i);
            out_.push_back(node);
            insert_guesses(node);
            insert_neuron_guesses(node);
        }
        replace_nodes();
        return held_at_once_;
    }

private:
    struct Routing { const ggml_tensor * ids; ggml_tensor * select; int8_t run; int last_product; };

    DevicePass::Host nodes_of_the_host() {
        DevicePass::Host host;
        host.new_node = [this](ggml_tensor * input, const OpParams & params, ggml_custom_op_t fun, void * userdata, bool all_threads) {
            return new_node(GGML_TYPE_I32, 1, input, params, fun, all_threads ? GGML_N_TASKS_MAX : 1, userdata);
        };
        host.add_product = [this](ggml_tensor * product, const Weight & w, ggml_tensor * select) {
            if (routings_.empty() || routings_.back().select != select) {
                routings_.push_back({product->src[2], select, int8_t(routings_.size() % Session::kRuns), -1});
            }
            rewrite_product(product, w);
            add_to_host(product);
            return routings_.back().run;
        };
        host.add_node = [this](ggml_tensor * node) { add_to_host(node); };
        return host;
    }

    void add_to_host(ggml_tensor * node) {
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        run_on_host(session_.context, node);
        out_.push_back(node);
    }

    // our weight behind a source, or nullptr
    Weight * weight_of(const ggml_tensor * src) {
        if (!src || !src->buffer || src->buffer->buft != buffer_type_) {
            return nullptr;
        }
        return engine_.weights.find(src->view_src ? src->view_src : src);
    }

    void find_uses() {
        uses_.assign(engine_.weights.groups.size(), {});
        held_.assign(engine_.weights.groups.size(), false);
        for (int i = 0; i < graph_->n_nodes; ++i) {
            for (const ggml_tensor * src : graph_->nodes[i]->src) {
                const Weight * w = weight_of(src);
                if (w && w->use == Use::dense && !device_.takes(*w, graph_->nodes[i])) {
                    uses_[size_t(w->group)].push_back(i);
                }
            }
        }
    }

    // A group is let go when its next use is far: models that run their layers several times would hold everything.
    bool used_soon(size_t group, int at) const {
        constexpr int kNear = 96; // nodes; a layer has 20 to 60
        const auto next = std::lower_bound(uses_[group].begin(), uses_[group].end(), at);
        return next != uses_[group].end() && *next - at < kNear;
    }

    void place_on_device(ggml_tensor * node) {
        for (int s = 0; s < GGML_MAX_SRC; ++s) {
            const Weight * w = weight_of(node->src[s]);
            if (w && device_.takes(*w, node)) {
                check_use(*w, node);
                device_.place(node, s, *w);
            }
        }
    }

    void acquire_sources(ggml_tensor * node, int at) {
        for (const ggml_tensor * src : node->src) {
            const Weight * w = weight_of(src);
            if (!w) {
                continue;
            }
            check_use(*w, node);
            if (w->use == Use::dense && !held_[size_t(w->group)]) {
                insert_acquire(w->group, at);
            }
        }
    }

    static void check_use(const Weight & w, const ggml_tensor * node) {
        const bool is_view = node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
            node->op == GGML_OP_TRANSPOSE;
        if ((w.twin && node->op != GGML_OP_MUL_MAT) || (w.use == Use::dense && is_view) || (w.use == Use::rows && node->op != GGML_OP_GET_ROWS) ||
            (w.use == Use::expert && node->op != GGML_OP_MUL_MAT_ID)) {
            throw Error(LS_ERR_UNSUPPORTED, format("this graph uses '%s' (%s) in a way the first graphs did not; it cannot be streamed",
                w.entry->name.c_str(), ggml_op_name(node->op)));
        }
    }

    void require_room(size_t n_tensors) const {
        if (ggml_get_mem_size(ctx0_) - ggml_used_mem(ctx0_) < (n_tensors + 1) * ggml_tensor_overhead()) {
            throw Error(LS_ERR_UNSUPPORTED, "the graph leaves no room for the nodes that wait for weights");
        }
    }

    ggml_tensor * new_node(ggml_type type, int64_t n, ggml_tensor * a, OpParams params, ggml_custom_op_t fun,
                           int n_tasks = GGML_N_TASKS_MAX, void * userdata = nullptr) {
        require_room(1);
        ggml_tensor * t = ggml_custom_4d(ctx0_, type, n, 1, 1, 1, a ? &a : nullptr, a ? 1 : 0, fun, GGML_N_TASKS_MAX, nullptr);
        params.session = &session_;
        set_op_params(t, params, fun, n_tasks, userdata);
        t->flags |= GGML_TENSOR_FLAG_COMPUTE; // nothing depends on some of them; all must run
        out_.push_back(t);
        return t;
    }

    void insert_acquire(int32_t group, int at) {
        OpParams p = {};
        p.index = group;
        uint32_t n_held = 1;
        for (size_t g = 0; g < held_.size(); ++g) {
            if (held_[g] && !used_soon(g, at) && p.n_release < OpParams::kMaxRelease) {
                p.release[p.n_release++] = int32_t(g);
                held_[g] = false;
            }
            n_held += held_[g];
        }
        held_[size_t(group)] = true;
        held_at_once_ = std::max(held_at_once_, n_held);
        ggml_format_name(new_node(GGML_TYPE_I32, 1, nullptr, p, op_acquire), "leanstream_acquire_%d", group);
    }

    void rewrite(ggml_tensor * node) {
        Weight * w = weight_of(node->src[0]);
        if (w && (w->use == Use::rows || w->on_device) && node->op == GGML_OP_GET_ROWS) { // else the host keeps no copy
            OpParams p = {};
            p.session = &session_;
            set_op_params(node, p, op_get_rows, 1);
            node->op = GGML_OP_CUSTOM;
        } else if (w && w->use == Use::expert && node->op == GGML_OP_MUL_MAT_ID) {
            rewrite_product(node, *w);
        } else if (ggml_tensor * twin = w && engine_.repacked && node->op == GGML_OP_MUL_MAT ? engine_.repacked->twin(*w) : nullptr) {
            multiply_repacked(node, twin);
        } else if (node->op == GGML_OP_MUL_MAT && decides_for(node) >= 0) {
            decide_by_rows(node);
        }
    }

    // Layer of neurons for which this product decides, row by row, so that reads of what fires can begin before it is complete; or -1.
    int32_t decides_for(const ggml_tensor * node) const {
        const auto found = engine_.device() || node->ne[1] != 1 || node->ne[2] != 1 ? deciding_.end() : deciding_.find(node);
        return found == deciding_.end() ? -1 : found->second;
    }

    void decide_by_rows(ggml_tensor * node) {
        OpParams p = {};
        p.session = &session_;
        p.index   = decides_for(node);
        p.run     = int8_t(p.index % int32_t(Session::kNeuronRuns));
        p.part    = int16_t(n_chunked_++ % 2);
        node->src[2] = quantized(node->src[1], ggml_get_type_traits_cpu(node->src[0]->type)->vec_dot_type);
        set_op_params(node, p, op_decide_rows);
        node->op = GGML_OP_CUSTOM;
    }

    // True: the node is left out.
    bool rewrite_neurons(ggml_tensor * node) {
        for (NeuronMatch & m : neurons_) {
            if (node == m.up || node == m.product) {
                return true;
            }
            if (node == m.a && m.activation != GGML_UNARY_OP_COUNT) {
                make_activation(m);
            } else if (node == m.deciding) {
                decide_by_sketch(m);
            } else if (node == m.down) {
                sum_columns(m);
            }
        }
        return false;
    }

    void decide_by_sketch(const NeuronMatch & m) {
        ggml_tensor * node = m.deciding, * x = node->src[1];
        const NeuronShape & s = *engine_.neurons->layer(uint32_t(m.layer))->shape;
        OpParams p = {};
        p.session = &session_;
        p.index   = m.layer;
        p.run     = int8_t(Session::kNeuronRuns + m.layer % Session::kNeuronRuns);
        ggml_tensor * scores = new_node(GGML_TYPE_F32, int64_t(s.n_ff) * x->ne[1], x, p, op_sketch_neurons);
        for (int d = 0; d < GGML_MAX_DIMS; ++d) { // as the product: [n_ff, n_tokens]
            scores->ne[d] = node->ne[d];
            scores->nb[d] = node->nb[d];
        }
        node->src[0] = scores;
        node->src[1] = new_node(GGML_TYPE_I32, 1, scores, p, op_select_candidates);
        node->src[2] = x;
        node->src[3] = quantized(x, ggml_get_type_traits_cpu(s.deciding.type)->vec_dot_type);
        set_op_params(node, p, op_decide_neurons);
        node->op = GGML_OP_CUSTOM;
    }

    void sum_columns(const NeuronMatch & m) {
        OpParams p = {};
        p.session = &session_;
        p.index   = m.layer;
        p.run     = int8_t(m.layer % Session::kNeuronRuns);
        const NeuronShape & s = *engine_.neurons->layer(uint32_t(m.layer))->shape;
        const bool decided_there = decided_on_device(m);
        p.part = engine_.device() && engine_.device()->has_block(s.block);
        if (engine_.device() && !decided_there) { // between two nodes of the host; llama.cpp would send it to the device and back
            for (ggml_tensor * t = m.a; t->op != GGML_OP_MUL_MAT && t->op != GGML_OP_CUSTOM && t->src[0]; t = t->src[0]) {
                run_on_host(session_.context, t);
            }
        }
        const DeviceNeurons * there = decided_there ? engine_.weights.device_neurons(s.block) : nullptr;
        ggml_tensor * select = new_node(GGML_TYPE_I32, 1, m.a, p, op_select_neurons);
        ggml_format_name(select, "leanstream_neurons_%d", m.layer);
        ggml_tensor * rows = m.up ? quantized(m.up->src[1], ggml_get_type_traits_cpu(s.other.type)->vec_dot_type) : nullptr;
        ggml_tensor * sum = there ? new_node(GGML_TYPE_F32, ggml_nelements(m.down), m.a, p, op_apply_neurons) : m.down;
        for (int d = 0; d < GGML_MAX_DIMS; ++d) { // [n_embd, n_tokens]
            sum->ne[d] = m.down->ne[d];
            sum->nb[d] = m.down->nb[d];
        }
        if (there) {
            add_on_device(m, *there, sum);
        }
        sum->src[0] = m.a;
        sum->src[1] = select;
        sum->src[2] = m.up ? m.up->src[1] : nullptr;
        sum->src[3] = rows;
        set_op_params(sum, p, op_apply_neurons);
        sum->op = GGML_OP_CUSTOM;
    }

    bool decided_on_device(const NeuronMatch & m) const {
        const NeuronShape & s = *engine_.neurons->layer(uint32_t(m.layer))->shape;
        const Weight * w = m.deciding ? nullptr : engine_.weights.find_name(format("blk.%d.ffn_%s.weight", s.block, s.gated ? "gate" : "up"));
        return w && w->on_device;
    }

    ggml_tensor * append(ggml_tensor * node) {
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        out_.push_back(node);
        return node;
    }

    ggml_tensor * multiply_on_device(const Weight & w, ggml_tensor * x) {
        ggml_tensor * product = ggml_mul_mat(ctx0_, w.tensor, x);
        device_.place(product, 0, w);
        return append(product);
    }

    // down = the product with the neurons that the file holds for a device + what the host sums of the others
    void add_on_device(const NeuronMatch & m, const DeviceNeurons & there, ggml_tensor * host) {
        require_room(5);
        ggml_tensor * h = append(ggml_view_2d(ctx0_, m.a, there.down->tensor->ne[0], m.a->ne[1], m.a->nb[1], 0));
        h = m.a->ne[1] > 1 ? append(ggml_cont(ctx0_, h)) : h;
        if (there.up) {
            h = append(ggml_mul(ctx0_, multiply_on_device(*there.up, m.up->src[1]), h));
        }
        ggml_tensor * product = multiply_on_device(*there.down, h);
        memcpy(product->op_params, m.down->op_params, sizeof(product->op_params)); // its precision
        memset(m.down->op_params, 0, sizeof(m.down->op_params));
        m.down->op = GGML_OP_ADD;
        m.down->src[0] = product;
        m.down->src[1] = host;
        engine_.neurons->leave_to_device(uint32_t(m.layer));
    }

    Routing & routing_of(ggml_tensor * ids, int32_t layer) {
        for (Routing & r : routings_) {
            if (r.ids == ids && op_params(r.select).index == layer) {
                return r;
            }
        }
        OpParams p = {};
        p.index = layer;
        p.run   = int8_t(routings_.size() % Session::kRuns);
        ggml_tensor * select = new_node(GGML_TYPE_I32, 1, ids, p, op_select);
        ggml_format_name(select, "leanstream_select_%d", layer);
        const auto logits = guess_points_.logits.find(ids);
        select->src[1] = logits == guess_points_.logits.end() ? nullptr : const_cast<ggml_tensor *>(logits->second);
        routings_.push_back({ids, select, p.run, -1});
        return routings_.back();
    }

    // Input rows in the type that the weight's kernel multiplies with; gate and up share them.
    ggml_tensor * quantized(ggml_tensor * input, ggml_type type) {
        if (input->type == type) {
            return nullptr;
        }
        for (const auto & [in, t, node] : quantized_) {
            if (in == input && t == type) {
                return node;
            }
        }
        OpParams p = {};
        p.part = int16_t(type);
        const int64_t n_bytes = int64_t(ggml_row_size(type, input->ne[0])) * input->ne[1] * input->ne[2];
        ggml_tensor * node = new_node(GGML_TYPE_I8, n_bytes, input, p, op_quantize);
        quantized_.push_back({input, type, node});
        return node;
    }

    // From four tokens on llama.cpp multiplies tile by tile.
    void multiply_repacked(ggml_tensor * node, ggml_tensor * twin) {
        ggml_tensor * input = node->src[1];
        if (!engine_.repacked->kernel(*twin) || input->ne[1] > 3 || input->ne[2] != 1) {
            node->src[0] = twin;
            return;
        }
        OpParams p = {};
        p.session = &session_;
        p.index   = decides_for(node);
        p.run     = p.index < 0 ? int8_t(0) : int8_t(p.index % int32_t(Session::kNeuronRuns));
        p.part    = int16_t(n_chunked_++ % 2);
        node->src[2] = quantized(input, GGML_TYPE_Q8_0);
        set_op_params(node, p, op_repacked_product);
        node->op = GGML_OP_CUSTOM;
    }

    void rewrite_product(ggml_tensor * node, const Weight & w) {
        session_.tiled_bytes_per_thread = std::max(session_.tiled_bytes_per_thread, tiled_bytes_per_thread(node));
        ggml_tensor * input = node->src[1];
        ggml_tensor * ids   = node->src[2];
        Routing & routing = routing_of(ids, w.layer);
        OpParams p = {};
        p.session = &session_;
        p.index   = w.layer;
        p.part    = int16_t(w.part);
        p.run     = routing.run;
        p.last    = 1;
        if (routing.last_product >= 0) {
            ggml_tensor * earlier = out_[size_t(routing.last_product)];
            OpParams q = op_params(earlier);
            q.last = 0;
            set_op_params(earlier, q, op_mul_mat_id);
        }
        node->src[3] = routing.select;
        node->src[4] = quantized(input, ggml_get_type_traits_cpu(w.tensor->type)->vec_dot_type);
        set_op_params(node, p, op_mul_mat_id);
        node->op = GGML_OP_CUSTOM;
        routing.last_product = int(out_.size()); // run() appends the node there
    }

    // A product that can wait for missing experts until all else of its layer is computed.
    void let_it_await(ggml_tensor * node, int at) {
        if (engine_.device() || session_.observed || node->op != GGML_OP_CUSTOM || op_params(node).custom.fun != op_mul_mat_id || !can_await(node)) {
            return;
        }
        ggml_tensor * select = node->src[3];
        OpParams p = op_params(select);
        p.part = 1;
        set_op_params(select, p, op_select, 1);
        const size_t layer = size_t(op_params(node).index);
        const ggml_tensor * gate = node->src[1]->src[0];
        node->src[kAwaitedInput] = gate->src[4] ? gate->src[4] : gate->src[1];
        session_.awaited_bytes = std::max(session_.awaited_bytes, size_t(node->ne[1]) * awaited_bytes(engine_.weights.moe_layers[layer]));
        ggml_tensor * weights = weights_of(node, at), * residual = guess_points_.before_ffn[layer];
        if (layer + 1 < guess_points_.before_ffn.size() && guess_points_.before_ffn[layer + 1] && weights && is_done(weights) &&
            residual && is_done(residual)) {
            node->src[kAwaitedWeights]  = weights;
            node->src[kAwaitedResidual] = residual;
        }
    }

    // what the experts' outputs are multiplied with before they are added up
    ggml_tensor * weights_of(const ggml_tensor * down, int at) const {
        const ggml_tensor * next = at + 1 < graph_->n_nodes ? graph_->nodes[at + 1] : nullptr;
        const bool weighs = next && next->op == GGML_OP_MUL && next->src[0] == down && next->src[1]->ne[0] == 1 &&
            next->src[1]->ne[1] == down->ne[1] && next->src[1]->type == GGML_TYPE_F32;
        return weighs ? next->src[1] : nullptr;
    }

    bool is_done(const ggml_tensor * node) const { return std::find(out_.rbegin(), out_.rend(), node) != out_.rend(); }

    void insert_neuron_guesses(ggml_tensor * node) {
        const auto found = neuron_points_.find(node);
        if (found == neuron_points_.end()) {
            return;
        }
        for (const auto & [layer, lead] : found->second) {
            OpParams p = {};
            p.index = layer;
            p.part  = int16_t(lead);
            ggml_tensor * t = new_node(GGML_TYPE_F32, engine_.neurons->layer(uint32_t(layer))->shape->n_ff, node, p, op_guess_neurons);
            ggml_format_name(t, "leanstream_guess_neurons_%d_%d", layer, int(lead));
        }
    }

    void insert_guesses(ggml_tensor * node) {
        const auto found = guess_points_.at.find(node);
        if (found == guess_points_.at.end()) {
            return;
        }
        for (const auto & [layer, lead] : found->second) {
            OpParams p = {};
            p.index = layer;
            p.part  = int16_t(lead);
            ggml_tensor * t = new_node(GGML_TYPE_F32, engine_.weights.moe_layers[size_t(layer)].n_experts, node, p, op_guess);
            ggml_format_name(t, "leanstream_guess_%d_%d", layer, int(lead));
        }
    }

    void replace_nodes() {
        if (int64_t(out_.size()) + graph_->n_leafs > graph_->size) {
            throw Error(LS_ERR_UNSUPPORTED, format("the graph has %d nodes and leaves no room for %zu more", graph_->n_nodes,
                out_.size() - size_t(graph_->n_nodes)));
        }
        std::copy(out_.begin(), out_.end(), graph_->nodes);
        graph_->n_nodes = int(out_.size());
    }

    Engine & engine_;
    Session & session_;
    ggml_backend_buffer_type_t buffer_type_;
    ggml_context * ctx0_;
    ggml_cgraph * graph_;
    DevicePass device_;

    std::vector<ggml_tensor *> out_;
    std::vector<NeuronMatch> neurons_;
    std::unordered_map<const ggml_tensor *, int32_t> deciding_; // product to layer of neurons
    std::vector<std::vector<int>> uses_; // [group] node indices, ascending
    std::vector<bool> held_;     // [group] acquired and not released at this point
    uint32_t held_at_once_ = 0;
    uint32_t n_chunked_ = 0;     // products whose rows go to whichever thread is free
    std::vector<Routing> routings_;
    struct Quantized { ggml_tensor * input; ggml_type type; ggml_tensor * node; };
    std::vector<Quantized> quantized_;
    GuessPoints guess_points_;
    NeuronGuessPoints neuron_points_;
};

} // namespace

uint32_t rewrite_graph(Engine & engine, Session & session, ggml_backend_buffer_type_t buffer_type, ggml_context * ctx0,
                       ggml_cgraph * graph) {
    return GraphPass(engine, session, buffer_type, ctx0, graph).run();
}

} // namespace ls
