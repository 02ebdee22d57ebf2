// Cached keys and values on their way into shared memory. 16 tokens of a row are a unit; units lie in one ring, in the order of
// layers, rows and tokens, and four warps that do nothing else fill it ahead of time: the cache does not depend on this step.
// Where the slots of 16 tokens follow each other, the tensor copy engine fetches keys with one instruction and values with another,
// and no load of this block waits for it. Otherwise, and where tokens are missing, 16 bytes are copied at a time.
#pragma once
#include "gemv.cuh"

constexpr int COPY_WARPS = COPY_THREADS / 32;
static_assert(UNITS % COPY_WARPS == 0, "a place of the ring is filled by one warp");

// Where 16 bytes of a token lie within its 128: neighbours of 8 tokens use different banks. The copy engine's own pattern.
DEV u32 swizzled(int token, int piece) { return (u32)((piece ^ (token & 7)) * 16); }

// The next unit to copy. What belongs to its row stays in registers; the page is looked up a unit ahead.
struct Cursor {
  int layer, row, unit;    // unit of the row in this block's split
  u32 index;               // of all units of the step
  int units, begin, limit; // of the row: units, first token, first token that is not in the cache
  const int* pages;
  int page;                // lanes 0 to 15: the page of the unit's token
};
DEV void enter_row(const Params& p, const Shared& s, Cursor& at) {
  const Control& k = s.control;
  at.units = k.first_unit[at.row + 1] - k.first_unit[at.row];
  at.begin = k.begin[at.row];
  at.limit = min(k.end[at.row], k.cached[at.row]);
  at.pages = k.pages[at.row];
}
// Goes on by some units; rows may have none, but not all rows.
DEV void advance(const Params& p, const Shared& s, Cursor& at, int units, int end, int lane) {
  at.unit += units;
  at.index += units;
  while (at.unit >= at.units && at.layer < end) {
    at.unit -= at.units;
    if (++at.row == rows_of(p)) { at.row = 0; at.layer++; }
    enter_row(p, s, at);
  }
  const int token = at.begin + at.unit * UNIT_TOKENS + lane;
  if (lane < UNIT_TOKENS && token < at.limit) at.page = __ldg(at.pages + (token >> p.page_shift));
}
// Of all units of a step, in the order of their places in the ring, where each row has a warp: every eighth is one row's.
DEV u32 own_index(const Params& p, int layer, int row, int unit, int units) {
  return (u32)((layer - first_layer(p)) * units + unit) * WARPS + row;
}
#if ROW_WARPS
// Goes on to the next unit of this copying warp's rows in turn: `warp`, and WARPS / 2 more.
DEV void advance_rows(const Params& p, const Shared& s, Cursor& at, int most, int warp, int end, int lane) {
  do {
    if (at.row == warp && warp + COPY_WARPS < rows_of(p)) {
      at.row = warp + COPY_WARPS;
    } else {
      at.row = warp;
      if (++at.unit >= most) { at.unit = 0; at.layer++; }
    }
    enter_row(p, s, at);
  } while (at.unit >= at.units && at.layer < end);
  at.index = own_index(p, at.layer, at.row, at.unit, at.units);
  const int token = at.begin + at.unit * UNIT_TOKENS + lane;
  if (lane < UNIT_TOKENS && token < at.limit) at.page = __ldg(at.pages + (token >> p.page_shift));
}
#endif
// Fills a unit with 16-byte copies; tokens that are not cached become zeros. PLAIN_COPIES does the same by loads and stores, and
// every lane says for itself that it has read a unit, for tools that know of no other way.
DEV void copy_pieces(const Params& p, u32 to, const u8* keys, const u8* values, long head, int where, u32 full, int lane) {
#pragma unroll 4
  for (int i = 0; i < UNIT_TOKENS * HEAD_DIM / 8 / 32; i++) {
    const int index = i * 32 + lane, t = index / (HEAD_DIM / 8), piece = index % (HEAD_DIM / 8);
    const int slot = __shfl_sync(~0u, where, t);
    const long from = ((slot < 0 ? 0 : slot) * p.slot_stride + head + piece * 8) * 2;
    const u32 at = to + piece / 8 * PANEL + t * 128 + swizzled(t, piece % 8);
#if PLAIN_COPIES
    const uint4 none = make_uint4(0, 0, 0, 0);
    store_shared(at, slot >= 0 ? load_stream(keys + from) : none);
    store_shared(at + UNIT / 2, slot >= 0 ? load_stream(values + from) : none);
  }
  barrier_arrive(full);
#else
    copy_async(at, keys + from, slot >= 0);
    copy_async(at + UNIT / 2, values + from, slot >= 0);
  }
  barrier_arrive_after_copies(full);
#endif
}
// Slots of the unit's tokens, in lanes 0 to 15; -1 where a token is not cached.
DEV int slots_of(const Params& p, const Cursor& at, int lane) {
  const int token = at.begin + at.unit * UNIT_TOKENS + lane;
  return token < at.limit ? (at.page << p.page_shift) + (token & ((1 << p.page_shift) - 1)) : -1;
}
// Whether one instruction fetches all of them, that of `first` being lane 0's.
DEV bool together(const Params& p, int where, int first, int lane) {
  return !PLAIN_COPIES && __all_sync(~0u, lane >= UNIT_TOKENS || (where >= 0 && where == first + lane)) && p.maps;
}
DEV void copy_unit(const Params& p, Shared& s, u32 units, const Cursor& at, int lane, u64 policy) {
  const u32 slot = at.index % UNITS, to = units + slot * UNIT, full = shared_address(&s.unit_full[slot]);
  const int head = blockIdx.x / SPLITS, where = slots_of(p, at, lane), first = __shfl_sync(~0u, where, 0);
  if (together(p, where, first, lane)) {
    if (lane == 0) {
      const u8* map = p.maps + at.layer * 2 * TENSOR_MAP;
      barrier_expect(full, UNIT);
      copy_tensor(to, map, first, head, full, policy);
      copy_tensor(to + UNIT / 2, map + TENSOR_MAP, first, head, full, policy);
    } else {
      barrier_arrive(full);
    }
  } else {
    forget(lane);  // or the addresses of all pieces stay in registers
    copy_pieces(p, to, s.control.pools[at.layer][0], s.control.pools[at.layer][1], head * p.head_stride, where, full, lane);
  }
}
// Brings a unit for which the ring has no room yet into the L2.
DEV void prefetch_unit(const Params& p, const Shared& s, const Cursor& at, int lane) {
  const int head = blockIdx.x / SPLITS, where = slots_of(p, at, lane), first = __shfl_sync(~0u, where, 0);
  if (!together(p, where, first, lane) || lane >= 2) return;
  prefetch_tensor(p.maps + (at.layer * 2 + lane) * TENSOR_MAP, first, head);
}
// Whether the unit that this copying warp asked for last is there, of two rows of a narrow model: with one row there is little
// to wait for, and more are late anyway.
DEV bool none_under_way(Shared& s, int rows, u32 index, int warp) {
  if (!NARROW || rows != 2 || index < warp + COPY_WARPS) return true;
  const u32 before = index - COPY_WARPS;
  return __all_sync(~0u, barrier_test(shared_address(&s.unit_full[before % UNITS]), before / UNITS & 1));
}
// The warps that compute wait at most once for every stage, and then go on: this is beyond all of their waits.
DEV bool too_late(const Params& p, long long since, int lane) {
  if (!__any_sync(~0u, clock_now() - since > p.spin_limit * 4096ll)) return false;
  if (lane == 0) store_exchange(p.state + 1, 1u + blockIdx.x * 16 + 10);
  return true;
}
#if ROW_WARPS
// The same where each row has a warp: units of two rows in turn.
DEV void copy_rows(const Params& p, Shared& s, u32 units, int warp, int lane) {
  static_assert(COPY_WARPS == WARPS / 2, "");
  const int* first = s.control.first_unit;
  auto units_of = [&](int row) { return row < rows_of(p) ? first[row + 1] - first[row] : 0; };
  const int most = max(units_of(warp), units_of(warp + COPY_WARPS)), end = runs(p, 2) && most ? end_layer(p) : 0;
  const u64 policy = read_once_policy();
  Cursor at = {first_layer(p), warp + COPY_WARPS, -1, 0};  // before the first
  if (at.layer < end) advance_rows(p, s, at, most, warp, end, lane);
  long long since = clock_now();
#pragma unroll 1
  while (at.layer < end) {
    if (__all_sync(~0u, barrier_test(shared_address(&s.unit_empty[at.index % UNITS]), (at.index / UNITS & 1) ^ 1))) {
      copy_unit(p, s, units, at, lane, policy);
      advance_rows(p, s, at, most, warp, end, lane);
      since = clock_now();
      continue;
    }
    if (too_late(p, since, lane)) break;
    __nanosleep(20);
  }
  copies_done();
}
#endif
// What a copying warp does: every fourth unit, as its place in the ring becomes empty.
DEV void copy_cache(const Params& p, Shared& s, u32 units, int warp, int lane) {
  const int rows = rows_of(p), layer_units = s.control.first_unit[rows], end = runs(p, 2) && layer_units ? end_layer(p) : 0;
  // One row of a short context: nothing is urgent, and the copies wait for the stage that streams most weights, where no
  // other block is waited for. They are two layers ahead. (Where the ring holds no two layers, waiting costs more than it saves.)
  const int lead = !PLAIN_COPIES && rows == 1 && 2 * layer_units <= UNITS ? 2 : LAYERS + 2;
  const bool short_rows = AHEAD > 0 && layer_units <= AHEAD + UNITS;
  const u64 policy = read_once_policy();
  Cursor at = {first_layer(p), 0, 0, 0};
  enter_row(p, s, at);
  advance(p, s, at, warp, end, lane);
  Cursor next = at;  // the next unit to bring into the L2
  long long since = clock_now();
#pragma unroll 1
  while (at.layer < end) {
    const u32 empty = shared_address(&s.unit_empty[at.index % UNITS]), phase = (at.index / UNITS & 1) ^ 1;
    if (__all_sync(~0u, s.progress > at.layer - lead) && __all_sync(~0u, barrier_test(empty, phase)) &&
        none_under_way(s, rows, at.index, warp)) {
      copy_unit(p, s, units, at, lane, policy);
      advance(p, s, at, COPY_WARPS, end, lane);
      since = clock_now();
      continue;
    }
    if (short_rows && next.layer < end && next.index < at.index + AHEAD && __all_sync(~0u, s.progress > next.layer - lead)) {
      if (next.index <= at.index) next = at;
      else prefetch_unit(p, s, next, lane);
      advance(p, s, next, COPY_WARPS, end, lane);
      continue;
    }
    if (too_late(p, since, lane)) break;
    __nanosleep(20);  // polling takes shared memory's time from the warps that compute
  }
  copies_done();
}
