// Weight streaming, waiting for published words, and the matrix-vector product of one stage.
// Lane (g, q) = (lane / 4, lane % 4) of a consumer warp holds inputs of row g and weights of output g of a tile.
#pragma once
#include "layout.cuh"

constexpr int PART_FLOATS = WARPS * 8 * MAX_ROWS * 8;  // partial sums of up to 8 tiles
struct Shared {
  float part[2][PART_FLOATS];         // [warp][tile][row][output]; attention merges heads here too
  float square[2][WARPS][MAX_ROWS];   // partial sums of squares
  float merge[2][WARPS][8][2];        // attention: maximum and sum of each warp and head
  u64 full[WARPS * RING_PAGES], empty[WARPS * RING_PAGES];
};
constexpr int RING_OFFSET = (sizeof(Shared) + 127) / 128 * 128;
constexpr int SHARED_BYTES = RING_OFFSET + WARPS * RING_PAGES * PAGE;

struct Context {
  const Params& p;
  Shared& s;
  u32* now;    // exchange words of this step
  int block, warp, lane, thread, g, q, rows;
  u32 ring, full, empty;
  int slot;
  u32 phase;
  int part_parity, square_parity;
  bool failed;
};

// Counts a fruitless poll. False once somebody, here or elsewhere, has missed the deadline: the caller goes on with
// what it has, the step ends quickly, and the host finds the error word.
DEV bool may_wait(Context& c, u32& polls, int stage) {
  if (c.failed) return false;
  polls++;
  if ((polls & 255u) == 0) {
    if (load_exchange_word(c.p.state + 1)) c.failed = true;
    if (polls > c.p.spin_limit) {
      c.failed = true;
      if (atomicCAS(c.p.state + 1, 0u, 1u) == 0u) { c.p.state[2] = c.block; c.p.state[3] = stage; }
    }
  }
  return !c.failed;
}
DEV bool is_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

// Loads N published vectors, vector i from word at(i) of base; inactive lanes get zeros. All lanes of the warp call it.
template <int N, class At>
DEV void gather(Context& c, const u32* base, At at, bool active, uint4 (&v)[N], int stage) {
  u32 polls = 0;
  // One vector tells that the data is about to be there; polling all of them would crowd the L2.
  while (true) {
    v[N - 1] = active ? load_exchange(base + at(N - 1)) : make_uint4(0, 0, 0, 0);
    if (__all_sync(~0u, !is_empty(v[N - 1]))) break;
    if (!__all_sync(~0u, may_wait(c, polls, stage))) break;
  }
#pragma unroll
  for (int i = 0; i < N - 1; i++) v[i] = active ? load_exchange(base + at(i)) : make_uint4(0, 0, 0, 0);
  while (true) {
    bool missing = false;
#pragma unroll
    for (int i = 0; i < N - 1; i++) missing |= is_empty(v[i]);
    if (!__any_sync(~0u, missing)) break;
    if (!__all_sync(~0u, may_wait(c, polls, stage))) break;
#pragma unroll
    for (int i = 0; i < N - 1; i++)
      if (is_empty(v[i])) v[i] = load_exchange(base + at(i));
  }
}
DEV u32 gather_word(Context& c, const u32* at, int stage) {
  u32 polls = 0, v;
  while ((v = load_exchange_word(at)) == EMPTY && may_wait(c, polls, stage)) {}
  return v;
}
DEV void publish(Context& c, int word, u32 value) { store_exchange(c.now + word, value == EMPTY ? 0x7fffffffu : value); }

// ---- weights

DEV void take_page(Context& c, uint4 (&w)[PAGE_FRAGMENTS]) {
  while (!barrier_done(c.full + c.slot * 8, c.phase)) {}  // ends: the copy was issued, and copies complete
  u32 at = c.ring + c.slot * PAGE + c.lane * 16;
#pragma unroll
  for (int i = 0; i < PAGE_FRAGMENTS; i++) w[i] = load_shared(at + i * FRAGMENT);
  __syncwarp();
  if (c.lane == 0) barrier_arrive(c.empty + c.slot * 8);
  if (++c.slot == RING_PAGES) { c.slot = 0; c.phase ^= 1; }
}
// d += inputs * one tile's next CHUNK fragments. Four chains hide the latency of the matrix instruction.
template <int CHUNK>
DEV void multiply(Context& c, const uint4 (&a)[CHUNK], float (&d)[2]) {
  float chain[4][4] = {};
#pragma unroll
  for (int page = 0; page < CHUNK / PAGE_FRAGMENTS; page++) {
    uint4 w[PAGE_FRAGMENTS];
    take_page(c, w);
#pragma unroll
    for (int i = 0; i < PAGE_FRAGMENTS; i++) {
      uint4 x = a[page * PAGE_FRAGMENTS + i];
      mma(chain[(i & 1) * 2], x.x, x.y, w[i].x, w[i].y);
      mma(chain[(i & 1) * 2 + 1], x.z, x.w, w[i].z, w[i].w);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) d[j] += (chain[0][j] + chain[1][j]) + (chain[2][j] + chain[3][j]);
}

DEV float* part_now(Context& c) { return c.s.part[c.part_parity]; }
DEV void store_partial(Context& c, int tile, const float (&d)[2]) {
  if (c.g < c.rows) *(float2*)(part_now(c) + ((c.warp * 8 + tile) * 8 + c.g) * 8 + 2 * c.q) = make_float2(d[0], d[1]);
}
// Sum over the warps, in their order, of output n of a row.
DEV float sum_partials(const float* part, int tile, int row, int n) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += part[((w * 8 + tile) * 8 + row) * 8 + n];
  return sum;
}
// Fragments of a tile that are multiplied at once; their inputs stay in registers.
template <int K>
constexpr int chunk_of = K <= 16 ? K : (K % 16 == 0 ? 16 : (K % 12 == 0 ? 12 : 8));

// One stage: `load(chunk, a)` fills a chunk of inputs, `finish(tile0, tiles, part)` publishes sums of up to 8 tiles.
template <int K, int TILES, class Load, class Finish>
DEV void gemv(Context& c, Load load, Finish finish) {
  constexpr int CHUNK = chunk_of<K>, CHUNKS = K / CHUNK;
  uint4 a[CHUNK];
  if constexpr (CHUNKS == 1) {
    load(0, a);
#pragma unroll 1
    for (int tile0 = 0; tile0 < TILES; tile0 += 8) {
      const int tiles = TILES - tile0 < 8 ? TILES - tile0 : 8;
#pragma unroll 1
      for (int tile = 0; tile < tiles; tile++) {
        float d[2] = {};
        multiply<CHUNK>(c, a, d);
        store_partial(c, tile, d);
      }
      block_sync();
      finish(tile0, tiles, part_now(c));
      c.part_parity ^= 1;
    }
  } else {
    static_assert(TILES <= 8, "");
    float d[TILES][2] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      load(chunk, a);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) multiply<CHUNK>(c, a, d[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) store_partial(c, tile, d[tile]);
    block_sync();
    finish(0, TILES, part_now(c));
    c.part_parity ^= 1;
  }
}

// ---- inputs

// Multiplies 8 residual values by the norm's weights and packs them; adds their squares.
DEV uint4 normed(uint4 lo, uint4 hi, uint4 w, float& square) {
  float x[8] = {__uint_as_float(lo.x), __uint_as_float(lo.y), __uint_as_float(lo.z), __uint_as_float(lo.w),
                __uint_as_float(hi.x), __uint_as_float(hi.y), __uint_as_float(hi.z), __uint_as_float(hi.w)};
#pragma unroll
  for (int i = 0; i < 8; i++) square = fmaf(x[i], x[i], square);
  return make_uint4(bf_pair(x[0] * bf_low(w.x), x[1] * bf_high(w.x)), bf_pair(x[2] * bf_low(w.y), x[3] * bf_high(w.y)),
                    bf_pair(x[4] * bf_low(w.z), x[5] * bf_high(w.z)), bf_pair(x[6] * bf_low(w.w), x[7] * bf_high(w.w)));
}
DEV void store_square(Context& c, float square) {
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  c.square_parity ^= 1;
  if (c.q == 0) c.s.square[c.square_parity][c.warp][c.g] = square;
}
// 1 / root mean square of a row, from what the warps stored.
DEV float inverse_rms(Context& c, int row) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += c.s.square[c.square_parity][w][row];
  return rsqrtf(sum * (1.f / HIDDEN) + c.p.eps);
}
// The residual of all rows, times the norm's weights (the 1 / rms is applied to the products).
DEV void load_residual(Context& c, int word, const u8* norm, uint4 (&a)[K_HIDDEN], int stage) {
  constexpr int BATCH = K_HIDDEN <= 8 ? K_HIDDEN : 4;
  const bool active = c.g < c.rows;
  const int k = c.warp * K_HIDDEN * 32 + c.q * 8;
  const u32* x = c.now + word + c.g * HIDDEN + k;
  float square = 0.f;
#pragma unroll
  for (int first = 0; first < K_HIDDEN; first += BATCH) {
    uint4 w[BATCH], v[2 * BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) w[i] = load_constant(norm + (k + (first + i) * 32) * 2);
    gather<2 * BATCH>(c, x + first * 32, [](int i) { return i / 2 * 32 + i % 2 * 4; }, active, v, stage);
#pragma unroll
    for (int i = 0; i < BATCH; i++) a[first + i] = normed(v[2 * i], v[2 * i + 1], w[i], square);
  }
  store_square(c, square);
}
DEV void load_embedding(Context& c, const u8* norm, uint4 (&a)[K_HIDDEN]) {
  const int k = c.warp * K_HIDDEN * 32 + c.q * 8;
  const u8* x = c.p.embedding + ((long)c.p.tokens[c.g < c.rows ? c.g : 0] * HIDDEN + k) * 2;
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < K_HIDDEN; i++) {
    uint4 e = c.g < c.rows ? load_constant(x + i * 64) : make_uint4(0, 0, 0, 0);
    uint4 lo = make_uint4(e.x << 16, e.x & 0xffff0000u, e.y << 16, e.y & 0xffff0000u);
    uint4 hi = make_uint4(e.z << 16, e.z & 0xffff0000u, e.w << 16, e.w & 0xffff0000u);
    a[i] = normed(lo, hi, load_constant(norm + (k + i * 32) * 2), square);
  }
  store_square(c, square);
}
// Inputs that were published as bfloat16 pairs: attention output or activations.
template <int K, int CHUNK>
DEV void load_pairs(Context& c, int word, int chunk, uint4 (&a)[CHUNK], int stage) {
  const u32* x = c.now + word + (c.g * K * 8 * 32 + (c.warp * K + chunk * CHUNK) * 32 + c.q * 8) / 2;
  gather<CHUNK>(c, x, [](int i) { return i * 16; }, c.g < c.rows, a, stage);
}
