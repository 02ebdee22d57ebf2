// Attention of three to eight rows of short contexts: a warp has a row to itself, from its heads to its split's output, and waits
// for no other warp in between. Which warp makes a partial sum is free: each is of one unit, as it is with eight warps for a row,
// and they are joined in the same order. With LONG_ROWS a row may have twice the units that there is room for: its first sums
// then wait in registers.
// A warp keeps two units in registers. What has been loaded into them makes room in the ring, so that most of a layer's units are
// here, or on their way, before the queries are.
#pragma once
#include "attention.cuh"

struct Taken {
  uint4 key[1][2][KEY_LOADS], value[1][TILES_OUT];
};
// Gives registers a value, or what is in them would be kept from layer to layer.
DEV void define(Taken& t) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++) define(t.key[0][j][i]);
#pragma unroll
  for (int i = 0; i < TILES_OUT; i++) define(t.value[0][i]);
}
DEV Unit own_unit(Context& c, int layer, int unit) {
  const Control& k = c.s.control;
  const int row = c.warp, units = k.first_unit[row + 1] - k.first_unit[row];
  return {row, k.begin[row] + unit * UNIT_TOKENS, own_index(c.p, layer, row, unit, units)};
}
// Loads a unit into registers and gives its place in the ring back.
DEV void take_unit(Context& c, const Unit& unit, Taken& t) {
  u32 keys[2], values, seen[1] = {0};
  find_unit(c, unit, keys, values);
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++) t.key[0][j][i] = load_shared((keys[j] ^ i % 2 * 16) + i / 2 * PANEL);
#pragma unroll
  for (int i = 0; i < TILES_OUT; i++) t.value[0][i] = load_transposed((values ^ i % 4 * 32) + i / 4 * PANEL);
#pragma unroll
  for (int i = 0; i < TILES_OUT; i++) seen[0] ^= t.value[0][i].w;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++) seen[0] ^= t.key[0][j][i].w;
  const Unit units[1] = {unit};
  give_back<1>(c, units, seen);
}
// Whether a unit can be taken before this step's keys and values are known: it is there, and all of it was in the cache.
DEV bool known(Context& c, const Unit& unit, bool there) {
  return there && c.s.control.cached[unit.row] >= unit.base + UNIT_TOKENS &&
         __all_sync(~0u, barrier_test(shared_address(&c.s.unit_full[unit.index % UNITS]), unit.index / UNITS & 1));
}
// Where a unit's sums are left: those of a row's later units where earlier ones have been.
DEV int room_of(int unit) { return LONG_ROWS ? (u32)unit % ROW_ROOM : unit; }
DEV float (*own_merge(Context& c, int unit))[8][2] { return &c.s.merge[0][0] + c.warp * ROW_ROOM + room_of(unit); }
DEV float* own_sums(Context& c, int unit) { return c.s.part[0] + (c.warp * ROW_ROOM + room_of(unit)) * GROUP_DIM; }
// `middle()` is done when there is room for another unit's keys.
template <class Middle>
DEV void attend_taken(Context& c, const Taken& t, const Unit& unit, int number, Middle middle) {
  Accumulator acc[1] = {};
  const Unit units[1] = {unit};
  u32 weight[1][2];
  uint4 query[1][KEY_LOADS];
  load_query(c, unit.row, query[0]);
  sum_units<1, true>(c, query, units, t.key, t.value, acc, weight, middle);
  store_attention(c, own_merge(c, number)[0], own_sums(c, number), acc[0]);
}
// Heads of this warp's row; of key and value only where somebody in this block reads them. `idle()` is done between polls.
template <class Idle>
DEV void prepare_row(Context& c, const HeadNorms& norms, bool fresh, int head, u8* k_pool, u8* v_pool, Idle idle) {
  const u32* words = c.now + c.warp * ROW_WORDS + W_QKV + head * HEAD_ROWS + c.lane;
  u32 coming[GROUP + 2][EACH], polls = 0;
  pause(c, 2, idle);
  while (true) {
    u32 top = 0;
#pragma unroll
    for (int part = 0; part < GROUP + 2; part++)
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        coming[part][e] = part < GROUP || fresh ? load_exchange_word(words + part * HEAD_DIM + e * 32) : 0;
      }
    idle();
#pragma unroll
    for (int part = 0; part < GROUP + 2; part++)
#pragma unroll
      for (int e = 0; e < EACH; e++) top = max(top, coming[part][e]);
    if (!__any_sync(~0u, top == EMPTY) || !__all_sync(~0u, may_wait(c, polls, 2))) break;
  }
  float x[GROUP + 2][EACH], square[GROUP + 2] = {};
#pragma unroll
  for (int part = 0; part < GROUP + 2; part++)
#pragma unroll
    for (int e = 0; e < EACH; e++) x[part][e] = __uint_as_float(coming[part][e]);
  if constexpr (QK_NORM) square_heads<GROUP + 2>(x, square);  // each sum waits for the others' instructions, not for its own
#pragma unroll
  for (int part = 0; part < GROUP + 2; part++)
    if (part < GROUP || fresh) finish_head(c, norms, c.warp, part, x[part], square[part], head, k_pool, v_pool);
}
// Joins the sums of this warp's row and publishes them.
DEV void publish_row(Context& c, int count, int head, int split) {
  static_assert(ROW_PARTS % 32 == 0, "");
  __syncwarp();
#pragma unroll
  for (int i = 0; i < ROW_PARTS / 32; i++)
    publish_piece<ROW_ROOM>(c, c.warp, i * 32 + c.lane, own_merge(c, 0), own_sums(c, 0), count, head, split);
}
// The first ROW_ROOM sums of a row with more: the pieces that a lane joins, and the maxima and sums of all, a number a lane.
struct Earlier {
  float4 piece[ROW_PARTS / 32][ROW_ROOM];
  float number;
};
// Takes them out of shared memory, where there is room for as many again.
DEV void take_sums(Context& c, Earlier& earlier) {
  static_assert(2 * GROUP * ROW_ROOM <= 32 && ROW_ROOM % 2 == 0, "");
  const int unit = c.lane / (2 * GROUP) % ROW_ROOM;
  __syncwarp();
  earlier.number = (&own_merge(c, unit)[0][0][0])[c.lane % (2 * GROUP)];
#pragma unroll
  for (int i = 0; i < ROW_PARTS / 32; i++)
#pragma unroll
    for (int w = 0; w < ROW_ROOM; w++) earlier.piece[i][w] = ((const float4*)own_sums(c, w))[i * 32 + c.lane];
  __syncwarp();
}
// Joins a row's sums, those that were taken first, and publishes them: the operations of `publish_row`, in their order.
DEV void publish_long_row(Context& c, const Earlier& earlier, int count, int head, int split) {
  const int q = c.lane % (GROUP / 2), later = count - ROW_ROOM;
  float4 merge[2 * ROW_ROOM];
  __syncwarp();
#pragma unroll
  for (int w = 0; w < ROW_ROOM; w++) {
    const int from = 2 * (w * GROUP + 2 * q);
    merge[w] = make_float4(__shfl_sync(~0u, earlier.number, from), __shfl_sync(~0u, earlier.number, from + 1),
                           __shfl_sync(~0u, earlier.number, from + 2), __shfl_sync(~0u, earlier.number, from + 3));
    merge[ROW_ROOM + w] = merge_of(own_merge(c, 0), w, later, q);
  }
#pragma unroll
  for (int i = 0; i < ROW_PARTS / 32; i++) {
    const float4* part = (const float4*)own_sums(c, 0) + i * 32 + c.lane;
    auto load = [&](int w, float4& m, float4& x) {
      m = merge[w];
      x = w < ROW_ROOM ? earlier.piece[i][w % ROW_ROOM] : piece_of(part, w - ROW_ROOM, later);
    };
    join_piece<2 * ROW_ROOM>(c, c.warp, i * 32 + c.lane, load, head, split);
  }
}
struct Early {
  Taken unit;
  bool there;
};
// Takes this warp's first unit of a layer, if it has come, and makes room for the second.
DEV void take_first(Context& c, int layer, Early& first) {
  const Control& k = c.s.control;
  define(first.unit);
  first.there = false;
  if (c.warp >= c.rows) return;
  const Unit unit = own_unit(c, layer, 0);
  first.there = known(c, unit, k.first_unit[c.warp + 1] > k.first_unit[c.warp]);
  if (first.there) take_unit(c, unit, first.unit);
}
DEV void attention_by_rows(Context& c, Stream& f, int layer, Early& first) {
  const Control& k = c.s.control;
  const int head = c.block / SPLITS, split = c.block % SPLITS, row = c.warp;
  const bool mine = row < c.rows;
  const int units = mine ? k.first_unit[row + 1] - k.first_unit[row] : 0;
  const bool fresh = k.shared_requests || (k.own[row] >= k.begin[row] && k.own[row] < k.end[row]);
  HeadNorms norms;
  load_head_norms(c, layer, norms);
  Taken b, &a = first.unit;
  define(b);
  bool &has_a = first.there, has_b = false;
  auto unit = [&](int number) { return own_unit(c, layer, number); };
  auto take_early = [&] {
    if (!has_a && known(c, unit(0), units > 0)) {
      take_unit(c, unit(0), a);
      has_a = true;
    } else if (has_a && !has_b && known(c, unit(1), units > 1)) {
      take_unit(c, unit(1), b);
      has_b = true;
    }
  };
  block_sync();  // the sums of q, k and v have been read: these lie in their place
  if (mine)
    prepare_row(c, norms, fresh, head, (u8*)k.pools[layer][0], (u8*)k.pools[layer][1], [&] {
      pump(c, f);
      take_early();
    });
  if (k.shared_requests) block_sync();
  else __syncwarp();
  stamp(c, layer, 10);
  if (mine) {
    auto take = [&](int number, Taken& t) {
      if (number >= units) return;
      wait_unit(c, unit(number).index);
      take_unit(c, unit(number), t);
    };
    if (!has_a) take(0, a);
#pragma unroll 1
    for (int number = 0; number < (LONG_ROWS ? min(units, ROW_ROOM) : units); number += 2) {
      attend_taken(c, a, unit(number), number, [&] {
        if (!has_b) take(number + 1, b);
      });
      has_b = false;
      if (number + 1 < units) attend_taken(c, b, unit(number + 1), number + 1, [&] { take(number + 2, a); });
      stamp(c, layer, 12);
      pump(c, f);
    }
    if (LONG_ROWS && units > ROW_ROOM) {
      // The first of the later units is in registers. With the earlier sums there is room for one at a time.
      Earlier earlier;
      take_sums(c, earlier);
#pragma unroll 1
      for (int number = ROW_ROOM;;) {
        attend_taken(c, a, unit(number), number, nothing);
        stamp(c, layer, 12);
        if (++number == units) break;
        wait_unit(c, unit(number).index);
        take_unit(c, unit(number), a);
        pump(c, f);
      }
      publish_long_row(c, earlier, units, head, split);
    } else {
      publish_row(c, units, head, split);
    }
    stamp(c, layer, 13);
  }
  block_sync();  // the output projection's sums will lie where these are
  stamp(c, layer, 11);
}
