// The stages of a step of one row. What they compute and publish has the bits that the stages for several rows give it;
// they are written for the fewest instructions between what a stage waits for and what it publishes: one row has no
// loops over rows, a tile's pages are waited for and loaded together, and only what is needed is polled for.
#pragma once
#include "attention.cuh"
#include "splits.cuh"

// ---- inputs

// Loads N published vectors and one more from `extra_at`; lanes beyond the first four get zeros. Until anything is
// there only the last vector is polled, so that polls do not crowd the L2; then all of it. What a stage loads `later`
// is there as a rule.
template <int N>
DEV void gather_one(Context& c, Stream& f, const u32* base, const u32* extra_at, uint4 (&v)[N], uint4& extra, int stage,
                    bool later = false) {
  u32 polls = 0;
  const bool active = c.lane < 4;
  const uint4 none = make_uint4(0, 0, 0, 0);
  if (!later) {
    pause(c, f, stage);
    if (!whole(stage)) {
      do {
        extra = active ? load_exchange(extra_at) : none;
        pump(c, f);
      } while (!__any_sync(~0u, active && least(extra) != EMPTY) && !give_up(c, polls, stage));
    }
  }
  while (true) {
    extra = active ? load_exchange(extra_at) : none;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = active ? load_exchange(base + i * 16) : none;
    u32 top = greatest(extra);
#pragma unroll
    for (int i = 0; i < N; i++) top = max(top, greatest(v[i]));
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, stage)) break;
    pump(c, f);
  }
}
DEV const u32* words_read(Context& c, const u32* words) { return words + (c.block & (COPIES - 1)) * ROW_WORDS; }
template <int K, int CHUNK>
DEV void load_pairs_one(Context& c, Stream& f, int word, int chunk, uint4 (&a)[CHUNK], int stage) {
  const u32* x = words_read(c, c.now) + word + ((c.warp * K + chunk * CHUNK) * 32 + c.q * 8) / 2;
  uint4 last;
  gather_one<CHUNK>(c, f, x, x + (CHUNK - 1) * 16, a, last, stage, chunk > 0);
}
DEV void load_normed_one(Context& c, Stream& f, const u32* words, int word, int square_word, uint4 (&a)[K_HIDDEN],
                         int stage) {
  const u32* row = words_read(c, words);
  constexpr int LANES = BLOCKS / WARPS / 4;
  uint4 s;
  gather_one<K_HIDDEN>(c, f, row + word + (c.warp * K_HIDDEN * 32 + c.q * 8) / 2,
                       row + square_word + c.warp * (BLOCKS / WARPS) + c.q % LANES * 4, a, s, stage);
  const float sum = (__uint_as_float(s.x) + __uint_as_float(s.y)) + (__uint_as_float(s.z) + __uint_as_float(s.w));
  store_square(c, c.q < LANES ? sum : 0.f);
}
// For words that all blocks read: the same in all copies.
DEV void publish_one(Context& c, int word, u32 value) {
  u32* at = c.now + word;
  value = planted(c.p, (at - c.p.exchange) % STEP_WORDS, value);
  if (value == EMPTY) value = 0x7fffffffu;
#pragma unroll
  for (int copy = 0; copy < COPIES; copy++) store_exchange(at + copy * ROW_WORDS, value);
}

// ---- stages

template <class Load, class Late>
DEV void project_qkv_one(Context& c, Stream& f, int layer, Load load, Late late) {
  constexpr int TILES = BLOCK_QKV / 8;
  const int first = c.block * BLOCK_QKV;
  gemv<K_HIDDEN, TILES>(c, f, load, late, [&](int tile0, int tiles, const float* part) {
    if (c.thread >= tiles * 8) return;
    const int n = tile0 * 8 + c.thread;
    float x = sum_one(part, c.thread) * inverse_rms(c, 0);
#if QKV_BIAS
    x += bf_low(c.s.biases[layer][n]);
#endif
    publish(c, 0, W_QKV + first + n, __float_as_uint(x));
  });
}
template <int K>
DEV void project_back_one(Context& c, Stream& f, int from, int to, int to_square, int norm, float& residual, int stage, int layer,
                          int mark) {
  constexpr int CHUNK = chunk_of<K>;
  static_assert(BLOCK_HIDDEN <= 32, "one warp publishes");
  auto load = [&](int chunk, uint4(&a)[CHUNK]) {
    load_pairs_one<K>(c, f, from, chunk, a, stage);
    if (chunk == 0) stamp(c, layer, mark);
  };
  gemv<K, BLOCK_HIDDEN / 8>(c, f, load, nothing, [&](int, int, const float* part) {
    if (c.warp) return;
    const int n = c.lane % BLOCK_HIDDEN;
    residual += sum_one(part, n);
    const float x = residual * bf_low(c.s.norms[norm][n]), other = __shfl_down_sync(~0u, x, 1);
    float square = mul(residual, residual);
#pragma unroll
    for (int o = BLOCK_HIDDEN / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
    if (c.lane >= BLOCK_HIDDEN) return;
    if (n % 2 == 0) publish_one(c, to + (c.block * BLOCK_HIDDEN + n) / 2, bf_pair(x, other));
    if (n == 0) publish_one(c, to_square + c.block, __float_as_uint(square));
  });
}
template <class Load, class Late>
DEV void gate_up_one(Context& c, Stream& f, Load load, Late late) {
  gemv<K_HIDDEN, 2 * BLOCK_INTER / 8>(c, f, load, late, [&](int tile0, int tiles, const float* part) {
    if (c.thread >= tiles * 2) return;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float4 x = *(const float4*)(part + w * 64 + c.thread * 4);
      sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w;
    }
    const float scale = inverse_rms(c, 0), g0 = sum.x * scale, g1 = sum.z * scale;
    const u32 word = bf_pair(g0 / (1.f + __expf(-g0)) * (sum.y * scale), g1 / (1.f + __expf(-g1)) * (sum.w * scale));
    publish_one(c, W_ACT + c.block * (BLOCK_INTER / 2) + tile0 * 2 + c.thread, word);
  });
}

// The norm of the head that this warp prepares, whichever it is.
DEV void ask_head_norm(Context& c, int layer, HeadNorms& norms) {
  if constexpr (QK_NORM) {
    const unsigned short* at = (const unsigned short*)c.p.head_norms + ((long)layer * 2 + (c.warp >= GROUP)) * HEAD_DIM + c.lane;
#pragma unroll
    for (int e = 0; e < EACH; e++) norms.query[e] = norms.key[e] = at[e * 32];
  }
}
// As `prepare_heads`, a warp for each head; keys and values only where this block's split holds the row's own token.
DEV void prepare_heads_one(Context& c, Stream& f, const HeadNorms& norms, int head, u8* k_pool, u8* v_pool) {
  static_assert(GROUP + 2 <= WARPS, "");
  Control& k = c.s.control;
  const bool write = k.own[0] >= k.begin[0] && k.own[0] < k.end[0];
  const u32* words = c.now + W_QKV + head * HEAD_ROWS + c.lane;
  u32 polls = 0;
  pause(c, f, 2);
  if (c.warp >= GROUP + (write ? 2 : 0)) {  // nothing to do but to ask for pages
    if (PUMPS)
      while (__all_sync(~0u, load_exchange_word(words) == EMPTY) && !give_up(c, polls, 2)) pump(c, f);
    return;
  }
  words += c.warp * HEAD_DIM;
  float x[EACH];
  while (true) {
    u32 top = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 word = load_exchange_word(words + e * 32);
      top = max(top, word);
      x[e] = __uint_as_float(word);
    }
    pump(c, f);
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, 2)) break;
  }
  prepare_head(c, norms, 0, c.warp, x, head, k_pool, v_pool);
}
// As `publish_splits`, an element for each thread.
DEV void publish_split_one(Context& c, int head, int split) {
  const Control& k = c.s.control;
  const int sums = min(k.first_unit[1], WARPS), at = head * SPLITS + split;
  block_sync();
#pragma unroll
  for (int d = c.thread; d < GROUP_DIM; d += THREADS) {
    const int h = d / HEAD_DIM, element = d % HEAD_DIM, g = element % 8, tile = element / 16;
    const float* part = attention_sums(c) + ((tile * 8 + g) * (GROUP / 2) + h / 2) * 4 + h % 2 + element / 8 % 2 * 2;
    float2 m[WARPS];
    float top = -1e30f, sum = 0.f, out = 0.f, x[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      m[w] = w < sums ? *(const float2*)c.s.merge[c.part_parity][w][h] : make_float2(-1e30f, 0.f);
      x[w] = w < sums ? part[w * GROUP_DIM] : 0.f;
      top = fmaxf(top, m[w].x);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float shrink = fast_exp2(m[w].x - top);
      sum = fmaf(m[w].y, shrink, sum);
      out = fmaf(x[w], shrink, out);
    }
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    publish(c, 0, W_PART + at * GROUP_DIM + d, __float_as_uint(out * scale));
    if (element == 0) publish(c, 0, W_LSE + at * GROUP + h, __float_as_uint(sum > 0.f ? top + __log2f(sum) : -1e30f));
  }
  c.part_parity ^= 1;
}
DEV void attention_one(Context& c, Stream& f, int layer, Ahead& ahead) {
  const Control& k = c.s.control;
  const int head = c.block / SPLITS, split = c.block % SPLITS;
  prepare_heads_one(c, f, ahead.norms, head, (u8*)k.pools[layer][0], (u8*)k.pools[layer][1]);
  block_sync();
  stamp(c, layer, 10);
  recompute(c);
  if (layer + 1 < LAYERS) ask_head_norm(c, layer + 1, ahead.norms);
  pump(c, f);
  attend_row(c, 0, ahead.unit);
  pump(c, f);
  stamp(c, layer, 12);
  recompute(c);
  publish_split_one(c, head, split);
  stamp(c, layer, 13);
  ahead.unit += k.first_unit[1];
  stamp(c, layer, 11);
}
DEV void combine_one(Context& c, Stream& f) {
  constexpr int VECTORS = BLOCK_COMBINE / 4, SIDES = 32 / SPLITS;
  static_assert(VECTORS <= WARPS * SIDES, "one vector a part of a warp");
  if (c.warp * SIDES >= VECTORS) return;
  const int head = c.block / SPLITS, share = c.block % SPLITS, split = c.lane % SPLITS;
  const int index = min(c.warp * SIDES + c.lane / SPLITS, VECTORS - 1);
  const int d = share * BLOCK_COMBINE + index * 4, at = head * SPLITS + split;
  const u32 *pv = c.now + W_PART + at * GROUP_DIM + d, *pl = c.now + W_LSE + at * GROUP + d / HEAD_DIM;
  uint4 v;
  u32 word, polls = 0;
  pause(c, f, 3);
  while (true) {
    v = load_exchange(pv);
    word = load_exchange_word(pl);
    pump(c, f);
    if (!__any_sync(~0u, max(greatest(v), word) == EMPTY) || give_up(c, polls, 3)) break;
  }
  const u32 joined = join_splits(v, __uint_as_float(word), split);
  if (split < 2) publish_one(c, W_ATTN + (head * GROUP_DIM + d) / 2 + split, joined);
}
