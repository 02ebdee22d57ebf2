// Matrices multiplied with up to eight rows by integer dot products (AVX-512 VNNI).
//
// Each block of 32 columns of a row becomes whole numbers of 22 bits and a sign times a power of two, so that its largest
// number keeps what a float32 has but the last two bits, and none is off by more than 2^-22 of it: about as exact as in
// float32 where the block's numbers are alike, less where one is thousands of times the others and its weight is 0. What
// is smaller than 2^-122 is 0. A whole number is three signed bytes, and a block's product three sums of small integers
// times bytes, which are exact; blocks are added in float32, in order. A row of the result has the same bits whatever
// the number of rows.
//
// A weight that is unpacked serves all rows and is never widened: an instruction multiplies 64 of them by a byte each, so
// 21 by whole numbers, where one of float32 multiplies 16.
#pragma once

#include <cmath>

#include "matrix.h"

namespace {

constexpr int kBytes = 3;

// 32 columns of a row: x[c] = scale * sum over k of byte[k][c] * 256^(2 - k), bytes in the order of the weights.
struct Piece {
    int8_t byte[kBytes][kBlock];
    float scale, sum;      // sum: of the 32 numbers
    int32_t upper, lower;  // what weights plus 128 make too much: -128 times the sums of all but the last byte, and of it
};

inline __m512i sign_extended_byte(__m512i value) { return _mm512_srai_epi32(_mm512_slli_epi32(value, 24), 24); }

// The largest magnitude's exponent, 128 where something is not finite.
inline int largest_exponent(__m512 low, __m512 high) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i a = _mm512_and_si512(_mm512_castps_si512(low), magnitude);
    const __m512i b = _mm512_and_si512(_mm512_castps_si512(high), magnitude);
    return int(_mm512_reduce_max_epu32(_mm512_max_epu32(a, b)) >> 23) - 127;
}

inline float power_of_two(int exponent) {
    const int32_t bits = (exponent + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// `alternating`: even columns of eight first, then odd ones, as the nibbles of Q4_1 come apart.
inline void to_piece(const float* x, bool alternating, Piece& out) {
    const __m512 part[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + kLanes)};
    int exponent = largest_exponent(part[0], part[1]);
    const bool finite = exponent < 128;
    exponent = exponent < -100 ? -100 : finite ? exponent : 0;
    const __m512 factor = _mm512_set1_ps(power_of_two(21 - exponent));
    const __m128i order = alternating ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                                      : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i upper = _mm512_setzero_si512(), lower = upper;
    for (int i = 0; i < 2; ++i) {
        __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], factor));
        for (int k = kBytes - 1; k >= 0; --k) {
            const __m512i byte = sign_extended_byte(rest);
            const __m128i packed = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(byte), order);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out.byte[k] + i * kLanes), packed);
            rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, byte), 8);
            if (k < kBytes - 1) continue;
            lower = _mm512_add_epi32(lower, byte);
            upper = _mm512_add_epi32(upper, rest);
        }
    }
    const int32_t above = _mm512_reduce_add_epi32(upper), last = _mm512_reduce_add_epi32(lower);
    out.upper = -128 * above;
    out.lower = -128 * last;
    out.scale = finite ? power_of_two(exponent - 21) : NAN;
    out.sum = float(above * 256 + last) * out.scale;
}

// Rows, and their pieces for the format that was asked for last.
struct Input {
    const float* x;
    size_t stride;
    int rows;
    void* room;  // rows * kFloatsPerBlock floats for each block of columns
    int32_t format = -1;

    static constexpr size_t kFloatsPerBlock = sizeof(Piece) / sizeof(float);

    const Piece* pieces() const { return static_cast<const Piece*>(room); }

    void prepare(const Matrix& w) {
        if (format == w.format) return;
        format = w.format;
        Piece* to = static_cast<Piece*>(room);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < w.columns; c += kBlock) to_piece(x + r * stride + c, format == kQ4_1, *to++);
    }
};

// Weights of a block as unsigned bytes, four columns of each of sixteen rows a vector.
inline void unpack(const Matrix& w, const uint8_t* block, __m512i (&weights)[8]) {
    if (w.format == kQ4_1) {
        const __m512i nibbles = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; ++j) {
            const uint8_t* at = block + 64 + j * 64;
            const __m512i words = _mm512_loadu_si512(at);
            __builtin_prefetch(at + 1280);
            weights[2 * j] = _mm512_and_si512(words, nibbles);
            weights[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi32(words, 4), nibbles);
        }
    } else {
        for (int j = 0; j < 8; ++j) {
            const uint8_t* at = block + 32 + j * 64;
            __builtin_prefetch(at + 1088);
            weights[j] = _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_set1_epi8(-128));
        }
    }
}

// One product a byte; sums of at most 15 * 32 * 2^22 stay below 2^31.
inline void dot(const __m512i (&weights)[8], const Piece& piece, __m512i (&sums)[kBytes]) {
#pragma GCC unroll 3
    for (int k = 0; k < kBytes; ++k) sums[k] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 3
        for (int k = 0; k < kBytes; ++k) {
            int32_t four;
            std::memcpy(&four, piece.byte[k] + 4 * i, 4);
            sums[k] = _mm512_dpbusd_epi32(sums[k], weights[i], _mm512_set1_epi32(four));
        }
    }
}

inline __m512i joined(__m512i above, __m512i below) { return _mm512_add_epi32(_mm512_slli_epi32(above, 8), below); }

template <int kRows>
void multiply_group(const Matrix& w, int group, const Input& in, float* y, size_t y_stride) {
    const int blocks = w.columns / kBlock;
    const uint8_t* block = w.blocks + group * w.group_bytes();
    __m512 acc[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = _mm512_setzero_ps();
    for (int c = 0; c < blocks; ++c, block += w.block_bytes()) {
        __m512i weights[8], sums[kBytes];
        unpack(w, block, weights);
        const Floats d = widen(block), m = widen(block + 32);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Piece& piece = in.pieces()[r * blocks + c];
            dot(weights, piece, sums);
            const __m512 scale = _mm512_mul_ps(load<__m512>(&d), _mm512_set1_ps(piece.scale));
            if (w.format == kQ4_1) {
                const __m512 whole = _mm512_cvtepi32_ps(joined(joined(sums[0], sums[1]), sums[2]));
                acc[r] = _mm512_fmadd_ps(whole, scale, acc[r]);
                acc[r] = _mm512_fmadd_ps(load<__m512>(&m), _mm512_set1_ps(piece.sum), acc[r]);
            } else {
                const __m512i above = _mm512_add_epi32(joined(sums[0], sums[1]), _mm512_set1_epi32(piece.upper));
                const __m512i below = _mm512_add_epi32(sums[2], _mm512_set1_epi32(piece.lower));
                const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(above), _mm512_set1_ps(256.0f),
                                                     _mm512_cvtepi32_ps(below));
                acc[r] = _mm512_fmadd_ps(whole, scale, acc[r]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y + r * y_stride + group * kLanes, acc[r]);
}

template <int kRows>
void multiply_some(const Matrix& w, int first, int count, const Input& in, float* y, size_t y_stride) {
    for (int g = first; g < first + count; ++g) multiply_group<kRows>(w, g, in, y, y_stride);
}

}  // namespace
