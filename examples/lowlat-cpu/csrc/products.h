// Products of matrices with up to eight rows, on all threads.
#pragma once

#if defined(__AVX512VNNI__)
#include "fixed_products.h"
#else
#include "float_products.h"
#endif

namespace {

constexpr int kMostRows = 8;

template <int kRows>
void multiply_rows(const Matrix& w, const Input& in, float* y, size_t y_stride, int threads) {
    constexpr int kChunk = 4;
    const int groups = w.groups(), chunks = (groups + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int i = 0; i < chunks; ++i) {
        const int first = i * kChunk, count = groups - first < kChunk ? groups - first : kChunk;
        multiply_some<kRows>(w, first, count, in, y, y_stride);
    }
}

// y[r][o] = sum over c of w[o][c] * x[r][c]; strides in floats.
void multiply(const Matrix& w, Input& in, float* y, size_t y_stride, int threads) {
    in.prepare(w);
    switch (in.rows) {
        case 1: return multiply_rows<1>(w, in, y, y_stride, threads);
        case 2: return multiply_rows<2>(w, in, y, y_stride, threads);
        case 3: return multiply_rows<3>(w, in, y, y_stride, threads);
        case 4: return multiply_rows<4>(w, in, y, y_stride, threads);
        case 5: return multiply_rows<5>(w, in, y, y_stride, threads);
        case 6: return multiply_rows<6>(w, in, y, y_stride, threads);
        case 7: return multiply_rows<7>(w, in, y, y_stride, threads);
        default: return multiply_rows<kMostRows>(w, in, y, y_stride, threads);
    }
}

}  // namespace
