// The sum over the splits of a context.
#pragma once
#include "stream.cuh"

// What a split counts for, of the `total` of all; SPLITS neighbouring lanes hold the logarithms. Every stage that sums
// splits calls this, so that a row has the same bits whichever of them it takes.
DEV float split_weight(float lse, float& total) {
  float top = lse;
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  const float weight = fast_exp2(lse - top);
  total = weight;
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  return weight;
}
// Elements `2 * split` and the next of the sum of four elements' splits, for the lanes of splits 0 and 1.
DEV u32 join_splits(uint4 v, float lse, int split) {
  float total;
  const float weight = split_weight(lse, total);
  float x[4] = {mul(__uint_as_float(v.x), weight), mul(__uint_as_float(v.y), weight), mul(__uint_as_float(v.z), weight),
                mul(__uint_as_float(v.w), weight)};
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1)
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(~0u, x[e], o);
  const float scale = 1.f / total;
  return split == 0 ? bf_pair(x[0] * scale, x[1] * scale) : bf_pair(x[2] * scale, x[3] * scale);
}
// Sums the splits for this block's share of the head group: a lane per split, four elements a lane.
DEV void combine(Context& c, Stream& f) {
  constexpr int VECTORS = BLOCK_COMBINE / 4, SIDES = 32 / SPLITS;
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
