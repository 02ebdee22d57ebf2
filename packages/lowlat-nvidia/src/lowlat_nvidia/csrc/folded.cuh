// One row of a narrow model, with one exchange a layer less. Every block keeps the whole residual, a few elements a thread.
// Each block of a KV head sums the splits of the whole head and multiplies them with that head's columns of some of the
// output projection: a warp gets whole partial sums and publishes them at once. Who needs the residual adds the partial
// sums of all heads itself. Warp w of other widths multiplies inputs that are whole heads or parts of one, so that the
// same fragments make the same sums in the same order.
#pragma once
#include "one_row.cuh"

constexpr int HELD = HIDDEN / THREADS;            // residuals of a thread, neighbours
constexpr int HEAD_SLICES = WARPS / KV_HEADS;     // warps of other widths whose inputs are one KV head
constexpr int W_HELD = 4 * ROW_WORDS;             // residuals after a layer, float32; copies stand a row of the buffers apart
constexpr int W_SUMS = 4 * ROW_WORDS + HIDDEN;    // [WARPS, HIDDEN] partial sums of the output projection, float32
static_assert(HEAD_SLICES * KV_HEADS == WARPS && (HELD == 2 || HELD % 4 == 0) && GROUP_DIM == THREADS && COPIES <= 4, "");
static_assert((WARPS + 1) * HIDDEN <= ROW_WORDS && LAYER_FRAGMENTS % PAGE_FRAGMENTS == 0, "");
static_assert(PART_SUMS + HIDDEN / 2 <= PART_FLOATS && GROUP_DIM / 2 + BLOCK_HIDDEN <= HIDDEN / 2, "room beside attention's sums");

struct Held {
  float residual[HELD];
  u32 norm[HELD / 2];  // of what is normed next
};
DEV unsigned short* normed_here(Context& c) { return (unsigned short*)(c.s.part[0] + PART_SUMS) + c.warp * (HIDDEN / WARPS); }
DEV unsigned short* heads_here(Context& c) { return (unsigned short*)(c.s.part[1] + PART_SUMS); }
DEV float* own_here(Context& c) { return c.s.part[1] + PART_SUMS + GROUP_DIM / 2; }

// A warp reads the output projection's weights where another warp's lie.
DEV void fold_stream(Context& c, Stream& f) {
  const int unit = c.block % SPLITS * WARPS + c.warp;
  const int group = unit / HEAD_SLICES, slice = c.block / SPLITS * HEAD_SLICES + unit % HEAD_SLICES;
  f.elsewhere = ((long)(group - c.block) * WARPS + slice - c.warp) * PAGE;
  f.page = c.pages < LAYERS * LAYER_PAGES ? c.pages % LAYER_PAGES : LAYER_PAGES + 1;
}
// This thread's part of the row's embedding, asked for before anything else is known of the row.
DEV void ask_embedding(Context& c, long token, u32 (&words)[HELD / 2]) {
#pragma unroll
  for (int i = 0; i < HELD / 2; i++)
    words[i] = ((const u32*)c.p.embedding)[(token * HIDDEN + c.thread * HELD) / 2 + i];
}
DEV void embed_folded(Held& h, const u32 (&words)[HELD / 2]) {
#pragma unroll
  for (int i = 0; i < HELD / 2; i++) {
    h.residual[2 * i] = bf_low(words[i]);
    h.residual[2 * i + 1] = bf_high(words[i]);
  }
}
// Norm `index` of this thread's residuals, asked for before what it waits for.
DEV void ask_norm(Context& c, Held& h, int index) {
#pragma unroll
  for (int i = 0; i < HELD / 2; i++) h.norm[i] = *(const u32*)(c.p.norms + (long)index * HIDDEN + c.thread * HELD + 2 * i);
}
// Residuals times the norm, as operands of the matrix instruction.
DEV void norm_folded(Context& c, Held& h, uint4 (&a)[K_HIDDEN]) {
  unsigned short* to = normed_here(c);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < HELD / 2; i++)
    *(u32*)(to + c.lane * HELD + 2 * i) =
        bf_pair(h.residual[2 * i] * bf_low(h.norm[i]), h.residual[2 * i + 1] * bf_high(h.norm[i]));
  __syncwarp();
  const u32 from = shared_address(to) + c.q * 16;
#pragma unroll
  for (int i = 0; i < K_HIDDEN; i++) a[i] = load_shared(from + i * 64);
}
// The sum of the residuals' squares, in the order in which blocks and warps of other widths sum.
DEV void square_folded(Context& c, Held& h) {
  float square[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) square[i] = mul(h.residual[i], h.residual[i]);
#pragma unroll
  for (int o = BLOCK_HIDDEN / 2; o >= HELD; o >>= 1)
#pragma unroll
    for (int i = 0; i < HELD; i++) square[i] += __shfl_xor_sync(~0u, square[i], o / HELD);
#pragma unroll
  for (int o = (BLOCK_HIDDEN < HELD ? BLOCK_HIDDEN : HELD) / 2; o; o >>= 1)
#pragma unroll
    for (int i = 0; i < HELD / 2; i++)
      if (i < o) square[i] += square[i + o];
#pragma unroll
  for (int o = BLOCK_HIDDEN / HELD; o < 32; o <<= 1) square[0] += __shfl_xor_sync(~0u, square[0], o);
  c.square_parity ^= 1;
  if (c.lane == 0) c.s.square[c.square_parity][c.warp][0] = square[0];
}
// Waits for one of the lanes' words.
DEV void watch(Context& c, Stream& f, const u32* at, u32& polls, int stage) {
  bool empty;
  do {
    empty = load_exchange_word(at) == EMPTY;
    pump(c, f);
  } while (__all_sync(~0u, empty) && !give_up(c, polls, stage));
}
// Waits for COUNT vectors or pairs of words of every lane, `step` words apart; of several the last is watched first.
template <int COUNT>
DEV void gather_held(Context& c, Stream& f, const u32* base, int step, u32 (&v)[COUNT][HELD], int stage) {
  u32 polls = 0;
  pause(c, f, stage);
  if (COUNT > 1 && !whole(stage)) watch(c, f, base + (COUNT - 1) * step, polls, stage);
  while (true) {
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
      if constexpr (HELD == 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) v[j][i] = load_exchange_word(base + j * step + i);
      } else {
#pragma unroll
        for (int i = 0; i < HELD; i += 4) {
          const uint4 x = load_exchange(base + j * step + i);
          v[j][i] = x.x; v[j][i + 1] = x.y; v[j][i + 2] = x.z; v[j][i + 3] = x.w;
        }
      }
    if (COUNT == 1 || whole(stage)) pump(c, f);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
#pragma unroll
      for (int i = 0; i < HELD; i++) top = max(top, v[j][i]);
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, stage)) break;
  }
}
// The residual after `before`'s layer.
DEV void load_held(Context& c, Stream& f, Held& h, const u32* before, int stage) {
  u32 v[1][HELD];
  gather_held<1>(c, f, before + W_HELD + (c.block & (COPIES - 1)) * ROW_WORDS + c.thread * HELD, 0, v, stage);
#pragma unroll
  for (int i = 0; i < HELD; i++) h.residual[i] = __uint_as_float(v[0][i]);
}
// The residual after attention: the partial sums of all heads are added here.
DEV void add_heads(Context& c, Stream& f, Held& h, int stage) {
  u32 v[WARPS][HELD];
  gather_held<WARPS>(c, f, c.now + W_SUMS + c.thread * HELD, HIDDEN, v, stage);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += __uint_as_float(v[w][i]);
    h.residual[i] += sum;
    const int own = c.thread * HELD + i - c.block * BLOCK_HIDDEN;
    if (own >= 0 && own < BLOCK_HIDDEN) own_here(c)[own] = h.residual[i];
  }
}

// Sums the splits of this block's whole head, element `thread` of it, to the bits of `combine`.
DEV void combine_folded(Context& c, Stream& f) {
  const int head = c.block / SPLITS, h = c.thread / HEAD_DIM, split = c.lane % SPLITS;
  const u32* part = c.now + W_PART + head * SPLITS * GROUP_DIM + c.thread;
  const u32* at = c.now + W_LSE + (head * SPLITS + split) * GROUP + h;
  u32 v[SPLITS], word, polls = 0;
  pause(c, f, 3);
  if (!whole(3)) watch(c, f, at, polls, 3);
  while (true) {
    u32 top = word = load_exchange_word(at);
#pragma unroll
    for (int s = 0; s < SPLITS; s++) v[s] = load_exchange_word(part + s * GROUP_DIM);
#pragma unroll
    for (int s = 0; s < SPLITS; s++) top = max(top, v[s]);
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, 3)) break;
    if (whole(3)) pump(c, f);
  }
  float total, x[SPLITS];
  const float weight = split_weight(__uint_as_float(word), total);
#pragma unroll
  for (int s = 0; s < SPLITS; s++) x[s] = mul(__uint_as_float(v[s]), __shfl_sync(~0u, weight, s));
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1)
#pragma unroll
    for (int s = 0; s < SPLITS / 2; s++)
      if (s < o) x[s] += x[s + o];
  heads_here(c)[c.thread] = (unsigned short)bf_pair(x[0] * (1.f / total), 0.f);
}
// This head's part of some outputs, a group of outputs and a slice of inputs for each warp.
DEV void project_head(Context& c, Stream& f, int layer) {
  const int unit = c.block % SPLITS * WARPS + c.warp;
  const int group = unit / HEAD_SLICES, slice = c.block / SPLITS * HEAD_SLICES + unit % HEAD_SLICES;
  constexpr int WIDE = BLOCK_HIDDEN / 16;
  Tile<K_QDIM, true> wide;
  Tile<K_QDIM, false> narrow;
  wide.taken = narrow.taken = false;  // not early: the sum of splits needs the registers
  combine_folded(c, f);
  block_sync();
  stamp(c, layer, 5);
  uint4 a[K_QDIM];
  const u32 from = shared_address(heads_here(c)) + unit % HEAD_SLICES * K_QDIM * 64 + c.q * 16;
#pragma unroll
  for (int i = 0; i < K_QDIM; i++) a[i] = load_shared(from + i * 64);
  const int to = W_SUMS + slice * HIDDEN + group * BLOCK_HIDDEN + c.g;
  auto give = [&](float x, int n) {
    if (c.q == 0) publish(c, 0, to + n, __float_as_uint(x));
  };
#pragma unroll
  for (int tile = 0; tile < WIDE; tile++) {
    const float4 d = wide.multiply(c, f, a, tile + 1 < WIDE);
    give(d.x, tile * 16);
    give(d.z, tile * 16 + 8);
  }
  if constexpr (BLOCK_HIDDEN / 8 % 2) give(narrow.multiply(c, f, a, false).x, BLOCK_HIDDEN - 8);
}
// Down: the block that owns some residuals publishes them, whole.
DEV void project_down_folded(Context& c, Stream& f, int layer) {
  constexpr int CHUNK = chunk_of<K_INTER>;
  static_assert(BLOCK_HIDDEN <= 32, "one warp publishes");
  auto load = [&](int chunk, uint4(&a)[CHUNK]) {
    load_pairs_one<K_INTER>(c, f, W_ACT, chunk, a, 6);
    if (chunk == 0) stamp(c, layer, 8);
  };
  gemv<K_INTER, BLOCK_HIDDEN / 8>(c, f, load, nothing, [&](int, int, const float* part) {
    if (c.thread >= BLOCK_HIDDEN) return;
    const float residual = own_here(c)[c.thread] + sum_one(part, c.thread);
    publish_one(c, W_HELD + c.block * BLOCK_HIDDEN + c.thread, __float_as_uint(residual));
  });
}
// Empties what a step left beyond the words of its row.
DEV void clear_folded(Context& c, u32* layer) {
  const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  const int i = c.block * THREADS + c.thread;
  if (i < (WARPS + 1) * HIDDEN / 4) *(uint4*)(layer + W_HELD + i * 4) = empty;
  constexpr int COPY = HIDDEN / 4;
  if (i >= COPY && i < COPIES * COPY) *(uint4*)(layer + W_HELD + i / COPY * ROW_WORDS + i % COPY * 4) = empty;
}
