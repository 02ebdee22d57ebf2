// Attention of one row over paged keys and values, for the query heads that share one key/value head.
#pragma once

#include <cmath>

#include "vector.h"

namespace {

inline size_t padded(size_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Where entries are: offsets[t] is the distance of entry t from the head's base, in floats.
struct Entries {
    const float *keys, *values;
    const int64_t* offsets;
    int64_t count;
};

// scores[h][t] = query[h] . key[t] * scale, sixteen entries at a time.
template <int kParts>
void scores_of(const Entries& entries, const float* query, int sharing, float scale, float* scores, size_t stride) {
    for (int64_t first = 0; first < entries.count; first += kLanes) {
        const int64_t here = entries.count - first < kLanes ? entries.count - first : kLanes;
        for (int h = 0; h < sharing; ++h) {
            Floats q[kParts], dots[kLanes] = {};
            for (int i = 0; i < kParts; ++i) q[i] = load<Floats>(query + (h * kParts + i) * kLanes);
            for (int64_t t = 0; t < here; ++t) {
                const float* key = entries.keys + entries.offsets[first + t];
                for (int i = 0; i < kParts; ++i) dots[t] += load<Floats>(key + i * kLanes) * q[i];
            }
            store(scores + h * stride + first, sums(dots) * scale);
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

template <int kParts>
void weigh_values(const Entries& entries, const float* weights, float inverse, float* out) {
    Floats acc[kParts] = {};
    for (int64_t t = 0; t < entries.count; ++t) {
        const float* value = entries.values + entries.offsets[t];
        for (int i = 0; i < kParts; ++i) acc[i] += load<Floats>(value + i * kLanes) * weights[t];
    }
    for (int i = 0; i < kParts; ++i) store(out + i * kLanes, acc[i] * inverse);
}

template <int kParts>
void attend_parts(const Entries& entries, const float* query, int sharing, float* scores, float* out) {
    const int dim = kParts * kLanes;
    const size_t stride = padded(entries.count);
    scores_of<kParts>(entries, query, sharing, 1.0f / std::sqrt(float(dim)), scores, stride);
    for (int h = 0; h < sharing; ++h) {
        const float inverse = soften(scores + h * stride, entries.count, stride);
        weigh_values<kParts>(entries, scores + h * stride, inverse, out + h * dim);
    }
}

// Query and out: [sharing][head_dim]; scores: room for sharing * padded(count).
void attend(int head_dim, const Entries& entries, const float* query, int sharing, float* scores, float* out) {
    switch (head_dim / kLanes) {
        case 1: return attend_parts<1>(entries, query, sharing, scores, out);
        case 2: return attend_parts<2>(entries, query, sharing, scores, out);
        case 3: return attend_parts<3>(entries, query, sharing, scores, out);
        case 4: return attend_parts<4>(entries, query, sharing, scores, out);
        case 5: return attend_parts<5>(entries, query, sharing, scores, out);
        case 6: return attend_parts<6>(entries, query, sharing, scores, out);
        case 8: return attend_parts<8>(entries, query, sharing, scores, out);
        default: return attend_parts<16>(entries, query, sharing, scores, out);
    }
}

}  // namespace
