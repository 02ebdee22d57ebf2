// Heads of q, k and v between their product and attention: normalised, rotated, and left in shared memory and the cache.
#pragma once
#include "cache.cuh"
#include "stream.cuh"

constexpr int EACH = HEAD_DIM / 32;  // elements of a head in a lane: lane, lane + 32, ...
struct HeadNorms { unsigned short query[EACH], key[EACH]; };
DEV void load_head_norms(Context& c, int layer, HeadNorms& norms) {
  if constexpr (QK_NORM) {
    const unsigned short* at = (const unsigned short*)c.p.head_norms + (long)layer * 2 * HEAD_DIM + c.lane;
#pragma unroll
    for (int e = 0; e < EACH; e++) { norms.query[e] = at[e * 32]; norms.key[e] = at[HEAD_DIM + e * 32]; }
  }
}
// Sums of squares of COUNT heads.
template <int COUNT>
DEV void square_heads(const float (&x)[COUNT][EACH], float (&square)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    square[j] = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) square[j] = fmaf(x[j][e], x[j][e], square[j]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1)
#pragma unroll
    for (int j = 0; j < COUNT; j++) square[j] += __shfl_xor_sync(~0u, square[j], o);
}
// Normalises (Qwen3) and rotates a head of q, k or v and leaves it in shared memory for the block. The block whose split holds a
// row's own token also writes its key and value to the cache.
DEV void finish_head(Context& c, const HeadNorms& norms, int row, int part, float (&x)[EACH], float square, int head, u8* k_pool,
                     u8* v_pool) {
  Control& k = c.s.control;  // parts: GROUP queries, then key, then value
  if (part <= GROUP) {
    if constexpr (QK_NORM) {
      const float scale = rsqrtf(square * (1.f / HEAD_DIM) + c.p.head_eps);
#pragma unroll
      for (int e = 0; e < EACH; e++) x[e] *= scale * bf_low(part == GROUP ? norms.key[e] : norms.query[e]);
    }
#pragma unroll
    for (int e = 0; e < EACH / 2; e++) {
      const float a = x[e], b = x[e + EACH / 2];
      const float cosine = k.rotary[row][e * 32 + c.lane], sine = k.rotary[row][HEAD_DIM / 2 + e * 32 + c.lane];
      x[e] = a * cosine - b * sine;
      x[e + EACH / 2] = b * cosine + a * sine;
    }
  }
  if (part < GROUP) {
#pragma unroll
    for (int e = 0; e < EACH; e++)
      c.s.query[row][part * HEAD_DIM + e * 32 + c.lane] = (unsigned short)bf_pair(x[e], 0.f);
  } else {
    const int own = k.own[row];
    const bool write = own >= k.begin[row] && own < k.end[row];
    u8* pool = part == GROUP ? k_pool : v_pool;
    const long slot = k.own_slot[row];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const unsigned short value = (unsigned short)bf_pair(x[e], 0.f);
      const int d = e * 32 + c.lane;
      unsigned short* fresh = (unsigned short*)c.s.fresh + d / 64 * (PANEL / 2) + ((part - GROUP) * 8 + row) * 64;
      fresh[swizzled(own, d % 64 / 8) / 2 + d % 8] = value;
      if (write)
        ((unsigned short*)pool)[slot * c.p.slot_stride + head * c.p.head_stride + e * 32 + c.lane] = value;
    }
  }
}
DEV void prepare_head(Context& c, const HeadNorms& norms, int row, int part, float (&x)[EACH], int head, u8* k_pool, u8* v_pool) {
  float all[1][EACH], square[1] = {};
#pragma unroll
  for (int e = 0; e < EACH; e++) all[0][e] = x[e];
  if (QK_NORM && part <= GROUP) square_heads<1>(all, square);
  finish_head(c, norms, row, part, x, square[0], head, k_pool, v_pool);
}
// Heads of q, k and v of all rows, a warp each. A warp asks for several at once: each would wait for the L2 by itself.
DEV void prepare_heads(Context& c, Stream& f, const HeadNorms& norms, int head, u8* k_pool, u8* v_pool) {
  constexpr int BATCH = (GROUP + 2) / 2;
  const int items = c.rows * (GROUP + 2);
  u32 coming[BATCH][EACH];
  auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int item = first + j * WARPS;
      const u32* words = c.now + item / (GROUP + 2) * ROW_WORDS + W_QKV + head * HEAD_ROWS + item % (GROUP + 2) * HEAD_DIM + c.lane;
#pragma unroll
      for (int e = 0; e < EACH; e++) coming[j][e] = item < items ? load_exchange_word(words + e * 32) : 0;
    }
  };
  pause(c, f, 2);
  load(c.warp);
#pragma unroll 1
  for (int first = c.warp; first < items; first += BATCH * WARPS) {
    u32 polls = 0;
    while (true) {
      u32 top = 0;
#pragma unroll
      for (int j = 0; j < BATCH; j++)
#pragma unroll
        for (int e = 0; e < EACH; e++) top = max(top, coming[j][e]);
      if (!__any_sync(~0u, top == EMPTY) || !__all_sync(~0u, may_wait(c, polls, 2))) break;
      pump(c, f);
      load(first);
    }
    float x[BATCH][EACH];
#pragma unroll
    for (int j = 0; j < BATCH; j++)
#pragma unroll
      for (int e = 0; e < EACH; e++) x[j][e] = __uint_as_float(coming[j][e]);
    load(first + BATCH * WARPS);
#pragma unroll
    for (int j = 0; j < BATCH; j++)
      if (const int item = first + j * WARPS; item < items)
        prepare_head(c, norms, item / (GROUP + 2), item % (GROUP + 2), x[j], head, k_pool, v_pool);
  }
}
