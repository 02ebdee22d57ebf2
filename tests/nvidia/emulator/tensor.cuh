// The instructions of `csrc/tensor.cuh` on a CPU; see ptx.cuh beside this.
#pragma once
#include "ptx.cuh"

DEV float __fdiv_rn(float a, float b) { return a / b; }
DEV float __fdividef(float a, float b) { return a / b; }
void stores_before();

DEV u64 keep_policy() { return 0; }
DEV uint4 load_by_policy(const uint4* p, u64) { return *p; }

// ---- small floats
DEV float emu_value(u32 b) {
  const int e = b >> 3 & 15, m = b & 7;
  const float x = (b & 127) == 127 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
  return b & 128 ? -x : x;
}
DEV u32 emu_to_fp8(float x) {
  const u32 sign = __float_as_uint(x) >> 24 & 128;
  const float a = fabsf(x);
  if (a != a) return 127;
  if (a >= 464.f) return sign | 126;  // satfinite: never NaN
  int e;
  frexpf(a, &e);
  const float unit = ldexpf(1.f, (e - 1 < -6 ? -6 : e - 1) - 3), rounded = nearbyintf(a / unit) * unit;
  if (rounded == 0) return sign;
  frexpf(rounded, &e);
  if (e - 1 < -6) return sign | (u32)(rounded / ldexpf(1.f, -9));
  const u32 bits = (u32)(e - 1 + 7) << 3 | (u32)(rounded / ldexpf(1.f, e - 1 - 3) - 8);
  return sign | (bits > 126 ? 126 : bits);
}
DEV u32 fp8_pair(float low, float high) { return emu_to_fp8(high) << 8 | emu_to_fp8(low); }
DEV u32 half_pair(float low, float high) { return emu_to_half(high) << 16 | emu_to_half(low); }
DEV u32 fp8_pair_to_half(u32 two) { return half_pair(emu_value(two & 255), emu_value(two >> 8 & 255)); }
DEV float half_low(u32 pair) { return emu_half(pair); }
DEV float half_high(u32 pair) { return emu_half(pair >> 16); }

// ---- matrices
DEV void emu_load_matrices(u32 (&m)[4], u32 address, bool transposed) {
  if (address % 16) { fprintf(stderr, "misaligned matrix\n"); abort(); }
  const u64 mine = address;
  u64 (*all)[4];
  emu_meet_warp(&mine, 1, &all);
  const int g = emu_now->lane / 4, q = emu_now->lane % 4;
  for (int i = 0; i < 4; i++) {
    m[i] = 0;
    for (int k = 0; k < 2; k++) {
      const int row = transposed ? 2 * q + k : g, column = transposed ? g : 2 * q + k;
      m[i] |= (u32) * (const unsigned short*)emu_resolve((u32)all[8 * i + row][0] + column * 2) << 16 * k;
    }
  }
}
DEV void load_matrices(u32 (&m)[4], u32 address) { emu_load_matrices(m, address, false); }
DEV void load_matrices_transposed(u32 (&m)[4], u32 address) { emu_load_matrices(m, address, true); }
DEV u64 operand(u32 address, u32 next) {
  if (address % 128) { fprintf(stderr, "misaligned operand\n"); abort(); }
  return (address & 0x3ffff) >> 4 | (u64)(next >> 4) << 16 | (u64)(128 >> 4) << 32;
}
DEV float emu_element(u64 operand, int row, int k) {
  const u32 field[3] = {(u32)(operand & 0x3fff) * 16, (u32)(operand >> 16 & 0x3fff) * 16, (u32)(operand >> 32 & 0x3fff) * 16};
  return emu_value(*emu_resolve(field[0] + k / 16 * field[1] + row / 8 * field[2] + row % 8 * 16 + k % 16));
}
DEV void multiply_group(float (&d)[4], u64 weights, u64 rows) {
  const int warp = emu_now->thread / 32 % 4, g = emu_now->lane / 4, q = emu_now->lane % 4;
  for (int i = 0; i < 4; i++) {
    d[i] = 0;
    for (int k = 0; k < 32; k++) d[i] += emu_element(weights, warp * 16 + i / 2 * 8 + g, k) * emu_element(rows, 2 * q + i % 2, k);
  }
}
DEV void multiply_begin() {}
DEV void multiply_commit() {}
template <int LATER, int COUNT> DEV void multiply_wait(float (&)[COUNT][4]) {}
DEV void shared_for_matrices() {}

// ---- clusters
DEV void cluster_here() { cluster_arrive(); }
DEV u32 cluster_rank() { return emu_now->home->place % emu_now->home->blocks_a_cluster; }
DEV u32 address_in_block(u32 here, u32 block) { return peer_address(here, block); }
DEV u32 emu_bits(float x) { return __float_as_uint(x); }
DEV void send(u32 to, float a, float b, u32 barrier) {
  emu_later({1, to, {emu_bits(a), emu_bits(b), 0, 0}, 8, nullptr, barrier, emu_now->block});
}
DEV void send(u32 to, float a, float b, float c, float d, u32 barrier) {
  if (to % 16) { fprintf(stderr, "misaligned store\n"); abort(); }
  emu_later({1, to, {emu_bits(a), emu_bits(b), emu_bits(c), emu_bits(d)}, 16, nullptr, barrier, emu_now->block});
}
DEV void barriers_for_cluster() {}
DEV void fetch_into_l2(const u8* from, u32 bytes) {
  if ((u64)from % 16 || bytes % 16 || !bytes) { fprintf(stderr, "misaligned prefetch\n"); abort(); }
  (void)*(const volatile u8*)from, (void)*(const volatile u8*)(from + bytes - 1);
}
DEV void fetch_line_into_l2(const u8*) {}
