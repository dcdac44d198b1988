// Products with repacked weights for few tokens, where llama.cpp's kernel is bound by instructions and not by memory.
#include "ops.h"

#include "engine.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ls {

namespace {

// What every row needs of the tokens' inputs.
struct Inputs {
    std::vector<float>   scale;
    std::vector<int32_t> offset;
    std::vector<RepackedInput> tokens;

    void set(const ggml_tensor * quantized, uint32_t n_blocks, uint32_t n_tokens) {
        scale.resize(size_t(n_blocks) * n_tokens);
        offset.resize(scale.size());
        tokens.clear();
        for (size_t b = 0; b < scale.size(); ++b) {
            const uint8_t * block = (const uint8_t *) quantized->data + 34 * b;
            ggml_fp16_t d;
            memcpy(&d, block, sizeof(d));
            scale[b] = ggml_fp16_to_fp32(d);
            int32_t sum = 0;
            for (uint32_t i = 0; i < 32; ++i) {
                sum += int8_t(block[2 + i]);
            }
            offset[b] = -4 * sum;
        }
        for (uint32_t t = 0; t < n_tokens; ++t) {
            const size_t first = size_t(t) * n_blocks;
            tokens.push_back({ (const uint8_t *) quantized->data + 34 * first, scale.data() + first, offset.data() + first, n_blocks });
        }
    }
};

} // namespace

void op_repacked_product(ggml_tensor * dst, int ith, int nth, void *) {
    const OpParams p = op_params(dst);
    const ggml_tensor * w = dst->src[0];
    const uint32_t n_blocks = uint32_t(w->ne[0]) / 32;
    const size_t group_bytes = n_blocks * kRepackedBlockBytes;
    const RepackedFn product = p.session->engine->repacked->kernel(*w);
    thread_local Inputs in;
    in.set(dst->src[2], n_blocks, uint32_t(dst->ne[1]));

    const auto multiply = [&](uint32_t first, uint32_t last) {
        for (uint32_t r = first; r < last; r += kRepackedRows) {
            for (size_t t = 0; t < in.tokens.size(); ++t) {
                float * row = (float *) ((char *) dst->data + t * dst->nb[1]);
                product(in.tokens[t], (const uint8_t *) w->data + r / kRepackedRows * group_bytes, row + r);
            }
        }
        if (p.index >= 0) {
            expect_firing(p, (const float *) dst->data, first, last);
        }
    };
    share_chunks(p, uint32_t(w->ne[1]), group_bytes / kRepackedRows, ith, nth, multiply, kRepackedRows);
}

} // namespace ls
