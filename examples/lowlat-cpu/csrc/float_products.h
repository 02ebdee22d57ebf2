// Matrices multiplied with up to eight rows of float32, in float32: for processors without integer dot products.
//
// A row of the result is a sum over columns in order, whatever the number of rows: the same bits at every width.
#pragma once

#include "matrix.h"

namespace {

// What a product takes of its rows: themselves.
struct Input {
    const float* x;
    size_t stride;
    int rows;
    void* unused;

    static constexpr size_t kFloatsPerBlock = 0;
    void prepare(const Matrix&) {}
};

// acc[g][r] += weight of group g and column c times x[r][c], for the eight columns of one word.
template <int kGroups, int kRows, int kIndex>
inline void eight_columns(Floats (&acc)[kGroups][kRows], const Words (&words)[kGroups], const Floats (&d)[kGroups],
                          const Floats (&m)[kGroups], const float* x, size_t x_stride) {
    if constexpr (kIndex < 8) {
        for (int g = 0; g < kGroups; ++g) {
            Floats weight = nibble<kIndex>(words[g]) * d[g] + m[g];
            for (int r = 0; r < kRows; ++r) acc[g][r] += weight * x[r * x_stride + kIndex];
        }
        eight_columns<kGroups, kRows, kIndex + 1>(acc, words, d, m, x, x_stride);
    }
}

// The same for the four columns of one word of Q8_0.
template <int kGroups, int kRows, int kIndex>
inline void four_columns(Floats (&acc)[kGroups][kRows], const Words (&words)[kGroups], const Floats (&d)[kGroups],
                         const float* x, size_t x_stride) {
    if constexpr (kIndex < 4) {
        for (int g = 0; g < kGroups; ++g) {
            Floats weight = signed_byte<kIndex>(words[g]) * d[g];
            for (int r = 0; r < kRows; ++r) acc[g][r] += weight * x[r * x_stride + kIndex];
        }
        four_columns<kGroups, kRows, kIndex + 1>(acc, words, d, x, x_stride);
    }
}

template <int kGroups, int kRows>
inline void q4_1_block(Floats (&acc)[kGroups][kRows], const uint8_t* block, size_t group_bytes, const float* x,
                       size_t x_stride) {
    Floats d[kGroups], m[kGroups];
    for (int g = 0; g < kGroups; ++g) {
        d[g] = widen(block + g * group_bytes);
        m[g] = widen(block + g * group_bytes + 32);
    }
    for (int j = 0; j < 4; ++j) {
        Words words[kGroups];
        for (int g = 0; g < kGroups; ++g) {
            const uint8_t* at = block + g * group_bytes + 64 + j * 64;
            words[g] = load<Words>(at);
            __builtin_prefetch(at + 1280);
        }
        eight_columns<kGroups, kRows, 0>(acc, words, d, m, x + 8 * j, x_stride);
    }
}

template <int kGroups, int kRows>
inline void q8_0_block(Floats (&acc)[kGroups][kRows], const uint8_t* block, size_t group_bytes, const float* x,
                       size_t x_stride) {
    Floats d[kGroups];
    for (int g = 0; g < kGroups; ++g) d[g] = widen(block + g * group_bytes);
    for (int j = 0; j < 8; ++j) {
        Words words[kGroups];
        for (int g = 0; g < kGroups; ++g) {
            const uint8_t* at = block + g * group_bytes + 32 + j * 64;
            words[g] = load<Words>(at);
            __builtin_prefetch(at + 1088);
        }
        four_columns<kGroups, kRows, 0>(acc, words, d, x + 4 * j, x_stride);
    }
}

// kGroups neighbouring groups of output rows; y[r] has padded() entries at least.
template <int kGroups, int kRows>
void multiply_groups(const Matrix& w, int first, const float* x, size_t x_stride, float* y, size_t y_stride) {
    Floats acc[kGroups][kRows] = {};
    const uint8_t* block = w.blocks + first * w.group_bytes();
    for (int c = 0; c < w.columns; c += kBlock, block += w.block_bytes()) {
        if (w.format == kQ4_1)
            q4_1_block<kGroups, kRows>(acc, block, w.group_bytes(), x + c, x_stride);
        else
            q8_0_block<kGroups, kRows>(acc, block, w.group_bytes(), x + c, x_stride);
    }
    for (int r = 0; r < kRows; ++r)
        for (int g = 0; g < kGroups; ++g) store(y + r * y_stride + (first + g) * kLanes, acc[g][r]);
}

#if defined(__AVX512F__)
// Groups in flight: as many sums beside each other as hide the latency of an addition and leave registers for weights.
// A weight that is unpacked serves all rows, so a row more costs its additions alone.
constexpr int groups_for(int rows) { return rows <= 4 ? 4 : 2; }

template <int kRows>
void multiply_some(const Matrix& w, int first, int count, const float* x, size_t x_stride, float* y, size_t y_stride) {
    constexpr int kGroups = groups_for(kRows);
    int g = first;
    for (; g + kGroups <= first + count; g += kGroups) multiply_groups<kGroups, kRows>(w, g, x, x_stride, y, y_stride);
    for (; g < first + count; ++g) multiply_groups<1, kRows>(w, g, x, x_stride, y, y_stride);
}
#else
// Sixteen lanes take several of few registers, so weights of a block are widened into a small buffer first, and then
// used by up to four rows at a time: as many sums as registers hold, and enough to hide the latency of an addition.
template <int kIndex, int kCount>
inline void widen_word(Words words, Floats d, Floats m, float* out) {
    if constexpr (kIndex < kCount) {
        if constexpr (kCount == 8)
            store(out + kIndex * kLanes, nibble<kIndex>(words) * d + m);
        else
            store(out + kIndex * kLanes, signed_byte<kIndex>(words) * d);
        widen_word<kIndex + 1, kCount>(words, d, m, out);
    }
}

inline void widen_block(const Matrix& w, const uint8_t* block, float* out) {
    const Floats d = widen(block);
    if (w.format == kQ4_1) {
        const Floats m = widen(block + 32);
        for (int j = 0; j < 4; ++j) {
            __builtin_prefetch(block + 64 + j * 64 + 1280);
            widen_word<0, 8>(load<Words>(block + 64 + j * 64), d, m, out + j * 8 * kLanes);
        }
    } else {
        for (int j = 0; j < 8; ++j) {
            __builtin_prefetch(block + 32 + j * 64 + 1088);
            widen_word<0, 4>(load<Words>(block + 32 + j * 64), d, d, out + j * 4 * kLanes);
        }
    }
}

constexpr int kHalves = kLanes / 8;

// sums[r][h] of half h of the lanes, for one block of columns.
template <int kRows>
inline void add_block(Eight (&acc)[kRows][kHalves], const float* weights, const float* x, size_t x_stride) {
    Eight sums[kRows][kHalves];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) sums[r][h] = acc[r][h];
#pragma GCC unroll 2
    for (int c = 0; c < kBlock; ++c) {
        const Eight low = load<Eight>(weights + c * kLanes), high = load<Eight>(weights + c * kLanes + 8);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const float factor = x[r * x_stride + c];
            sums[r][0] += low * factor;
            sums[r][1] += high * factor;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) acc[r][h] = sums[r][h];
}

// Rows in two parts of at most four.
template <int kRows>
void multiply_panel(const Matrix& w, int group, const float* x, size_t x_stride, float* y, size_t y_stride) {
    constexpr int kUpper = kRows > 4 ? (kRows + 1) / 2 : kRows, kLower = kRows - kUpper;
    alignas(64) float weights[kBlock * kLanes];
    Eight upper[kUpper][kHalves] = {}, lower[kLower + (kLower == 0)][kHalves] = {};
    const uint8_t* block = w.blocks + group * w.group_bytes();
    for (int c = 0; c < w.columns; c += kBlock, block += w.block_bytes()) {
        widen_block(w, block, weights);
        add_block<kUpper>(upper, weights, x + c, x_stride);
        if constexpr (kLower > 0) add_block<kLower>(lower, weights, x + kUpper * x_stride + c, x_stride);
    }
    for (int h = 0; h < kHalves; ++h) {
        float* out = y + group * kLanes + 8 * h;
        for (int r = 0; r < kUpper; ++r) store(out + r * y_stride, upper[r][h]);
        for (int r = 0; r < kLower; ++r) store(out + (kUpper + r) * y_stride, lower[r][h]);
    }
}

template <int kRows>
void multiply_some(const Matrix& w, int first, int count, const float* x, size_t x_stride, float* y, size_t y_stride) {
    for (int g = first; g < first + count; ++g) {
        if constexpr (kRows == 1)
            multiply_groups<1, 1>(w, g, x, x_stride, y, y_stride);
        else
            multiply_panel<kRows>(w, g, x, x_stride, y, y_stride);
    }
}
#endif

template <int kRows>
void multiply_some(const Matrix& w, int first, int count, const Input& in, float* y, size_t y_stride) {
    multiply_some<kRows>(w, first, count, in.x, in.stride, y, y_stride);
}

}  // namespace
