// One decode or verify step of a dense transformer (Llama, Qwen3) in one persistent launch of 128 blocks.
//
// Blocks exchange through words in global memory that are EMPTY until published: the data is its own signal, there is
// no barrier over the grid. Of each kernel's exchange buffers two sets alternate; what has been used is emptied, by the layers that
// follow where layers take turns, and by the next step of the same kernel.
// Each warp copies its packed weights, in the order of use, into a ring of pages in shared memory: a page that has been
// used makes room for another, so that copies run ahead of all dependencies.
#include "one_row.cuh"
#include "rows.cuh"
#include "tensor.cuh"
#if FOLD
#include "folded.cuh"
#endif
#if ROW_WARPS
#include "row_warps.cuh"
#endif
#include "logits.cuh"

// Stage numbers: 0 q, k, v; 1 embedding; 2 attention; 3 sum of splits; 4 output projection; 5 gate and up;
// 6 down; 7 logits; and for errors 8 a page of weights; 9 a unit of the cache; 10 room for one. Stamp numbers: see stamp().

DEV int copies_of(int rows) { return rows <= MAX_ROWS / COPIES ? COPIES : 1; }
// Empties this block's part of what a step of so many rows used of a layer: all of its rows, and what all blocks read of copies.
DEV void clear_layer(Context& c, u32* layer, int rows) {
  const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
#pragma unroll 1
  for (int i = c.block * THREADS + c.thread; i < rows * ROW_WORDS / 4; i += BLOCKS * THREADS)
    *(uint4*)(layer + i * 4) = empty;
  constexpr int COPIED = (ROW_WORDS - W_ATTN) / 4;
#pragma unroll 1
  for (int i = c.block * THREADS + c.thread; i < rows * (copies_of(rows) - 1) * COPIED; i += BLOCKS * THREADS)
    *(uint4*)(layer + (rows + i / COPIED) * ROW_WORDS + W_ATTN + i % COPIED * 4) = empty;
#if FOLD
  clear_folded(c, layer);
#endif
}
// Called in a layer behind gate and up. Where layers take turns, that is the layer before, which all blocks have read: each
// published its output projection after that. Of the step before only its last layer is left.
DEV void clear_used(Context& c, u32* now, u32* other, int layer, int last_rows) {
  if (alone(c.p)) return;
  if (!TURNS) clear_layer(c, other + (long)layer * LAYER_WORDS, last_rows);
  else if (layer) clear_layer(c, now + (long)slot_of(layer - 1) * LAYER_WORDS, c.rows);
  else clear_layer(c, other + (long)slot_of(LAYERS - 1) * LAYER_WORDS, last_rows);
}
// Before a layer's gate and up are waited for: what this block has emptied is so for whoever reads what it publishes from here on.
// The words are published again two layers later at the earliest, by blocks that have read such words. Those read without an
// acquire: that words are emptied first holds since all of them lie in the L2, not by the memory model's letter.
DEV void clears_before() {
  if (TURNS) stores_before();
}

DEV void project_qkv(Context& c, Stream& f, int layer, const u32* before) {
  constexpr int TILES = BLOCK_QKV / 8;
  const int head = c.block / SPLITS, share = c.block % SPLITS;
  auto load = [&](int, uint4(&a)[K_HIDDEN]) {
    load_normed(c, before, W_OUT, W_OUT_SQUARE, a, 0, [&] { pump(c, f); });
    stamp(c, layer, 1);
  };
  gemv<K_HIDDEN, TILES>(c, f, load, nothing, [&](int tile0, int tiles, const float* part) {
#pragma unroll 1
    for (int i = c.thread; i < tiles * 8 * c.rows; i += THREADS) {
      int row = i / (tiles * 8), n = i % (tiles * 8);
      float x = sum_partials(part, n / 8, row, n % 8) * inverse_rms(c, row);
#if QKV_BIAS
      x += bf_low(c.s.biases[layer][tile0 * 8 + n]);
#endif
      publish(c, row, W_QKV + head * HEAD_ROWS + share * BLOCK_QKV + tile0 * 8 + n, __float_as_uint(x));
    }
  });
}
// Publishes a residual times the next norm, and the block's sum of squares. All threads call it; of a row's outputs the
// threads are neighbours.
DEV void publish_residual(Context& c, int row, int n, int norm, float residual, int to, int to_square) {
  const float x = residual * bf_low(c.s.norms[norm][n]), other = __shfl_down_sync(~0u, x, 1);
  float square = mul(residual, residual);
#pragma unroll
  for (int o = BLOCK_HIDDEN / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
  if (row >= c.rows) return;
  if (n % 2 == 0) publish_to_all(c, row, to + (c.block * BLOCK_HIDDEN + n) / 2, bf_pair(x, other));
  if (n == 0) publish_to_all(c, row, to_square + c.block, __float_as_uint(square));
}
// The residual of (row, output) stays with the thread that publishes it.
template <int K>
DEV void project_back(Context& c, Stream& f, int from, int to, int to_square, int norm, float& residual, int stage,
                      int layer, int mark) {
  constexpr int CHUNK = chunk_of<K>;
  const int row = c.thread / BLOCK_HIDDEN, n = c.thread % BLOCK_HIDDEN;
  auto load = [&](int chunk, uint4(&a)[CHUNK]) {
    load_pairs<K>(c, from, chunk, a, stage, [&] { pump(c, f); });
    if (chunk == 0) stamp(c, layer, mark);
  };
  gemv<K, BLOCK_HIDDEN / 8>(c, f, load, nothing, [&](int, int, const float* part) {
    if (row < c.rows) residual += sum_partials(part, n / 8, row, n % 8);
    publish_residual(c, row, n, norm, residual, to, to_square);
  });
}
// A tile holds gate and up of four activations, alternating.
DEV void gate_up(Context& c, Stream& f, int layer) {
  auto load = [&](int, uint4(&a)[K_HIDDEN]) {
    clears_before();
    load_normed(c, c.now, W_MID, W_MID_SQUARE, a, 5, [&] { pump(c, f); });
    stamp(c, layer, 9);
  };
  gemv<K_HIDDEN, 2 * BLOCK_INTER / 8>(c, f, load, nothing, [&](int tile0, int tiles, const float* part) {
#pragma unroll 1
    for (int i = c.thread; i < tiles * 2 * c.rows; i += THREADS) {
      const int row = i / (tiles * 2), pair = i % (tiles * 2);
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        float4 x = *(const float4*)(part + ((w * 8 + pair / 2) * ROWS + row) * 8 + pair % 2 * 4);
        sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w;
      }
      const float scale = inverse_rms(c, row), g0 = sum.x * scale, g1 = sum.z * scale;
      u32 word = bf_pair(g0 / (1.f + __expf(-g0)) * (sum.y * scale), g1 / (1.f + __expf(-g1)) * (sum.w * scale));
      publish_to_all(c, row, W_ACT + c.block * (BLOCK_INTER / 2) + tile0 * 2 + pair, word);
    }
  });
}

#if FOLD
// The layers of a step of one row.
DEV void folded_layers(Context& c, Stream& f, Held& h, Ahead& ahead, u32* now, u32* other, int last_rows) {
#pragma unroll 1
  for (int layer = first_layer(c.p); layer < end_layer(c.p); layer++) {
    const u32* before = c.now;
    c.now = now + (long)slot_of(layer) * LAYER_WORDS;
    stamp(c, layer, 0);
    ask_norm(c, h, 2 * layer);
    recompute(c);
    if (runs(c.p, 0))
      project_qkv_one(c, f, layer, [&](int, uint4(&a)[K_HIDDEN]) {
        if (layer) load_held(c, f, h, before, 0);
        norm_folded(c, h, a);
        stamp(c, layer, 1);
      }, [&] { square_folded(c, h); });
    stamp(c, layer, 2);
    ask_norm(c, h, 2 * layer + 1);
    recompute(c);
    if (runs(c.p, 2)) attention_one(c, f, layer, ahead);
    stamp(c, layer, 3);
    stamp(c, layer, 4);
    recompute(c);
    if (runs(c.p, 4)) project_head(c, f, layer);
    stamp(c, layer, 6);
    if (alone(c.p) && layer && (runs(c.p, 5) || runs(c.p, 6))) load_held(c, f, h, before, 0);
    recompute(c);
    if (runs(c.p, 5))
      gate_up_one(c, f, [&](int, uint4(&a)[K_HIDDEN]) {
        clears_before();
        add_heads(c, f, h, 5);
        norm_folded(c, h, a);
        if (c.thread == 0) c.s.progress = layer + 1;
        stamp(c, layer, 9);
      }, [&] { square_folded(c, h); });
    stamp(c, layer, 7);
    clear_used(c, now, other, layer, last_rows);
    if (alone(c.p) && runs(c.p, 6)) {
      add_heads(c, f, h, 5);
      block_sync();
    }
    recompute(c);
    if (runs(c.p, 6)) project_down_folded(c, f, layer);
  }
  ask_norm(c, h, 2 * LAYERS);
}
#endif
// The norms of this block's outputs, of all layers: all are asked for before any is waited for, behind the ring's first pages.
DEV void read_norms(Context& c) {
  constexpr int HALF = BLOCK_HIDDEN / 2, PAIRS = (2 * LAYERS + 1) * HALF, COUNT = (PAIRS + THREADS - 1) / THREADS;
  u32 pairs[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int i = min(c.thread + j * THREADS, PAIRS - 1);
    pairs[j] = *(const u32*)(c.p.norms + i / HALF * HIDDEN + c.block * BLOCK_HIDDEN + i % HALF * 2);
  }
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int i = min(c.thread + j * THREADS, PAIRS - 1);
    *(u32*)&c.s.norms[i / HALF][i % HALF * 2] = pairs[j];
  }
}
DEV void compute(const Params& p, Shared& s, u8* memory) {
  int thread = threadIdx.x, block = blockIdx.x;
  forget(thread);  // or what is worked out of it before stays in registers beside it
  const int warp = (u32)thread / 32, lane = (u32)thread % 32, row = thread / BLOCK_HIDDEN, n = thread % BLOCK_HIDDEN;
  const u32 ring = shared_address(memory + RING_OFFSET), full = shared_address(s.full);
  OneRow one;
  u32 parity;
  int last_rows;
  // What the kernel before wrote, or what a step of this kernel did; weights and norms nobody writes.
  auto ask_inputs = [&] {
    wait_for_earlier_kernel();
    one = ask_row(p);
    parity = load_exchange_word(p.state + PARITY);
    last_rows = ONE ? 1 : (int)load_exchange_word(p.state + LAST_ROWS);
  };
  if constexpr (!ONE) ask_inputs();
  const int first = first_layer(p);
  Context c = {p, s, nullptr, block, warp, lane, thread, lane / 4, lane % 4, ONE ? 1 : p.rows,
               ring + warp * RING_PAGES * PAGE, full + warp * RING_PAGES * 8,
               p.weights + (((long)first_page(p) * BLOCKS + block) * WARPS + warp) * PAGE, read_once_policy(), first_page(p),
               shared_address(memory + UNITS_OFFSET), p.zero, copies_of(ONE ? 1 : p.rows),
               0, 0, 0, 0, false, false};

#if FOLD
  Held h;
  u32 embedding[HELD / 2];
#endif
  Stream f;
  begin_stream(c, f);
#if FOLD
  fold_stream(c, f);
#endif
  while (f.room) ask_page(c, f);
  if constexpr (ONE) ask_inputs();  // behind its first pages, which the kernel before may still hide
  u32* now = p.exchange + parity * STEP_WORDS;
  u32* other = p.exchange + (parity ^ 1) * STEP_WORDS;
  c.now = now + (long)(first ? slot_of(first - 1) : BEFORE) * LAYER_WORDS;
  auto embedded = [&](long token) {
    return row < c.rows ? ((const unsigned short*)p.embedding)[token * HIDDEN + block * BLOCK_HIDDEN + n] : 0;
  };
  unsigned short mine = 0;
#if FOLD
  ask_embedding(c, one.token, embedding);
#endif
  if constexpr (ONE && !FOLD) mine = embedded(one.token);
  if constexpr (!FOLD) read_norms(c);
#if QKV_BIAS
#pragma unroll 1
  for (int i = thread; i < LAYERS * BLOCK_QKV; i += THREADS)
    s.biases[i / BLOCK_QKV][i % BLOCK_QKV] =
        p.biases[i / BLOCK_QKV * (KV_HEADS * HEAD_ROWS) + block * BLOCK_QKV + i % BLOCK_QKV];
#endif
  read_rows(c, one);
  __syncthreads();
  if (s.stop) {
#pragma unroll 1
    for (int page = 0; page < c.pages - first_page(p); page++) wait_barrier(c, c.full + page * 8, 0, 8);
    if (thread == 0) finish_step(p, 0);
    return;
  }
  c.busy = ONE ? 2 * s.control.first_unit[1] > UNITS : !s.control.by_rows && c.rows <= BUSY_ROWS;
  if constexpr (!ONE) mine = embedded(s.control.token[row % ROWS]);
  float residual = bf_low(mine);
  if (runs(p, 1) && !FOLD) publish_residual(c, row, n, 0, residual, W_OUT, W_OUT_SQUARE);
  Ahead ahead = {0};
  if constexpr (ONE) ask_head_norm(c, first % LAYERS, ahead.norms);
  else if (!BY_ROWS) load_head_norms(c, first % LAYERS, ahead.norms);
#if FOLD
  embed_folded(h, embedding);
  folded_layers(c, f, h, ahead, now, other, last_rows);
#endif
#pragma unroll 1
  for (int layer = FOLD ? LAYERS : first; layer < end_layer(p); layer++) {
    const u32* before = c.now;
    recompute(c);
    c.now = now + (long)slot_of(layer) * LAYER_WORDS;
    stamp(c, layer, 0);
#if ROW_WARPS
    Early first_unit;
    if (ROW_WARPS == 2 && s.control.by_rows) take_first(c, layer, first_unit);
#endif
    if (runs(p, 0)) {
      if constexpr (ONE)
        project_qkv_one(c, f, layer, [&](int, uint4(&a)[K_HIDDEN]) {
          load_normed_one(c, f, before, W_OUT, W_OUT_SQUARE, a, 0);
          stamp(c, layer, 1);
        }, nothing);
      else
        project_qkv(c, f, layer, before);
    }
    stamp(c, layer, 2);
    recompute(c);
#if ROW_WARPS
    if (ROW_WARPS == 1 && s.control.by_rows) take_first(c, layer, first_unit);
#endif
    if (runs(p, 2)) {
      if constexpr (ONE) attention_one(c, f, layer, ahead);
#if ROW_WARPS
      else if (s.control.by_rows) attention_by_rows(c, f, layer, first_unit);
#endif
      else attention(c, f, layer, ahead);
    }
    stamp(c, layer, 3);
    recompute(c);
    if (runs(p, 3)) ONE ? combine_one(c, f) : combine(c, f);
    stamp(c, layer, 4);
    recompute(c);
    hold_residual(p, 2 * layer, row, block * BLOCK_HIDDEN + n, residual);
    if (runs(p, 4)) {
      if constexpr (ONE) project_back_one<K_QDIM>(c, f, W_ATTN, W_MID, W_MID_SQUARE, 2 * layer + 1, residual, 4, layer, 5);
      else project_back<K_QDIM>(c, f, W_ATTN, W_MID, W_MID_SQUARE, 2 * layer + 1, residual, 4, layer, 5);
    }
    stamp(c, layer, 6);
    recompute(c);
    if (runs(p, 5)) {
      if constexpr (ONE)
        gate_up_one(c, f, [&](int, uint4(&a)[K_HIDDEN]) {
          clears_before();
          load_normed_one(c, f, c.now, W_MID, W_MID_SQUARE, a, 5);
          if (c.thread == 0) c.s.progress = layer + 1;
          stamp(c, layer, 9);
        }, nothing);
      else
        gate_up(c, f, layer);
    }
    stamp(c, layer, 7);
    clear_used(c, now, other, layer, last_rows);
    recompute(c);
    hold_residual(p, 2 * layer + 1, row, block * BLOCK_HIDDEN + n, residual);
    if (runs(p, 6)) {
      if constexpr (ONE) project_back_one<K_INTER>(c, f, W_ACT, W_OUT, W_OUT_SQUARE, 2 * layer + 2, residual, 6, layer, 8);
      else project_back<K_INTER>(c, f, W_ACT, W_OUT, W_OUT_SQUARE, 2 * layer + 2, residual, 6, layer, 8);
    }
  }
  if (!alone(p)) clear_layer(c, other + (long)BEFORE * LAYER_WORDS, last_rows);
  stamp(c, LAYERS, 0);
  while (f.room) ask_page(c, f);
  if (runs(p, 7)) project_logits(c, [&](uint4(&a)[K_HIDDEN]) {
#if FOLD
    load_held(c, f, h, c.now, 7);
    norm_folded(c, h, a);
    square_folded(c, h);
    block_sync();  // partial sums of the logits take the room of the norms
#else
    load_normed(c, c.now, W_OUT, W_OUT_SQUARE, a, 7, nothing);
#endif
  });
  stamp(c, LAYERS, 1);
  let_next_kernel_start();
  __threadfence();
  block_sync();
  if (thread == 0) finish_step(p, parity);
  stamp_clocks(p, 4);
}

extern "C" __global__ void __launch_bounds__(THREADS + COPY_THREADS, 1) dense_step(const __grid_constant__ Params p) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  stamp_clocks(p, 2);
  if (thread < WARPS * RING_PAGES) barrier_init(shared_address(s.full + thread), 1);
  if (thread == 0) s.progress = alone(p) ? LAYERS : 0;
  if (thread < UNITS) {
    barrier_init(shared_address(s.unit_full + thread), 32);
    barrier_init(shared_address(s.unit_empty + thread), PLAIN_COPIES ? 32 : 1);
  }
  barriers_ready();
  __syncthreads();
  if (warp >= WARPS) {
    give_registers<56>();
    wait_for_earlier_kernel();
    if (thread == THREADS) s.stop = load_exchange_word(p.state + 1);
    for (int i = thread - THREADS; i < 2 * LAYERS; i += COPY_THREADS)
      if (p.maps) map_ready(p.maps + i * TENSOR_MAP);
    __syncthreads();  // the rows are read
    if (s.stop) return;
#if ROW_WARPS
    if (s.control.by_rows) copy_rows(p, s, shared_address(memory + UNITS_OFFSET), warp - WARPS, lane);
    else
#endif
    copy_cache(p, s, shared_address(memory + UNITS_OFFSET), warp - WARPS, lane);
  } else {
    take_registers<224>();
    compute(p, s, memory);
  }
}
