// Products of quantised weights for at most 8 rows, which are the 8 columns of the matrix instructions: rows quantised to
// FP8 by groups, as float16 operands; waiting between kernels under programmatic dependent launch.
#pragma once
#include "ptx.cuh"

constexpr int MAX_ROWS = 8, GROUP = 32;  // a group: inputs that share a scale

DEV void wait_for_earlier_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// d += A b for 16 outputs, 16 inputs, 8 rows. (Matrix instructions on FP8 from registers are conversions to float16 and
// this one on Hopper, and the conversions are slow.)
DEV void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The scale of a group by its largest magnitude: a power of two, so that the group fits e4m3.
DEV float group_scale(float largest) {
  const u32 bits = __float_as_uint(__fdiv_rn(fmaxf(largest, 1e-10f), 448.f));
  return __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
}
// Rows as the matrix instructions take them: quantised to FP8 by groups of 32 inputs, then float16 in units of the row's
// largest scale. Exact while a group's scale is at least 2^-15 of that; what is smaller is rounded by less than 2^-24 of it.
DEV float group_largest(const float (&x)[8]) {  // of the four lanes that share row and group
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}
DEV u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Rounds to e4m3 in units of `scale`, and gives the result in units of `unit`.
DEV uint4 quantised_half(const float (&x)[8], float scale, float unit) {
  const float inverse = 1.f / scale, factor = scale / unit;  // exact: powers of two
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned short fp8;
    u32 half;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(fp8) : "f"(x[2 * i + 1] * inverse), "f"(x[2 * i] * inverse));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(fp8));
    float low, high;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(half));
    out[i] = half_pair(low * factor, high * factor);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}
