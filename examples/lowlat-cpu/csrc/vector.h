// Sixteen lanes, in the compiler's own vector types: one source for AVX-512, AVX2, SSE2 and NEON.
// The same file is compiled once for each instruction set; only two operations have a faster spelling on AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <typename Vector>
inline Vector load(const void* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename Vector>
inline void store(void* to, Vector value) {
    std::memcpy(to, &value, sizeof value);
}

inline Floats splat(float value) { return value - Floats{}; }

// Sixteen IEEE half-precision numbers, widened exactly. Rebasing the exponent by a multiplication handles subnormals.
inline Floats widen(const void* halves) {
    Words bits = __builtin_convertvector(load<Halves>(halves), Words);
    Words magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    Words scaled = load<Words>(&magnitude);
    Floats value = load<Floats>(&scaled) * 0x1p112f;
    Words result = load<Words>(&value) | sign;
    return load<Floats>(&result);
}

// Lane i: the value of the four bits of words[i] from bit 4 * kIndex on.
template <int kIndex>
inline Floats nibble(Words words) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i index = load<__m512i>(&words);
    if (kIndex > 0) index = _mm512_srli_epi32(index, 4 * kIndex);
    __m512 found = _mm512_permutexvar_ps(index, table);  // reads the low four bits of each index
    return load<Floats>(&found);
#else
    Words value = (words >> (4 * kIndex)) & 15;
    return __builtin_convertvector(load<Ints>(&value), Floats);
#endif
}

// Lane i: the signed value of byte kIndex of words[i].
template <int kIndex>
inline Floats signed_byte(Words words) {
    Words high = words << (24 - 8 * kIndex);
    return __builtin_convertvector(load<Ints>(&high) >> 24, Floats);
}

inline float sum(Floats v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

// Lane i: the sum of v[i], for sixteen vectors at once: pairs of vectors are folded until one is left.
inline Floats sums(const Floats (&v)[kLanes]) {
    Floats eight[8], four[4], two[2];
    for (int i = 0; i < 8; ++i)
        eight[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; ++i)
        four[i] = __builtin_shufflevector(eight[i], eight[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26,
                                          27) +
                  __builtin_shufflevector(eight[i], eight[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29,
                                          30, 31);
    for (int i = 0; i < 2; ++i)
        two[i] = __builtin_shufflevector(four[i], four[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28,
                                         29) +
                 __builtin_shufflevector(four[i], four[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                                         31);
    return __builtin_shufflevector(two[0], two[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(two[0], two[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Half the lanes, for instruction sets whose registers are too few for sums of all.
typedef float Eight __attribute__((vector_size(32)));

// Lane i: the sum of v[i], for eight vectors.
inline Eight sums(const Eight (&v)[8]) {
    Eight four[4], two[2];
    for (int i = 0; i < 4; ++i)
        four[i] = __builtin_shufflevector(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
                  __builtin_shufflevector(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; ++i)
        two[i] = __builtin_shufflevector(four[i], four[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
                 __builtin_shufflevector(four[i], four[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(two[0], two[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(two[0], two[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

// e^x for x in [-87, 88], within two units in the last place; smaller arguments give e^-87.
// Range reduction by ln 2 in two parts, then a polynomial of degree seven (Taylor on |r| <= ln 2 / 2).
inline Floats exponential(Floats x) {
    Floats low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    Floats scaled = x * 1.44269504f;
    Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding and taking it away rounds to an integer
    Floats whole = (scaled + magic) - magic;
    Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    Floats p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    return p * load<Floats>(&power);
}

}  // namespace
