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

#if defined(__AVX512F__)
typedef Floats Dots;
#else
typedef Eight Dots;  // what a register holds: compilers leave arrays of wider vectors in memory
#endif

// scores[head][t] = query[head] . key[t] * scale, a vector of entries at a time over all heads: an entry's heads lie
// beside one another, so memory is read in order.
template <int kParts>
void scores_of(const Entries& entries, Heads heads, const float* query, float scale, float* scores, size_t stride) {
    constexpr int kEntries = sizeof(Dots) / sizeof(float), kPieces = kParts * kLanes / kEntries;
    for (int64_t first = 0; first < entries.count; first += kEntries) {
        const int64_t last = entries.count - 1;
        const float* at[kEntries];  // past the end the last entry again: what comes of it is not read
        for (int t = 0; t < kEntries; ++t) at[t] = entries.keys + entries.offsets[first + t < last ? first + t : last];
        for (int head = heads.first * heads.sharing; head < heads.last * heads.sharing; ++head) {
            const int64_t key_head = head / heads.sharing * entries.head_stride;
            Dots dots[kEntries] = {};
            for (int i = 0; i < kPieces; ++i) {
                const Dots q = load<Dots>(query + (head * kPieces + i) * kEntries);
                for (int t = 0; t < kEntries; ++t) dots[t] += load<Dots>(at[t] + key_head + i * kEntries) * q;
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

// Heads that share values and are weighed together, so that a value is read once for them.
template <int kParts>
constexpr int heads_at_once() {
    constexpr int kMost = sizeof(Dots) == sizeof(Floats) ? 16 / kParts : 1;
    return kMost < 1 ? 1 : kMost < 4 ? kMost : 4;
}

// out[head] += sum over entries first to end - 1 of weights[head][t] * value[t], for kHeads heads with the same values.
template <int kParts, int kHeads>
inline void weigh_heads(const float* values, const int64_t* offsets, int64_t first, int64_t end, const float* weights,
                        size_t stride, float* out) {
    constexpr int kWide = sizeof(Dots) / sizeof(float), kPieces = kParts * kLanes / kWide;
    Dots acc[kHeads][kPieces];
    for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kPieces; ++i) acc[h][i] = first ? load<Dots>(out + (h * kPieces + i) * kWide) : Dots{};
    for (int64_t t = first; t < end; ++t) {
        const float* value = values + offsets[t];
        for (int i = 0; i < kPieces; ++i) {
            const Dots part = load<Dots>(value + i * kWide);
            for (int h = 0; h < kHeads; ++h) acc[h][i] += part * weights[h * stride + t];
        }
    }
    for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kPieces; ++i) store(out + (h * kPieces + i) * kWide, acc[h][i]);
}

// The same for `count` heads, at most kHeads.
template <int kParts, int kHeads>
inline void weigh_some(int count, const float* values, const int64_t* offsets, int64_t first, int64_t end,
                       const float* weights, size_t stride, float* out) {
    if constexpr (kHeads > 1)
        if (count < kHeads)
            return weigh_some<kParts, kHeads - 1>(count, values, offsets, first, end, weights, stride, out);
    weigh_heads<kParts, kHeads>(values, offsets, first, end, weights, stride, out);
}

// out[head] = sum over t of weights[head][t] * value[t], in the order of t.
template <int kParts>
void weigh_values(const Entries& entries, Heads heads, const float* weights, size_t stride, float* out) {
    constexpr int kHeads = heads_at_once<kParts>();
    for (int64_t first = 0; first < entries.count; first += kLanes) {
        const int64_t end = entries.count - first < kLanes ? entries.count : first + kLanes;
        for (int shared = heads.first; shared < heads.last; ++shared) {
            const float* values = entries.values + shared * entries.head_stride;
            for (int h = 0; h < heads.sharing; h += kHeads) {
                const int head = shared * heads.sharing + h;
                weigh_some<kParts, kHeads>(heads.sharing - h, values, entries.offsets, first, end,
                                           weights + head * stride, stride, out + head * kParts * kLanes);
            }
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
