// Products of quantised weights for at most 8 rows, which are the 8 columns of the matrix instructions: rows quantised to
// FP8 by groups, as float16 operands or as they are.
#pragma once
#include "tensor.cuh"

constexpr int MAX_ROWS = 8, GROUP = 32;  // a group: inputs that share a scale

// Four e4m3 as two pairs of float16 of 2^-8 of their values: the bytes 1 and 3 of `w`, then 0 and 2 (formats.py packs so).
constexpr float FP8_TO_HALF = 256.f;
DEV void fp8_to_half(u32 w, u32& a, u32& b) {
  constexpr u32 SIGNS = 0x80008000u, REST = 0x3f803f80u;
  a = (w & SIGNS) | ((w >> 1) & REST);
  b = ((w << 8) & SIGNS) | ((w << 7) & REST);
}

// The scale of a group by its largest magnitude: the power of two (its exponent field, biased by 127) that makes the group
// fit e4m3, 2^ceil(log2(largest / 448)), the largest being at least 1e-10.
DEV u32 group_power(float largest) {
  const u32 bits = __float_as_uint(fmaxf(largest, 1e-10f));
  return (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);  // 448 is 1.75 x 2^8
}
DEV float power_value(u32 power) { return __uint_as_float(power << 23); }
DEV float group_largest(const float (&x)[8]) {  // of the four lanes that share row and group
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}
// Four values in units of their group's scale, as e4m3.
DEV u32 rounded_fp8(float a, float b, float c, float d, u32 power) {
  const float inverse = __uint_as_float((254 - power) << 23);
  return fp8_pair(a * inverse, b * inverse) | fp8_pair(c * inverse, d * inverse) << 16;
}
// Rows as the matrix instructions take them: rounded to e4m3 in units of the group's scale, as float16 (exact). `in_units`
// then brings groups to the row's largest scale: exact while a group's scale is at least 2^-15 of that; what is smaller is
// rounded by less than 2^-24 of it.
DEV uint4 rounded_half(const float (&x)[8], u32 power) {
  const float inverse = __uint_as_float((254 - power) << 23);
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = halves_of_fp8(x[2 * i] * inverse, x[2 * i + 1] * inverse);
  return make_uint4(out[0], out[1], out[2], out[3]);
}
DEV uint4 in_units(uint4 x, u32 power, u32 unit) {
  const u32 down = unit - power;
  const u32 half = down < 15 ? (15 - down) << 10 : down < 25 ? 1u << (24 - down) : 0u, factor = half << 16 | half;
  return make_uint4(multiply_halves(x.x, factor), multiply_halves(x.y, factor), multiply_halves(x.z, factor),
                    multiply_halves(x.w, factor));
}
DEV void unpack_bf16(uint4 w, float (&x)[8]) {
  x[0] = bf_low(w.x), x[1] = bf_high(w.x), x[2] = bf_low(w.y), x[3] = bf_high(w.y);
  x[4] = bf_low(w.z), x[5] = bf_high(w.z), x[6] = bf_low(w.w), x[7] = bf_high(w.w);
}
// A warp's share of all rows: lane (g, q) holds inputs 8q .. 8q + 7 of row g of each of COUNT groups, which
// load(i, x) gives. Returns the power of the share's unit for row g.
template <int COUNT, class Load>
DEV u32 quantise_share(uint4 (&x)[COUNT], Load load) {
  u32 powers[COUNT], unit = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float v[8];
    load(i, v);
    powers[i] = group_power(group_largest(v));
    x[i] = rounded_half(v, powers[i]);
    unit = max(unit, powers[i]);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] = in_units(x[i], powers[i], unit);
  return unit;
}
