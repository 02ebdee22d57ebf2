// Attention of one row over paged keys and values.
#pragma once

#include <cmath>

#include "vector.h"

namespace {

constexpr int kMostHeads = 256;

inline size_t padded(size_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Where entries are: offsets[t] is the distance of entry t from the pool's base, in floats, head h at h * head_stride.
struct Entries {
    const float *keys, *values;
    const int64_t* offsets;
    int64_t count, head_stride;
};

// Key/value heads first to last - 1, each shared by `sharing` query heads. Query and out: [heads][head_dim].
struct Heads {
    int first, last, sharing;
};

// scores[head][t] = query[head] . key[t] * scale, sixteen entries at a time over all heads: an entry's heads lie beside
// one another, so memory is read in order.
template <int kParts>
void scores_of(const Entries& entries, Heads heads, const float* query, float scale, float* scores, size_t stride) {
    for (int64_t first = 0; first < entries.count; first += kLanes) {
        const int64_t here = entries.count - first < kLanes ? entries.count - first : kLanes;
        for (int head = heads.first * heads.sharing; head < heads.last * heads.sharing; ++head) {
            const float* keys = entries.keys + head / heads.sharing * entries.head_stride;
            Floats q[kParts], dots[kLanes] = {};
            for (int i = 0; i < kParts; ++i) q[i] = load<Floats>(query + (head * kParts + i) * kLanes);
            for (int64_t t = 0; t < here; ++t) {
                const float* key = keys + entries.offsets[first + t];
                for (int i = 0; i < kParts; ++i) dots[t] += load<Floats>(key + i * kLanes) * q[i];
            }
            store(scores + head * stride + first, sums(dots) * scale);
        }
    }
}

// Turns scores into e^(score - largest), zero past the end, and returns one over their sum.
float soften(float* scores, int64_t count, size_t stride) {
    for (size_t t = count; t < stride; ++t) scores[t] = -INFINITY;
    Floats most = load<Floats>(scores);
    for (size_t t = kLanes; t < stride; t += kLanes) {
        Floats s = load<Floats>(scores + t);
        most = s > most ? s : most;
    }
    float largest = most[0];
    for (int i = 1; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
    Floats total{};
    for (size_t t = 0; t < stride; t += kLanes) {
        Floats shifted = load<Floats>(scores + t) - largest;
        Floats e = shifted > splat(-87.0f) ? exponential(shifted) : Floats{};
        store(scores + t, e);
        total += e;
    }
    return 1.0f / sum(total);
}

// out[head] = sum over t of weights[head][t] * value[t], in the order of t.
template <int kParts>
void weigh_values(const Entries& entries, Heads heads, const float* weights, size_t stride, float* out) {
    for (int64_t first = 0; first < entries.count; first += kLanes) {
        const int64_t end = entries.count - first < kLanes ? entries.count : first + kLanes;
        for (int head = heads.first * heads.sharing; head < heads.last * heads.sharing; ++head) {
            const float* values = entries.values + head / heads.sharing * entries.head_stride;
            float* to = out + head * kParts * kLanes;
            Floats acc[kParts];
            for (int i = 0; i < kParts; ++i) acc[i] = first ? load<Floats>(to + i * kLanes) : Floats{};
            for (int64_t t = first; t < end; ++t) {
                const float* value = values + entries.offsets[t];
                for (int i = 0; i < kParts; ++i) acc[i] += load<Floats>(value + i * kLanes) * weights[head * stride + t];
            }
            for (int i = 0; i < kParts; ++i) store(to + i * kLanes, acc[i]);
        }
    }
}

template <int kParts>
void attend_parts(const Entries& entries, Heads heads, const float* query, float* scores, float* out) {
    const int dim = kParts * kLanes;
    const size_t stride = padded(entries.count);
    scores_of<kParts>(entries, heads, query, 1.0f / std::sqrt(float(dim)), scores, stride);
    float inverse[kMostHeads];
    for (int head = heads.first * heads.sharing; head < heads.last * heads.sharing; ++head)
        inverse[head] = soften(scores + head * stride, entries.count, stride);
    weigh_values<kParts>(entries, heads, scores, stride, out);
    for (int head = heads.first * heads.sharing; head < heads.last * heads.sharing; ++head)
        for (int d = 0; d < dim; ++d) out[head * dim + d] *= inverse[head];
}

// `scores` has room for heads * padded(count).
void attend(int head_dim, const Entries& entries, Heads heads, const float* query, float* scores, float* out) {
    switch (head_dim / kLanes) {
        case 1: return attend_parts<1>(entries, heads, query, scores, out);
        case 2: return attend_parts<2>(entries, heads, query, scores, out);
        case 3: return attend_parts<3>(entries, heads, query, scores, out);
        case 4: return attend_parts<4>(entries, heads, query, scores, out);
        case 5: return attend_parts<5>(entries, heads, query, scores, out);
        case 6: return attend_parts<6>(entries, heads, query, scores, out);
        case 8: return attend_parts<8>(entries, heads, query, scores, out);
        default: return attend_parts<16>(entries, heads, query, scores, out);
    }
}

}  // namespace
