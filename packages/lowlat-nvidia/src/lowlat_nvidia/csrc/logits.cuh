// The end of a step: logits, the greatest of each row, and what the next step needs.
#pragma once
#include "gemv.cuh"

// Orders as the float does, NaN above all; of equal logits the lower token is greater.
DEV u64 rank_key(float x, u32 token) {
  u32 bits = x == x ? __float_as_uint(x) : 0x7fffffffu;
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)bits << 32 | (0xffffffffu - token);
}
template <class Load>
DEV void project_logits(Context& c, Load load) {
  constexpr int COUNT = (ROWS * 64 + THREADS - 1) / THREADS;
  u64 best[COUNT] = {};
  auto finish = [&](int tile0, int tiles, const float* part) {
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const int row = (c.thread + j * THREADS) / 64, n = c.thread % 64;
      const u32 token = (c.block * LM_TILES + tile0) * 8 + n;
      if (row >= c.rows || n >= tiles * 8 || token >= VOCAB) continue;
      float x = sum_partials(part, n / 8, row, n % 8) * inverse_rms(c, row);
      x = __uint_as_float(planted(c.p, STEP_WORDS + (long)row * VOCAB + token, __float_as_uint(x)));
      c.p.logits[(long)row * VOCAB + token] = x;
      u64 key = rank_key(x, token);
      best[j] = key > best[j] ? key : best[j];
    }
  };
  uint4 a[K_HIDDEN];
  load(a);
#pragma unroll 1
  for (int tile0 = 0; tile0 < LM_TILES; tile0 += 8) {
    const int tiles = LM_TILES - tile0 < 8 ? LM_TILES - tile0 : 8;
#pragma unroll 1
    for (int tile = 0; tile < tiles - 1; tile += 2) {
      float d[4] = {};
      multiply_wide(c, a, d);
      store_partial(c, tile, d[0], d[1]);
      store_partial(c, tile + 1, d[2], d[3]);
    }
    block_sync();
    finish(tile0, tiles, part_now(c));
    c.part_parity ^= 1;
  }
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int row = (c.thread + j * THREADS) / 64;
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      u64 other = __shfl_xor_sync(~0u, best[j], o);
      best[j] = other > best[j] ? other : best[j];
    }
    if (row < c.rows && c.lane == 0) atomicMax(c.p.best + row, best[j]);
  }
}
// One thread of each block calls it; the last publishes the tokens and prepares the next step. A token is -1 where the
// greatest logit is no finite number. After a failure, here or in an earlier step that nobody has reset, all tokens are
// -1, and NaN among the logits of every row tells hosts that do not know of the error word.
DEV void finish_step(const Params& p, u32 parity) {
  u32* state = p.state;
  if (atomicAdd(state + 4, 1u) != BLOCKS - 1) return;
  __threadfence();
  const bool failed = load_exchange_word(state + 1) != 0;
  for (int row = 0; row < rows_of(p); row++) {
    const u64 key = atomicExch(p.best + row, 0ull);
    const u32 top = key >> 32;
    const bool finite = top > 0x007fffffu && top < 0xff800000u;  // between the keys of the infinities
    p.next_token[row] = failed || !finite ? -1 : (long long)(0xffffffffu - (u32)key);
    if (failed) p.logits[(long)row * VOCAB] = __uint_as_float(0x7fc00000u);
  }
  state[4] = 0;
  if (!ONE) state[LAST_ROWS] = p.rows;
  state[PARITY] = parity ^ 1;
}
