// One decode or verify step of a Llama model in one call: embedding, layers, logits. float32 activations.
//
// The structs are mirrored in native.py. All pointers are host memory; strides count elements.

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "products.h"

namespace {

struct Layer {
    const float *attention_norm, *mlp_norm;
    Matrix query, key, value, output, gate, up, down;
};

struct Model {
    int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, threads;
    float epsilon;
    const float *final_norm, *frequencies;  // frequencies: head_dim / 2 angles a position
    const Layer* layer;
    Matrix embedding, head;
};

struct Step {
    int32_t rows, requests, page_size, table_stride;
    int64_t slot_stride, head_stride, logits_stride;
    const int64_t *tokens, *positions, *write_slots;
    const int32_t *query_start, *lengths, *page_table;
    float *const *keys, *const *values;  // one base a layer
    float *logits, *workspace;
    const int32_t* taps;  // layers, in rising order
    float* features;      // [rows][tapped * hidden]: the rows' states after each of them
    int64_t tapped;
};

// Buffers of one step, carved from the workspace; every row is padded to whole vectors.
struct Buffers {
    float *x, *normed, *query, *key, *value, *mixed, *gate, *up, *logits, *cosines, *sines, *scores, *pieces;
    int64_t* offsets;  // [rows][longest]: where each entry that a row sees lies in a pool
    size_t hidden, query_width, kv_width, inner, vocabulary, half, longest, floats;
};

// `longest` is the most entries that a row may attend to. With a null base only `floats` is meaningful.
Buffers carve(const Model& model, int rows, float* base, size_t longest) {
    Buffers b{};
    b.hidden = padded(model.hidden);
    b.query_width = padded(size_t(model.heads) * model.head_dim);
    b.kv_width = padded(size_t(model.kv_heads) * model.head_dim);
    b.inner = padded(model.inner);
    b.vocabulary = padded(model.vocabulary);
    b.half = model.head_dim / 2;
    b.longest = padded(longest);
    auto take = [&](size_t width) {
        float* taken = base ? base + b.floats : nullptr;
        b.floats += padded(width * rows);
        return taken;
    };
    b.x = take(b.hidden);
    b.normed = take(b.hidden);
    b.query = take(b.query_width);
    b.key = take(b.kv_width);
    b.value = take(b.kv_width);
    b.mixed = take(b.query_width);
    b.gate = take(b.inner);
    b.up = take(b.inner);
    b.cosines = take(b.half);
    b.sines = take(b.half);
    b.logits = take(b.vocabulary);
    b.scores = take(b.longest * model.heads);
    const size_t widest = std::max(b.inner, std::max(b.hidden, b.query_width));
    b.pieces = take((widest + kBlock - 1) / kBlock * Input::kFloatsPerBlock);
    b.offsets = reinterpret_cast<int64_t*>(take(2 * b.longest));
    return b;
}

void normalise(const float* x, const float* weight, int n, float epsilon, float* out) {
    Floats squares{};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        Floats v = load<Floats>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < n; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / n + epsilon);
    for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// Rotate-half: the first half of a head against the second.
void rotate(float* head, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

// Rotates queries and keys of every row to its position and writes keys and values to the pools.
void place(const Model& model, const Step& step, int index, const Buffers& b) {
    const int dim = model.head_dim;
    for (int r = 0; r < step.rows; ++r) {
        const float *cosines = b.cosines + r * b.half, *sines = b.sines + r * b.half;
        for (int h = 0; h < model.heads; ++h) rotate(b.query + r * b.query_width + h * dim, cosines, sines, b.half);
        const int64_t slot = step.write_slots[r];
        if (slot < 0) continue;
        for (int h = 0; h < model.kv_heads; ++h) {
            float* key = b.key + r * b.kv_width + h * dim;
            rotate(key, cosines, sines, b.half);
            const int64_t at = slot * step.slot_stride + h * step.head_stride;
            std::memcpy(step.keys[index] + at, key, dim * sizeof(float));
            std::memcpy(step.values[index] + at, b.value + r * b.kv_width + h * dim, dim * sizeof(float));
        }
    }
}

void attention(const Model& model, const Step& step, int index, const Buffers& b) {
    place(model, step, index, b);
    const int dim = model.head_dim, sharing = model.heads / model.kv_heads;
    const int cuts = model.threads < model.kv_heads ? model.threads : model.kv_heads;
#pragma omp parallel for num_threads(model.threads) schedule(dynamic) if (model.threads > 1)
    for (int part = 0; part < step.rows * cuts; ++part) {
        const int r = part / cuts, cut = part % cuts;
        const Heads heads{model.kv_heads * cut / cuts, model.kv_heads * (cut + 1) / cuts, sharing};
        float* out = b.mixed + r * b.query_width;
        if (step.write_slots[r] < 0) {
            std::memset(out + heads.first * sharing * dim, 0, (heads.last - heads.first) * sharing * dim * sizeof(float));
            continue;
        }
        const Entries entries{step.keys[index], step.values[index], b.offsets + r * b.longest, step.positions[r] + 1,
                              step.head_stride};
        attend(dim, entries, heads, b.query + r * b.query_width, b.scores + r * model.heads * b.longest, out);
    }
}

void mlp(const Model& model, const Layer& layer, int rows, const Buffers& b) {
    Input normed{b.normed, b.hidden, rows, b.pieces};
    multiply(layer.gate, normed, b.gate, b.inner, model.threads);
    multiply(layer.up, normed, b.up, b.inner, model.threads);
    for (size_t i = 0; i < b.inner * rows; i += kLanes) {
        Floats gate = load<Floats>(b.gate + i);
        store(b.gate + i, gate / (1.0f + exponential(-gate)) * load<Floats>(b.up + i));
    }
    Input gated{b.gate, b.inner, rows, b.pieces};
    multiply(layer.down, gated, b.normed, b.hidden, model.threads);
}

void add(float* x, const float* y, size_t n) {
    for (size_t i = 0; i < n; i += kLanes) store(x + i, load<Floats>(x + i) + load<Floats>(y + i));
}

void one_layer(const Model& model, const Step& step, int index, const Buffers& b) {
    const Layer& layer = model.layer[index];
    const int rows = step.rows, threads = model.threads;
    for (int r = 0; r < rows; ++r)
        normalise(b.x + r * b.hidden, layer.attention_norm, model.hidden, model.epsilon, b.normed + r * b.hidden);
    Input normed{b.normed, b.hidden, rows, b.pieces};
    multiply(layer.query, normed, b.query, b.query_width, threads);
    multiply(layer.key, normed, b.key, b.kv_width, threads);
    multiply(layer.value, normed, b.value, b.kv_width, threads);
    attention(model, step, index, b);
    Input mixed{b.mixed, b.query_width, rows, b.pieces};
    multiply(layer.output, mixed, b.normed, b.hidden, threads);
    add(b.x, b.normed, b.hidden * rows);
    for (int r = 0; r < rows; ++r)
        normalise(b.x + r * b.hidden, layer.mlp_norm, model.hidden, model.epsilon, b.normed + r * b.hidden);
    mlp(model, layer, rows, b);
    add(b.x, b.normed, b.hidden * rows);
}

void show(const Model& model, const Step& step, int tap, const Buffers& b) {
    const size_t hidden = model.hidden;
    for (int r = 0; r < step.rows; ++r)
        std::memcpy(step.features + (r * step.tapped + tap) * hidden, b.x + r * b.hidden, hidden * sizeof(float));
}

void find_entries(const Step& step, const int32_t* table, int64_t count, int64_t* offsets) {
    for (int64_t t = 0; t < count;) {
        int64_t slot = int64_t(table[t / step.page_size]) * step.page_size;
        for (int i = 0; i < step.page_size && t < count; ++i, ++t, ++slot) offsets[t] = slot * step.slot_stride;
    }
}

void begin(const Model& model, const Step& step, const Buffers& b) {
    for (int q = 0; q < step.requests; ++q)
        for (int r = step.query_start[q]; r < step.query_start[q + 1]; ++r)
            if (step.write_slots[r] >= 0)
                find_entries(step, step.page_table + int64_t(q) * step.table_stride, step.positions[r] + 1,
                             b.offsets + r * b.longest);
    for (int r = 0; r < step.rows; ++r) {
        std::memset(b.x + r * b.hidden, 0, b.hidden * sizeof(float));
        read_row(model.embedding, int(step.tokens[r]), b.x + r * b.hidden);
        for (size_t i = 0; i < b.half; ++i) {
            // The angle is rounded to float first, as a table of float32 angles would hold it.
            const float angle = float(step.positions[r]) * model.frequencies[i];
            b.cosines[r * b.half + i] = float(std::cos(double(angle)));
            b.sines[r * b.half + i] = float(std::sin(double(angle)));
        }
    }
}

}  // namespace

#define LOWLAT_CPU_API extern "C" __attribute__((visibility("default")))

LOWLAT_CPU_API int64_t lowlat_cpu_workspace(const Model* model, int rows, int64_t longest) {
    return int64_t(carve(*model, rows, nullptr, size_t(longest)).floats);
}

LOWLAT_CPU_API void lowlat_cpu_step(const Model* model, const Step* step, int64_t longest) {
    const Buffers b = carve(*model, step->rows, step->workspace, size_t(longest));
    begin(*model, *step, b);
    for (int i = 0, tap = 0; i < model->layers; ++i) {
        one_layer(*model, *step, i, b);
        if (tap < step->tapped && step->taps[tap] == i) show(*model, *step, tap++, b);
    }
    for (int r = 0; r < step->rows; ++r)
        normalise(b.x + r * b.hidden, model->final_norm, model->hidden, model->epsilon, b.normed + r * b.hidden);
    Input normed{b.normed, b.hidden, step->rows, b.pieces};
    multiply(model->head, normed, b.logits, b.vocabulary, model->threads);
    for (int r = 0; r < step->rows; ++r)
        std::memcpy(step->logits + r * step->logits_stride, b.logits + r * b.vocabulary,
                    model->vocabulary * sizeof(float));
}

LOWLAT_CPU_API void lowlat_cpu_interleave(const uint8_t* from, const int64_t* order, const Matrix* to, uint8_t* out) {
    interleave(from, order, *to, out);
}

LOWLAT_CPU_API void lowlat_cpu_multiply(const Matrix* w, const float* x, float* y, int rows, int threads) {
    std::vector<float> room(rows * (w->columns / kBlock) * Input::kFloatsPerBlock);
    Input in{x, size_t(w->columns), rows, room.data()};
    multiply(*w, in, y, w->padded(), threads);
}

LOWLAT_CPU_API void lowlat_cpu_read_row(const Matrix* w, int row, float* out) { read_row(*w, row, out); }

LOWLAT_CPU_API void lowlat_cpu_exponential(const float* x, float* out, int64_t n) {
    for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(out + i, exponential(load<Floats>(x + i)));
}

// Whether this machine can run the code compiled for an instruction set.
LOWLAT_CPU_API int lowlat_cpu_supports(const char* name) {
#if defined(__x86_64__)
    if (!std::strcmp(name, "avx512vnni"))
        return __builtin_cpu_supports("avx512vnni") && lowlat_cpu_supports("avx512");
    if (!std::strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !std::strcmp(name, "portable");
}
