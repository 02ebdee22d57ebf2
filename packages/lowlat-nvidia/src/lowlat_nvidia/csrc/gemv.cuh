// Weight streaming, waiting for published words, and the matrix-vector product of one stage.
// Weights are the operand of 16 rows of the matrix instruction, the rows of the step the operand of 8 columns. Lane (g, q) =
// (lane / 4, lane % 4) of a consumer warp holds inputs of row g and weights of outputs g and g + 8 of a tile.
#pragma once
#include "layout.cuh"

// Partial sums of up to 8 tiles. Attention's warps leave theirs there too; with one row, where that would be the most of it, once
// and not twice. What is folded lies behind.
constexpr int PART_SUMS = ROWS > 1 ? WARPS * GROUP_DIM : WARPS * 8 * 8;
constexpr int PART_FLOATS = ROWS > 1 ? WARPS * 8 * ROWS * 8 : PART_SUMS + (FOLD ? HIDDEN / 2 : 0);
constexpr int PARTS = ROWS > 1 ? PART_FLOATS / GROUP_DIM : WARPS;  // warps' sums of rows that attention joins at once
// Keys, then values, of a unit of the cache: panels of 16 tokens x 64 elements, as the copy engine writes them (see swizzled).
constexpr int UNIT_TOKENS = 16, PANEL = UNIT_TOKENS * 128, UNIT = 2 * HEAD_DIM / 64 * PANEL;
// Of three to eight rows each may have a warp to itself, where all have few units: ROW_UNITS at most.
constexpr bool BY_ROWS = ROW_WARPS && ROWS > 1;
constexpr int ROW_ROOM = 2 * PARTS / WARPS;  // of them, whose sums there is room for in both halves
constexpr bool LONG_ROWS = BY_ROWS && ROW_UNITS > ROW_ROOM;
static_assert(!BY_ROWS || (ROW_UNITS >= ROW_ROOM && ROW_UNITS <= 2 * ROW_ROOM), "a row's earlier sums wait in registers once");
static_assert(PARTS >= WARPS && PART_FLOATS >= WARPS * 8 * ROWS * 8, "");
struct Control {
  int begin[ROWS], end[ROWS];  // tokens of each row that this block's split covers
  int cached[ROWS];                // tokens before this are in the cache, later ones come from this step
  int first[ROWS];                 // first row of the same request
  int first_unit[ROWS + 1];        // of a layer's units of the cache; the last is their number
  int place[ROWS];                 // of the row's warps among those that are joined at once
  u32 joined;                          // bit r: warps are joined after row r
  int own[ROWS], own_slot[ROWS];  // the row's own token and its cache slot
  int token[ROWS];                    // its id
  bool by_rows, shared_requests;      // each row has a warp; some are of one request
  const int* pages[ROWS];
  const u8* pools[LAYERS][2];          // K and V
  float rotary[ROWS][HEAD_DIM];    // cosine, sine
};
struct __align__(16) Shared {
  float part[2][PART_FLOATS];         // [warp][tile][row][output]; attention merges heads here too
  float joined[ROWS > 1 ? 4 : WARPS * GROUP_DIM];  // attention of one row: its warps' sums
  float square[2][WARPS][ROWS];   // partial sums of squares
  float merge[2][PARTS][8][2];        // attention: maximum and sum of each of a row's warps and head
  alignas(16) Control control;
  alignas(16) unsigned short query[ROWS][GROUP_DIM];    // this step's rotated queries, bfloat16
  alignas(128) u8 fresh[HEAD_DIM / 64 * PANEL];             // this step's keys, as tokens 0 to 7 of panels, and values after them
  alignas(4) unsigned short norms[2 * LAYERS + 1][BLOCK_HIDDEN];  // of this block's outputs; unread where one row is folded
#if QKV_BIAS
  unsigned short biases[LAYERS][BLOCK_QKV];
#endif
  u64 full[WARPS * RING_PAGES], unit_full[UNITS], unit_empty[UNITS];
  volatile int progress;  // layers whose gate and up projection has begun
  u32 stop;               // an earlier step failed, and nobody has reset it
};
constexpr int UNITS_OFFSET = (sizeof(Shared) + 1023) / 1024 * 1024;
constexpr int RING_OFFSET = UNITS_OFFSET + UNITS * UNIT;
static_assert(RING_OFFSET + WARPS * RING_PAGES * PAGE <= SHARED_BYTES, "the plan counts shared memory");

struct Context {
  const Params& p;
  Shared& s;
  u32* now;    // exchange words of this step
  int block, warp, lane, thread, g, q, rows;
  u32 ring, full;
  const u8* weights;  // the next page to copy
  u64 policy;
  int pages;          // copied so far
  u32 units, zero;
  int copies;  // rows of the buffers that hold the same published row: few rows have several, for fewer readers each
  int slot;
  u32 phase;
  int part_parity, square_parity;
  bool failed;
  bool busy;  // units of the next layer are on their way when attention ends
};

// Notes the time at which this block passed a point of a layer.
DEV void stamp(Context& c, int layer, int index) {
#if STAMPS > 0
  if (c.thread == 0) c.p.stamps[((long)c.block * (LAYERS + 1) + layer) * STAMPS + index] = clock_now();
#endif
}
// Notes cycles and nanoseconds at which this block began (2) or ended (4), behind the stamps of the last layer.
DEV void stamp_clocks(const Params& p, int index) {
#if STAMPS > 0
  if (threadIdx.x != 0) return;
  long long* to = p.stamps + ((long)blockIdx.x * (LAYERS + 1) + LAYERS) * STAMPS + index;
  to[0] = clock_now();
  to[1] = nanoseconds_now();
#endif
}

// Hides where the indices come from. Without it the compiler keeps every address of every stage in a register for all
// layers, and spills.
DEV void recompute(Context& c) {
  forget(c.thread); forget(c.block); forget(c.warp); forget(c.lane);
  c.g = c.lane / 4;
  c.q = c.lane % 4;
}
// Counts a fruitless poll. False once somebody, here or elsewhere, has missed the deadline: the caller goes on with
// what it has, the step ends quickly, and the host finds the error word, which tells block and stage.
DEV bool may_wait(Context& c, u32& polls, int stage) {
  if ((++polls & 255u) == 0) {
    if (polls > c.p.spin_limit) store_exchange(c.p.state + 1, 1u + c.block * 16 + stage);
    if (load_exchange_word(c.p.state + 1)) c.failed = true;
  }
  return !c.failed;
}
// Waits for a copy into this block's shared memory. Copies complete whatever other blocks do, so this goes on after a
// missed deadline elsewhere; but it ends too. A poll of another block's word takes about 512 cycles.
DEV void wait_barrier(Context& c, u32 barrier, u32 phase, int stage) {
  if (barrier_done(barrier, phase)) return;
  const long long limit = (c.failed ? min(c.p.spin_limit, 4096u) : c.p.spin_limit) * 512ll, start = clock_now();
  while (!barrier_done(barrier, phase))
    if (clock_now() - start > limit) {
      store_exchange(c.p.state + 1, 1u + c.block * 16 + stage);
      c.failed = true;
      return;
    }
}
DEV u32 greatest(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

DEV u32 least(uint4 v) { return min(min(v.x, v.y), min(v.z, v.w)); }
DEV void nothing() {}
// Before a stage's inputs are polled for the first time. Polls of what cannot be there yet hold up what is published, most of all
// while units of the next layer come: an answer then takes as long as those, and the one that tells comes that much later.
template <class Idle>
DEV void pause(Context& c, int stage, Idle idle) {
  const int quiet = (int)((u64)QUIET >> 8 * stage & 255) * 100, busy = (int)((u64)BUSY >> 8 * stage & 255) * 100;
  if (quiet == 0 && busy == 0) return;
  const int cycles = c.busy ? busy : quiet;
  const long long start = clock_now();
  while (__any_sync(~0u, clock_now() - start < cycles)) idle();  // lanes may read the clock apart
}
// Whether all of a stage's inputs are polled from the start, without one vector of them first.
DEV constexpr bool whole(int stage) { return WHOLE >> stage & 1; }
// Waits for the words that lanes below COUNT name.
template <int COUNT, class Idle>
DEV void watch_each(Context& c, const u32* at, int stage, Idle idle) {
  u32 polls = 0;
  bool waiting = true;
  while (waiting && __any_sync(~0u, c.lane < COUNT && load_exchange_word(at) == EMPTY)) {
    idle();
    waiting = __all_sync(~0u, may_wait(c, polls, stage));
  }
}
// Loads N published vectors, `step` words apart, and one more from `extra_at`, which is published last; inactive lanes
// get zeros. All lanes of the warp call it; `idle()` is done between polls. Without WATCH there is no
// such vector, and all of it is loaded at once.
template <int N, bool WATCH = true, class Idle>
DEV void gather(Context& c, const u32* base, int step, const u32* extra_at, bool active, uint4 (&v)[N], uint4& extra,
                int stage, Idle idle) {
  u32 polls = 0;
  const uint4 none = make_uint4(0, 0, 0, 0);
  // Polling all of several rows crowds the L2, and what is published queues behind the polls: one vector of the last row tells
  // that the data is about to be there.
  const bool last = c.g == c.rows - 1;
  bool waiting = WATCH && !whole(stage);
  while (waiting && __any_sync(~0u, last && greatest(load_exchange(extra_at)) == EMPTY)) {
    idle();
    waiting = __all_sync(~0u, may_wait(c, polls, stage));
  }
  while (true) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = active ? load_exchange(base + i * step) : none;
    extra = WATCH && active ? load_exchange(extra_at) : none;
    u32 top = greatest(extra);
#pragma unroll
    for (int i = 0; i < N; i++) top = max(top, greatest(v[i]));
    if (!__any_sync(~0u, top == EMPTY)) break;
    if (!__all_sync(~0u, may_wait(c, polls, stage))) break;
    if (whole(stage)) idle();
  }
}
DEV void publish(Context& c, int row, int word, u32 value) {
  u32* at = c.now + row * ROW_WORDS + word;
  value = planted(c.p, (at - c.p.exchange) % STEP_WORDS, value);
  store_exchange(at, value == EMPTY ? 0x7fffffffu : value);
}
// For words that all blocks read.
DEV void publish_to_all(Context& c, int row, int word, u32 value) {
#pragma unroll 1
  for (int copy = 0; copy < c.copies; copy++) publish(c, row + copy * c.rows, word, value);
}
// The row of the buffers that this block reads.
DEV int copy_of(Context& c, int row) { return row + (c.block & (c.copies - 1)) * c.rows; }

// The address, once `seen` has arrived: c.zero is 0, but the compiler does not know. Giving shared memory back before
// its loads have returned lets the next copy overtake them.
DEV u32 after(Context& c, u32 seen, u32 address) { return address + min(seen, c.zero); }

// ---- weights

// Starts the copy of this warp's next page.
DEV void fill_page(Context& c, u32 to, u32 full) {
  if (c.pages == end_page(c.p)) return;
  if (c.lane == 0) {
    barrier_expect(full, PAGE);
    copy_bulk(to, c.weights, PAGE, full, c.policy);
  }
  c.pages++;
  c.weights += (long)BLOCKS * WARPS * PAGE;
}
DEV void take_page(Context& c, uint4 (&w)[PAGE_FRAGMENTS]) {
  const u32 page = c.ring + c.slot * PAGE, full = c.full + c.slot * 8;
  wait_barrier(c, full, c.phase, 8);
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < PAGE_FRAGMENTS; i++) w[i] = load_shared(page + c.lane * 16 + i * FRAGMENT);
#pragma unroll
  for (int i = 0; i < PAGE_FRAGMENTS; i++) seen ^= w[i].w;
  __syncwarp();
  fill_page(c, after(c, seen, page), full);
  if (++c.slot == RING_PAGES) { c.slot = 0; c.phase ^= 1; }
}
// d += this warp's inputs times the logits' next 16 outputs. A fragment is 16 outputs x 16 inputs, the operand of one
// matrix instruction. Four chains hide the latency of the instruction. Lane (g, q) gets outputs g and g + 8 of rows 2q, 2q + 1.
DEV void multiply_wide(Context& c, const uint4 (&a)[K_HIDDEN], float (&d)[4]) {
  float chain[4][4] = {};
#pragma unroll
  for (int page = 0; page < 2 * K_HIDDEN / PAGE_FRAGMENTS; page++) {
    uint4 w[PAGE_FRAGMENTS];
    take_page(c, w);
#pragma unroll
    for (int i = 0; i < PAGE_FRAGMENTS; i++) {
      const uint4 x = a[(page * PAGE_FRAGMENTS + i) / 2];
      mma(chain[i % 4], w[i], i % 2 ? x.z : x.x, i % 2 ? x.w : x.y);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; j++) d[j] += (chain[0][j] + chain[1][j]) + (chain[2][j] + chain[3][j]);
}
DEV float* part_now(Context& c) { return c.s.part[c.part_parity]; }
// Of one row there are stages between two uses of it.
DEV float* attention_sums(Context& c) { return ROWS > 1 ? part_now(c) : c.s.joined; }
// Partial sums of 8 outputs, of which a lane has output g of rows 2q and 2q + 1.
DEV void store_partial(Context& c, int tile, float first, float second) {
  float* at = part_now(c) + ((c.warp * 8 + tile) * ROWS + 2 * c.q) * 8 + c.g;
  if (2 * c.q < c.rows) at[0] = first;
  if (2 * c.q + 1 < c.rows) at[8] = second;
}
// Sum over the warps, in their order, of output n of a row.
DEV float sum_partials(const float* part, int tile, int row, int n) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += part[((w * 8 + tile) * ROWS + row) * 8 + n];
  return sum;
}
// Fragments of a tile that are multiplied at once; their inputs stay in registers.
template <int K>
constexpr int chunk_of = K <= 16 ? K : (K % 16 == 0 ? 16 : (K % 12 == 0 ? 12 : 8));

// ---- inputs

DEV void store_square(Context& c, float square) {
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  c.square_parity ^= 1;
  if (c.q == 0 && c.g < ROWS) c.s.square[c.square_parity][c.warp][c.g] = square;
}
// 1 / root mean square of a row, from what the warps stored.
DEV float inverse_rms(Context& c, int row) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += c.s.square[c.square_parity][w][row];
  return rsqrtf(sum * (1.f / HIDDEN) + c.p.eps);
}
// Inputs that were published as bfloat16 pairs: attention output or activations.
template <int K, int CHUNK, class Idle>
DEV void load_pairs(Context& c, int word, int chunk, uint4 (&a)[CHUNK], int stage, Idle idle) {
  const u32* x = c.now + copy_of(c, c.g) * ROW_WORDS + word + ((c.warp * K + chunk * CHUNK) * 32 + c.q * 8) / 2;
  uint4 last;
  if (chunk == 0) pause(c, stage, idle);
  if constexpr (WATCH_EACH) {
    // The last word of every block whose outputs these are, in the row that it publishes last: when these are there, so is
    // everything else, as a rule, and is loaded once.
    constexpr int SENDERS = BLOCKS / WARPS, SENT = K * 16 / SENDERS;
    if (chunk == 0) {
      const u32* row = c.now + copy_of(c, c.rows - 1) * ROW_WORDS + word;
      watch_each<SENDERS>(c, row + (c.warp * SENDERS + c.lane % SENDERS + 1) * SENT - 1, stage, idle);
    }
    gather<CHUNK, false>(c, x, 16, x, c.g < c.rows, a, last, stage, idle);
    return;
  }
  gather<CHUNK>(c, x, 16, x + (CHUNK - 1) * 16, c.g < c.rows, a, last, stage, idle);
}
// The residual times its norm, with the blocks' sums of squares (the 1 / rms is applied to the products).
template <class Idle>
DEV void load_normed(Context& c, const u32* words, int word, int square_word, uint4 (&a)[K_HIDDEN], int stage, Idle idle) {
  const u32* row = words + copy_of(c, c.g) * ROW_WORDS;
  const u32* x = row + word + (c.warp * K_HIDDEN * 32 + c.q * 8) / 2;
  uint4 s;
  constexpr int LANES = BLOCKS / WARPS / 4;  // lanes that share a row's sums of squares: 4, or 1 of a small grid
  static_assert(LANES == 4 || LANES == 1, "");
  pause(c, stage, idle);
  gather<K_HIDDEN>(c, x, 16, row + square_word + c.warp * (BLOCKS / WARPS) + c.q % LANES * 4, c.g < c.rows, a, s, stage,
                   idle);
  const float sum = (__uint_as_float(s.x) + __uint_as_float(s.y)) + (__uint_as_float(s.z) + __uint_as_float(s.w));
  store_square(c, c.q < LANES ? sum : 0.f);
}
