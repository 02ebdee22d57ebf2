// The sum over the splits of a context.
#pragma once
#include "stream.cuh"

// What splits count for, of the `total` of all; SPLITS neighbouring lanes hold the logarithms, of COUNT rows or heads side by
// side. Every stage that sums splits calls this, so that a row has the same bits whichever of them it takes.
template <int COUNT>
DEV void split_weights(const float (&lse)[COUNT], float (&weight)[COUNT], float (&total)[COUNT]) {
  float top[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; j++) top[j] = lse[j];
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1)
#pragma unroll
    for (int j = 0; j < COUNT; j++) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], o));
#pragma unroll
  for (int j = 0; j < COUNT; j++) total[j] = weight[j] = fast_exp2(lse[j] - top[j]);
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1)
#pragma unroll
    for (int j = 0; j < COUNT; j++) total[j] += __shfl_xor_sync(~0u, total[j], o);
}
DEV float split_weight(float lse, float& total) {
  const float all[1] = {lse};
  float weight[1], sum[1];
  split_weights<1>(all, weight, sum);
  total = sum[0];
  return weight[0];
}
// Elements `2 * split` and the next of the sum of four elements' splits, for the lanes of splits 0 and 1; COUNT such sums.
template <int COUNT>
DEV void join_splits(const uint4 (&v)[COUNT], const float (&lse)[COUNT], int split, u32 (&word)[COUNT]) {
  float weight[COUNT], total[COUNT], x[COUNT][4];
  split_weights<COUNT>(lse, weight, total);
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    x[j][0] = mul(__uint_as_float(v[j].x), weight[j]);
    x[j][1] = mul(__uint_as_float(v[j].y), weight[j]);
    x[j][2] = mul(__uint_as_float(v[j].z), weight[j]);
    x[j][3] = mul(__uint_as_float(v[j].w), weight[j]);
  }
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1)
#pragma unroll
    for (int j = 0; j < COUNT; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) x[j][e] += __shfl_xor_sync(~0u, x[j][e], o);
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const float scale = 1.f / total[j];
    word[j] = split == 0 ? bf_pair(x[j][0] * scale, x[j][1] * scale) : bf_pair(x[j][2] * scale, x[j][3] * scale);
  }
}
DEV u32 join_splits(uint4 v, float lse, int split) {
  const uint4 all[1] = {v};
  const float logs[1] = {lse};
  u32 word[1];
  join_splits<1>(all, logs, split, word);
  return word[0];
}
// Sums the splits for this block's share of the head group, of which a lane has two items: both are waited for and summed
// together.
DEV void combine_two(Context& c, Stream& f) {
  constexpr int VECTORS = BLOCK_COMBINE / 4, SIDES = 32 / SPLITS;
  const int head = c.block / SPLITS, share = c.block % SPLITS, split = c.lane % SPLITS, at = head * SPLITS + split;
  uint4 v[2];
  u32 word[2], polls = 0;
  int row[2], d[2];
  bool active[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int index = (j * WARPS + c.warp) * SIDES + c.lane / SPLITS;
    row[j] = index / VECTORS;
    d[j] = share * BLOCK_COMBINE + index % VECTORS * 4;
    active[j] = row[j] < c.rows;
  }
  pause(c, f, 3);
  while (true) {
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32* now = c.now + row[j] * ROW_WORDS;
      v[j] = active[j] ? load_exchange(now + W_PART + at * GROUP_DIM + d[j]) : make_uint4(0, 0, 0, 0);
      word[j] = active[j] ? load_exchange_word(now + W_LSE + at * GROUP + d[j] / HEAD_DIM) : __float_as_uint(-1e30f);
    }
    pump(c, f);
#pragma unroll
    for (int j = 0; j < 2; j++) top = max(top, max(greatest(v[j]), word[j]));
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, 3)) break;
  }
  const float lse[2] = {__uint_as_float(word[0]), __uint_as_float(word[1])};
  u32 joined[2];
  join_splits<2>(v, lse, split, joined);
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (active[j] && split < 2) publish_to_all(c, row[j], W_ATTN + (head * GROUP_DIM + d[j]) / 2 + split, joined[j]);
}
// Sums the splits for this block's share of the head group: a lane per split, four elements a lane.
DEV void combine(Context& c, Stream& f) {
  constexpr int VECTORS = BLOCK_COMBINE / 4, SIDES = 32 / SPLITS;
  if constexpr (BY_ROWS && ROWS * VECTORS == 2 * WARPS * SIDES) return combine_two(c, f);
  const int head = c.block / SPLITS, share = c.block % SPLITS, split = c.lane % SPLITS, at = head * SPLITS + split;
  const int items = c.rows * VECTORS;
  uint4 coming = make_uint4(0, 0, 0, 0);  // of the next item
  u32 coming_lse = 0;
  auto load = [&](int index) {
    if (index >= items) return;
    const u32* now = c.now + index / VECTORS * ROW_WORDS;
    const int d = share * BLOCK_COMBINE + index % VECTORS * 4;
    coming = load_exchange(now + W_PART + at * GROUP_DIM + d);
    coming_lse = load_exchange_word(now + W_LSE + at * GROUP + d / HEAD_DIM);
  };
  const int first = c.warp * SIDES + c.lane / SPLITS;
  pause(c, f, 3);
  load(first);
#pragma unroll 1
  for (int base = 0; base + c.warp * SIDES < items; base += WARPS * SIDES) {
    const int index = base + first, row = index / VECTORS;
    const bool active = index < items;
    const int d = share * BLOCK_COMBINE + index % VECTORS * 4;
    u32 polls = 0;
    while (__any_sync(~0u, active && (greatest(coming) == EMPTY || coming_lse == EMPTY)) && !give_up(c, polls, 3)) {
      pump(c, f);
      load(index);
    }
    const uint4 v = coming;
    const float lse = active ? __uint_as_float(coming_lse) : -1e30f;
    load(index + WARPS * SIDES);
    __syncwarp();
    const u32 word = join_splits(v, lse, split);
    if (active && split < 2) publish_to_all(c, row, W_ATTN + (head * GROUP_DIM + d) / 2 + split, word);
  }
}
