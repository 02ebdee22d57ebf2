// Attention of one KV head over one split of the context.
// A warp takes a unit of 16 tokens through the matrix instruction: scores = queries (A: head g in row g) x keys (B: a token a
// column), output = values (A: an element a row, transposed as they are loaded) x weights (B: a head a column). The layout of scores
// is that of the weights. A row's own length says which of eight sums a token belongs to; which warp computes that sum is given by
// the ring (see `attend_row`), so that rows of few units go through different warps at once. A row's bits do not depend on its
// neighbours.
#pragma once
#include "heads.cuh"

constexpr int TILES_OUT = HEAD_DIM / 16;  // of 16 elements of the output
constexpr int KEY_LOADS = HEAD_DIM / 32;  // 16-byte loads of a lane for 8 tokens
constexpr int ROW_PARTS = GROUP_DIM / 4;  // 16-byte pieces of a warp's sum
constexpr float LOG2E = 1.44269504f;
static_assert(GROUP <= 8 && GROUP % 2 == 0, "a query head in each column of the matrix instruction, two a lane");

struct Accumulator {
  float top, sum;            // of head g: the greatest score; the sum over this lane's tokens alone
  float out[TILES_OUT][4];   // elements 16 i + g of heads 2q and 2q + 1, then elements 16 i + g + 8
};
// Weights of 16 tokens, packed as the B operand, from their scores [tile of 8 tokens][token 2q, 2q + 1] of head g. Sums are
// scaled anew only where a maximum grows; before the first unit of a row there are none.
template <bool FIRST>
DEV void weigh(Context& c, const float (&s)[2][2], Accumulator& acc, u32 (&weight)[2]) {
  const float scale = rsqrtf((float)HEAD_DIM) * LOG2E;
  float top = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
  if (FIRST || __any_sync(~0u, top > acc.top)) {
    if (!FIRST) top = fmaxf(acc.top, top);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (!FIRST) {
      const float shrink = fast_exp2((acc.top - top) * scale);
      acc.sum *= shrink;
      const float even = __shfl_sync(~0u, shrink, 8 * c.q), odd = __shfl_sync(~0u, shrink, 8 * c.q + 4);
#pragma unroll
      for (int i = 0; i < TILES_OUT; i++) {
        acc.out[i][0] *= even; acc.out[i][2] *= even;
        acc.out[i][1] *= odd; acc.out[i][3] *= odd;
      }
    }
    acc.top = top;
  }
  const float shift = acc.top * scale;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    weight[j] = bf_pair(fast_exp2(fmaf(s[j][0], scale, -shift)), fast_exp2(fmaf(s[j][1], scale, -shift)));
    acc.sum += bf_low(weight[j]) + bf_high(weight[j]);
  }
}
// A unit of a row: its place in the step's units, its first token.
struct Unit { int row, base; u32 index; };
// Gives units back; `seen` depends on all that was loaded from each.
template <int COUNT>
DEV void give_back(Context& c, const Unit (&units)[COUNT], const u32 (&seen)[COUNT]) {
  __syncwarp();
#pragma unroll
  for (int n = 0; n < COUNT; n++)
    if (PLAIN_COPIES || c.lane == 0) barrier_arrive(after(c, seen[n], shared_address(&c.s.unit_empty[units[n].index % UNITS])));
}
// Where a lane finds its tokens of a unit: in the ring, and this step's own where `prepare_heads` left them.
DEV void find_unit(Context& c, const Unit& unit, u32 (&keys)[2], u32& values) {
  const Control& k = c.s.control;
  // Lanes 8 m to 8 m + 7 name the tokens of the m-th of the four 8 x 8 matrices of a tile of values.
  const int token = c.lane / 16 * 8 + c.lane % 8;
  const int row = unit.row, base = unit.base, cached = k.cached[row] - base;
  const u32 at = c.units + unit.index % UNITS * UNIT;
  keys[0] = at + c.g * 128;
  keys[1] = at + (8 + c.g) * 128;
  values = at + UNIT / 2 + token * 128;
  if (cached < UNIT_TOKENS) {
    // Tokens after the row's own have no row; their weights are zero, any finite value does.
    const u32 fresh = shared_address(c.s.fresh);
    auto at = [&](int t) { return fresh + (k.first[row] + min(t, k.own[row] - base) - cached) * 128; };
    if (c.g >= cached) keys[0] = at(c.g);
    if (8 + c.g >= cached) keys[1] = at(8 + c.g);
    if (token >= cached) values = at(token) + 8 * 128;
  }
  keys[0] += swizzled(c.g, 2 * c.q);
  keys[1] += swizzled(c.g, 2 * c.q);
  values += swizzled(token, c.lane / 8 % 2);
}
DEV void wait_unit(Context& c, u32 index) {
  wait_barrier(c, shared_address(&c.s.unit_full[index % UNITS]), index / UNITS & 1, 9);
}
// Scores, weights and weighted values of a unit each of COUNT rows. No branches where FIRST, and one unit's steps fill the waits
// of the other's. `middle()` is done when the keys have been used.
template <int COUNT, bool FIRST, class Middle>
DEV void sum_units(Context& c, const uint4 (&query)[COUNT][KEY_LOADS], const Unit (&units)[COUNT],
                   const uint4 (&key)[COUNT][2][KEY_LOADS], const uint4 (&value)[COUNT][TILES_OUT], Accumulator (&acc)[COUNT],
                   u32 (&weight)[COUNT][2], Middle middle) {
  const Control& k = c.s.control;
  float chain[COUNT][2][2][4] = {};
#pragma unroll
  for (int i = 0; i < KEY_LOADS; i++)
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        // All four words of a query are the operand as they lie. Its upper rows are of use to the first product alone, its
        // lower rows to the second.
        mma(chain[n][j][0], query[n][i], key[n][j][i].x, key[n][j][i].z);
        mma(chain[n][j][1], query[n][i], key[n][j][i].y, key[n][j][i].w);
      }
  middle();
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int left = k.end[units[n].row] - units[n].base;
    float s[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        s[j][e] = chain[n][j][0][e] + chain[n][j][1][2 + e];
        if (8 * j + 2 * c.q + e >= left) s[j][e] = -1e30f;
      }
    weigh<FIRST>(c, s, acc[n], weight[n]);
  }
#pragma unroll
  for (int n = 0; n < COUNT; n++)
#pragma unroll
    for (int i = 0; i < TILES_OUT; i++) mma(acc[n].out[i], value[n][i], weight[n][0], weight[n][1]);
}
// A unit each of COUNT rows, side by side. Gives the units back.
template <int COUNT, bool FIRST>
DEV void attend(Context& c, const uint4 (&query)[COUNT][KEY_LOADS], const Unit (&units)[COUNT], Accumulator (&acc)[COUNT]) {
  u32 keys[COUNT][2], values[COUNT], seen[COUNT], weight[COUNT][2];
#pragma unroll
  for (int n = 0; n < COUNT; n++) wait_unit(c, units[n].index);
#pragma unroll
  for (int n = 0; n < COUNT; n++) find_unit(c, units[n], keys[n], values[n]);
  uint4 key[COUNT][2][KEY_LOADS], value[COUNT][TILES_OUT];
#pragma unroll
  for (int n = 0; n < COUNT; n++)
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < KEY_LOADS; i++) key[n][j][i] = load_shared((keys[n][j] ^ i % 2 * 16) + i / 2 * PANEL);
#pragma unroll
  for (int n = 0; n < COUNT; n++)
#pragma unroll
    for (int i = 0; i < TILES_OUT; i++) value[n][i] = load_transposed((values[n] ^ i % 4 * 32) + i / 4 * PANEL);
  sum_units<COUNT, FIRST>(c, query, units, key, value, acc, weight, nothing);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    seen[n] = weight[n][0] ^ weight[n][1];
#pragma unroll
    for (int i = 0; i < TILES_OUT; i++) seen[n] ^= value[n][i].w;
  }
  give_back<COUNT>(c, units, seen);
}

// Leaves a warp's sum of a row for `publish_splits`: 16 bytes of each tile of lanes with heads, one after the other.
DEV void store_attention(Context& c, float (*merge)[2], float* sums, Accumulator& acc) {
  acc.sum += __shfl_xor_sync(~0u, acc.sum, 1);
  acc.sum += __shfl_xor_sync(~0u, acc.sum, 2);
  if (c.q == 0)
    *(float2*)merge[c.g] = make_float2(acc.top * (rsqrtf((float)HEAD_DIM) * LOG2E), acc.sum);
  if (c.q >= GROUP / 2) return;
  float4* to = (float4*)sums + c.g * (GROUP / 2) + c.q;
#pragma unroll
  for (int i = 0; i < TILES_OUT; i++)
    to[i * 8 * (GROUP / 2)] = make_float4(acc.out[i][0], acc.out[i][1], acc.out[i][2], acc.out[i][3]);
}
DEV void store_attention(Context& c, int place, Accumulator& acc) {
  store_attention(c, c.s.merge[c.part_parity][place], attention_sums(c) + place * GROUP_DIM, acc);
}
// Of one of a row's sums: the maximum and the sum of head 2q, then of head 2q + 1; and one piece of it.
DEV float4 merge_of(const float (*merge)[8][2], int w, int count, int q) {
  return w < count ? *(const float4*)merge[w][2 * q] : make_float4(-1e30f, 0.f, -1e30f, 0.f);
}
DEV float4 piece_of(const float4* part, int w, int count) {
  return w < count ? part[w * ROW_PARTS] : make_float4(0.f, 0.f, 0.f, 0.f);
}
// Joins MOST sums of a row in their order and publishes one piece of the split's output, and of its log-sums. `load(w, m, x)` gives
// the maxima and sums of one, and its piece.
template <int MOST, class Load>
DEV void join_piece(Context& c, int row, int piece, Load load, int head, int split) {
  const int q = piece % (GROUP / 2), g = piece / (GROUP / 2) % 8, tile = piece / (GROUP / 2) / 8;
  float4 m[MOST], x[MOST];
  float top[2] = {-1e30f, -1e30f}, sum[2] = {}, out[4] = {};
#pragma unroll
  for (int w = 0; w < MOST; w++) {
    load(w, m[w], x[w]);
    top[0] = fmaxf(top[0], m[w].x);
    top[1] = fmaxf(top[1], m[w].z);
  }
#pragma unroll
  for (int w = 0; w < MOST; w++) {
    const float even = fast_exp2(m[w].x - top[0]), odd = fast_exp2(m[w].z - top[1]);
    sum[0] = fmaf(m[w].y, even, sum[0]);
    sum[1] = fmaf(m[w].w, odd, sum[1]);
    out[0] = fmaf(x[w].x, even, out[0]);
    out[1] = fmaf(x[w].y, odd, out[1]);
    out[2] = fmaf(x[w].z, even, out[2]);
    out[3] = fmaf(x[w].w, odd, out[3]);
  }
  const int at = head * SPLITS + split;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int h = 2 * q + e, word = W_PART + at * GROUP_DIM + h * HEAD_DIM + tile * 16 + g;
    const float scale = sum[e] > 0.f ? 1.f / sum[e] : 0.f;
    publish(c, row, word, __float_as_uint(out[e] * scale));
    publish(c, row, word + 8, __float_as_uint(out[2 + e] * scale));
    if (g == 0 && tile == 0)
      publish(c, row, W_LSE + at * GROUP + h, __float_as_uint(sum[e] > 0.f ? top[e] + __log2f(sum[e]) : -1e30f));
  }
}
// The same of `count` sums, at most MOST, that `store_attention` left.
template <int MOST>
DEV void publish_piece(Context& c, int row, int piece, const float (*merge)[8][2], const float* sums, int count, int head, int split) {
  const float4* part = (const float4*)sums + piece;
  auto load = [&](int w, float4& m, float4& x) {
    m = merge_of(merge, w, count, piece % (GROUP / 2));
    x = piece_of(part, w, count);
  };
  join_piece<MOST>(c, row, piece, load, head, split);
}
// Joins the warps' sums of rows first to last and publishes the split's output and log-sum of each.
DEV void publish_splits(Context& c, int first, int last, int head, int split) {
  const Control& k = c.s.control;
  block_sync();
#pragma unroll 1
  for (int i = c.thread; i < (last + 1 - first) * ROW_PARTS; i += THREADS) {
    const int row = first + i / ROW_PARTS, place = k.place[row];
    publish_piece<WARPS>(c, row, i % ROW_PARTS, &c.s.merge[c.part_parity][place], attention_sums(c) + place * GROUP_DIM,
                         min(k.first_unit[row + 1] - k.first_unit[row], WARPS), head, split);
  }
  c.part_parity ^= 1;
}

struct Ahead {      // what attention has under way for later layers
  u32 unit;         // the layer's first unit of all units of the step
  HeadNorms norms;  // of the next layer
};
DEV void load_query(Context& c, int row, uint4 (&query)[KEY_LOADS]) {
#pragma unroll
  for (int i = 0; i < KEY_LOADS; i++) {
    const int d = i / 2 * 64 + (2 * c.q + i % 2) * 8;
    query[i] = c.g < GROUP ? *(const uint4*)&c.s.query[row][c.g * HEAD_DIM + d] : make_uint4(0, 0, 0, 0);
  }
}
// The first of a row's units that are this warp's. Every eighth of all units of the step is, so that a place of the ring is always
// read by the same warp. One that waits for a unit has then read the one before it in that place; barriers tell even rounds of the
// ring from odd ones, and nothing more.
DEV int first_of(Context& c, int row, u32 layer_unit) {
  static_assert(UNITS % WARPS == 0, "a place of the ring belongs to one warp");
  return (c.warp - layer_unit - c.s.control.first_unit[row]) % WARPS;
}
// This warp's sums of COUNT rows of which it has one unit each, left for `publish_splits`.
template <int COUNT>
DEV void attend_short(Context& c, const int (&rows)[COUNT], u32 layer_unit) {
  const Control& k = c.s.control;
  uint4 query[COUNT][KEY_LOADS];
  Accumulator acc[COUNT] = {};
  Unit units[COUNT];
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int row = rows[n], mine = first_of(c, row, layer_unit);
    load_query(c, row, query[n]);
    units[n] = {row, k.begin[row] + mine * UNIT_TOKENS, layer_unit + k.first_unit[row] + mine};
  }
  attend<COUNT, true>(c, query, units, acc);
#pragma unroll
  for (int n = 0; n < COUNT; n++) store_attention(c, k.place[rows[n]] + first_of(c, rows[n], layer_unit), acc[n]);
}
// The same for a row of any length.
DEV void attend_row(Context& c, int row, u32 layer_unit) {
  const Control& k = c.s.control;
  const int units = k.first_unit[row + 1] - k.first_unit[row], mine = first_of(c, row, layer_unit);
  if (mine >= units) return;
  uint4 query[1][KEY_LOADS];
  load_query(c, row, query[0]);
  Accumulator acc[1] = {};
  acc[0].top = -1e30f;
#pragma unroll 1
  for (int unit = mine; unit < units; unit += WARPS) {
    const Unit now[1] = {{row, k.begin[row] + unit * UNIT_TOKENS, layer_unit + k.first_unit[row] + unit}};
    attend<1, false>(c, query, now, acc);
  }
  store_attention(c, k.place[row] + mine, acc[0]);
}
// All rows. Of rows of which a warp has one unit, two go side by side where the ring holds both.
DEV void attend_rows(Context& c, Stream& f, int layer, int head, int split, u32 layer_unit) {
  constexpr bool PAIRS = UNITS >= 2 * WARPS && HEAD_DIM == 64;
  const Control& k = c.s.control;
  int joined = 0, waiting = -1;
#pragma unroll 1
  for (int row = 0; row < c.rows; row++) {
    const int units = k.first_unit[row + 1] - k.first_unit[row];
    const bool join = k.joined >> row & 1, brief = PAIRS && units <= WARPS;
    if (brief && first_of(c, row, layer_unit) < units) {
      if (waiting >= 0) {
        const int both[2] = {waiting, row};
        attend_short(c, both, layer_unit);
        waiting = -1;
      } else {
        waiting = row;
      }
    }
    if (waiting >= 0 && (join || !brief)) {
      attend_row(c, waiting, layer_unit);
      waiting = -1;
    }
    if (!brief) attend_row(c, row, layer_unit);
    stamp(c, layer, 12);
    pump(c, f);
    if (join) {
      publish_splits(c, joined, row, head, split);
      joined = row + 1;
    }
    stamp(c, layer, 13);
  }
}
DEV void attention(Context& c, Stream& f, int layer, Ahead& ahead) {
  const Control& k = c.s.control;
  const int head = c.block / SPLITS, split = c.block % SPLITS;
  if constexpr (BY_ROWS) load_head_norms(c, layer, ahead.norms);
  prepare_heads(c, f, ahead.norms, head, (u8*)k.pools[layer][0], (u8*)k.pools[layer][1]);
  block_sync();
  stamp(c, layer, 10);
  if (!BY_ROWS && layer + 1 < LAYERS) load_head_norms(c, layer + 1, ahead.norms);
  attend_rows(c, f, layer, head, split, ahead.unit);
  ahead.unit += k.first_unit[c.rows];
  stamp(c, layer, 11);
}
