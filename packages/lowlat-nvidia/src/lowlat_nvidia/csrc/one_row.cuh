// The stages of a step of one row. What they compute and publish has the bits that the stages for several rows give it;
// they are written for the fewest instructions between what a stage waits for and what it publishes: one row has no
// loops over rows, a tile's pages are waited for and loaded together, and only what is needed is polled for.
#pragma once
#include "attention.cuh"

// Counts a fruitless poll of the whole warp; true when it must go on with what it has.
DEV bool give_up(Context& c, u32& polls, int stage) {
  if ((++polls & 255u) == 0) {
    if (polls > c.p.spin_limit) store_exchange(c.p.state + 1, 1u + c.block * 16 + stage);
    c.failed = __any_sync(~0u, load_exchange_word(c.p.state + 1) != 0);
  }
  return c.failed;
}
DEV u32 least(uint4 v) { return min(min(v.x, v.y), min(v.z, v.w)); }

// Loads N published vectors and one more from `extra_at`; lanes beyond the first four get zeros. Until anything is
// there only the last vector is polled, so that polls do not crowd the L2; then all of it.
template <int N>
DEV void gather_one(Context& c, const u32* base, const u32* extra_at, uint4 (&v)[N], uint4& extra, int stage) {
  u32 polls = 0;
  const bool active = c.lane < 4;
  const uint4 none = make_uint4(0, 0, 0, 0);
#if ONE_PROBE == 1
  while (__any_sync(~0u, active && greatest(load_exchange(extra_at)) == EMPTY))
    if (give_up(c, polls, stage)) break;
#elif ONE_PROBE == 2
  while (__all_sync(~0u, !active || least(load_exchange(extra_at)) == EMPTY))
    if (give_up(c, polls, stage)) break;
#endif
  while (true) {
    extra = active ? load_exchange(extra_at) : none;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = active ? load_exchange(base + i * 16) : none;
    u32 top = greatest(extra);
#pragma unroll
    for (int i = 0; i < N; i++) top = max(top, greatest(v[i]));
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, stage)) break;
  }
}
DEV const u32* words_read(Context& c, const u32* words) { return words + (c.block & (COPIES - 1)) * ROW_WORDS; }
template <int K, int CHUNK>
DEV void load_pairs_one(Context& c, int word, int chunk, uint4 (&a)[CHUNK], int stage) {
  const u32* x = words_read(c, c.now) + word + ((c.warp * K + chunk * CHUNK) * 32 + c.q * 8) / 2;
  uint4 last;
  gather_one<CHUNK>(c, x, x + (CHUNK - 1) * 16, a, last, stage);
}
DEV void load_normed_one(Context& c, const u32* words, int word, int square_word, uint4 (&a)[K_HIDDEN], int stage) {
  const u32* row = words_read(c, words);
  constexpr int LANES = BLOCKS / WARPS / 4;
  uint4 s;
  gather_one<K_HIDDEN>(c, row + word + (c.warp * K_HIDDEN * 32 + c.q * 8) / 2,
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

// Several pages of this warp: all are waited for, then all loaded. They are given back behind the products.
template <int PAGES>
DEV void take_pages(Context& c, uint4 (&w)[PAGES * PAGE_FRAGMENTS], int (&slots)[PAGES]) {
#pragma unroll
  for (int j = 0; j < PAGES; j++) {
    slots[j] = c.slot;
    wait_barrier(c, c.full + c.slot * 8, c.phase, 8);
    if (++c.slot == RING_PAGES) { c.slot = 0; c.phase ^= 1; }
  }
#pragma unroll
  for (int j = 0; j < PAGES; j++)
#pragma unroll
    for (int i = 0; i < PAGE_FRAGMENTS; i++)
      w[j * PAGE_FRAGMENTS + i] = load_shared(c.ring + slots[j] * PAGE + c.lane * 16 + i * FRAGMENT);
}
template <int PAGES>
DEV void give_pages(Context& c, const uint4 (&w)[PAGES * PAGE_FRAGMENTS], const int (&slots)[PAGES]) {
  u32 seen[PAGES] = {};
#pragma unroll
  for (int j = 0; j < PAGES; j++)
#pragma unroll
    for (int i = 0; i < PAGE_FRAGMENTS; i++) seen[j] ^= w[j * PAGE_FRAGMENTS + i].w;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < PAGES; j++) fill_page(c, after(c, seen[j], c.ring + slots[j] * PAGE), c.full + slots[j] * 8);
}
struct GivePages {
  Context& c;
  template <class W, class S>
  DEV_MEMBER void operator()(const W& w, const S& slots) const { give_pages(c, w, slots); }
};
// Pages of a tile that are taken together: at most 16 fragments, in registers.
template <int PAGES, int AT_MOST>
constexpr int dividing = PAGES % AT_MOST == 0 ? AT_MOST : dividing<PAGES, AT_MOST - 1>;
template <int PAGES>
constexpr int dividing<PAGES, 1> = 1;
template <int PAGES>
constexpr int at_once = dividing<PAGES, 16 / PAGE_FRAGMENTS>;
// As `multiply_wide` and `multiply_narrow`, to the same bits, of row 0: outputs g and g + 8, or g, in lanes with q = 0.
// `back(w, slots)` gives the pages back.
template <int CHUNK, class Back>
DEV float2 wide_one(Context& c, const uint4 (&a)[CHUNK], Back back) {
  constexpr int PAGES = 2 * CHUNK / PAGE_FRAGMENTS, AT_ONCE = at_once<PAGES>, COUNT = AT_ONCE * PAGE_FRAGMENTS;
  float chain[4][4] = {};
#pragma unroll
  for (int first = 0; first < 2 * CHUNK; first += COUNT) {
    uint4 w[COUNT];
    int slots[AT_ONCE];
    take_pages<AT_ONCE>(c, w, slots);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const uint4 x = a[(first + i) / 2];
      mma(chain[i % PAGE_FRAGMENTS % 4], w[i], i % 2 ? x.z : x.x, i % 2 ? x.w : x.y);
    }
    back(w, slots);
  }
  return make_float2(0.f + ((chain[0][0] + chain[1][0]) + (chain[2][0] + chain[3][0])),
                     0.f + ((chain[0][2] + chain[1][2]) + (chain[2][2] + chain[3][2])));
}
template <int CHUNK, class Back>
DEV float narrow_one(Context& c, const uint4 (&a)[CHUNK], Back back) {
  constexpr int AT_ONCE = at_once<CHUNK / PAGE_FRAGMENTS>, COUNT = AT_ONCE * PAGE_FRAGMENTS;
  float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
  for (int first = 0; first < CHUNK; first += COUNT) {
    uint4 w[COUNT];
    int slots[AT_ONCE];
    take_pages<AT_ONCE>(c, w, slots);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      mma(upper[i % 2], w[i], a[first + i].x, a[first + i].y);
      mma(lower[i % 2], w[i], a[first + i].z, a[first + i].w);
    }
    back(w, slots);
  }
  return 0.f + ((upper[0][0] + upper[1][0]) + (lower[0][2] + lower[1][2]));
}
// Partial sums of one row: [warp][64 outputs].
DEV void store_one(Context& c, int tile, float x) {
  if (c.q == 0) part_now(c)[c.warp * 64 + tile * 8 + c.g] = x;
}
DEV float sum_one(const float* part, int n) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += part[w * 64 + n];
  return sum;
}
template <int K, int TILES, class Back, class Load, class Finish>
DEV void gemv_one(Context& c, Back back, Load load, Finish finish) {
  constexpr int CHUNK = chunk_of<K>, CHUNKS = K / CHUNK;
  uint4 a[CHUNK];
  if constexpr (CHUNKS == 1) {
    load(0, a);
#pragma unroll 1
    for (int tile0 = 0; tile0 < TILES; tile0 += 8) {
      const int tiles = TILES - tile0 < 8 ? TILES - tile0 : 8;
      if constexpr (TILES > 1) {
#pragma unroll 1
        for (int tile = 0; tile < tiles - 1; tile += 2) {
          const float2 d = wide_one<CHUNK>(c, a, back);
          store_one(c, tile, d.x);
          store_one(c, tile + 1, d.y);
        }
      }
      if constexpr (TILES % 2)
        if (tile0 + 8 >= TILES) store_one(c, tiles - 1, narrow_one<CHUNK>(c, a, back));
      block_sync();
      finish(tile0, tiles, part_now(c));
      c.part_parity ^= 1;
    }
  } else {
    static_assert(TILES <= 8, "");
    constexpr int WIDE = TILES / 2;
    float d[WIDE + 1][2] = {}, last = 0.f;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      load(chunk, a);
#pragma unroll
      for (int tile = 0; tile < WIDE; tile++) {
        const float2 x = wide_one<CHUNK>(c, a, back);
        d[tile][0] += x.x;
        d[tile][1] += x.y;
      }
      if constexpr (TILES % 2) last += narrow_one<CHUNK>(c, a, back);
    }
#pragma unroll
    for (int tile = 0; tile < WIDE; tile++) {
      store_one(c, 2 * tile, d[tile][0]);
      store_one(c, 2 * tile + 1, d[tile][1]);
    }
    if constexpr (TILES % 2) store_one(c, TILES - 1, last);
    block_sync();
    finish(0, TILES, part_now(c));
    c.part_parity ^= 1;
  }
}

// ---- stages

template <class Back, class Load>
DEV void project_qkv_one(Context& c, int layer, Back back, Load load) {
  constexpr int TILES = BLOCK_QKV / 8;
  const int first = c.block * BLOCK_QKV;
  gemv_one<K_HIDDEN, TILES>(c, back, load, [&](int tile0, int tiles, const float* part) {
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
DEV void project_back_one(Context& c, int from, int to, int to_square, int norm, float& residual, int stage, int layer,
                          int mark) {
  constexpr int CHUNK = chunk_of<K>;
  static_assert(BLOCK_HIDDEN <= 32, "one warp publishes");
  auto load = [&](int chunk, uint4(&a)[CHUNK]) {
    load_pairs_one<K>(c, from, chunk, a, stage);
    if (chunk == 0) stamp(c, layer, mark);
  };
  gemv_one<K, BLOCK_HIDDEN / 8>(c, GivePages{c}, load, [&](int, int, const float* part) {
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
template <class Back, class Load>
DEV void gate_up_one(Context& c, int layer, Back back, Load load) {
  gemv_one<K_HIDDEN, 2 * BLOCK_INTER / 8>(c, back, load, [&](int tile0, int tiles, const float* part) {
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

// As `prepare_heads`, a warp for each head; keys and values only where this block's split holds the row's own token.
DEV void prepare_heads_one(Context& c, const HeadNorms& norms, int head, u8* k_pool, u8* v_pool) {
  static_assert(GROUP + 2 <= WARPS, "");
  Control& k = c.s.control;
  const int own = k.own[0], part = c.warp;
  const bool write = own >= k.begin[0] && own < k.end[0];
  if (part >= GROUP + (write ? 2 : 0)) return;
  const u32* words = c.now + W_QKV + head * HEAD_ROWS + part * HEAD_DIM + c.lane;
  float x[EACH];
  u32 polls = 0;
  while (true) {
    u32 top = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 word = load_exchange_word(words + e * 32);
      top = max(top, word);
      x[e] = __uint_as_float(word);
    }
    if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, 2)) break;
  }
  if (part <= GROUP) {
    if constexpr (QK_NORM) {
      float square = 0.f;
#pragma unroll
      for (int e = 0; e < EACH; e++) square = fmaf(x[e], x[e], square);
#pragma unroll
      for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
      const float scale = rsqrtf(square * (1.f / HEAD_DIM) + c.p.head_eps);
#pragma unroll
      for (int e = 0; e < EACH; e++) x[e] *= scale * bf_low(part == GROUP ? norms.key[e] : norms.query[e]);
    }
#pragma unroll
    for (int e = 0; e < EACH / 2; e++) {
      const float a = x[e], b = x[e + EACH / 2];
      const float cosine = k.rotary[0][e * 32 + c.lane], sine = k.rotary[0][HEAD_DIM / 2 + e * 32 + c.lane];
      x[e] = a * cosine - b * sine;
      x[e + EACH / 2] = b * cosine + a * sine;
    }
  }
  if (part < GROUP) {
#pragma unroll
    for (int e = 0; e < EACH; e++)
      c.s.query[0][part * HEAD_DIM + e * 32 + c.lane] = (unsigned short)bf_pair(x[e], 0.f);
    return;
  }
  unsigned short* pool = (unsigned short*)(part == GROUP ? k_pool : v_pool) + k.own_slot[0] * c.p.slot_stride +
                         head * c.p.head_stride + c.lane;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const unsigned short value = (unsigned short)bf_pair(x[e], 0.f);
    const int d = e * 32 + c.lane;
    unsigned short* fresh = (unsigned short*)c.s.fresh + d / 64 * (PANEL / 2) + (part - GROUP) * 8 * 64;
    fresh[swizzled(own, d % 64 / 8) / 2 + d % 8] = value;
    pool[e * 32] = value;
  }
}
DEV void attention_one(Context& c, int layer, Ahead& ahead) {
  const Control& k = c.s.control;
  const int head = c.block / SPLITS, split = c.block % SPLITS;
  prepare_heads_one(c, ahead.norms, head, (u8*)k.pools[layer][0], (u8*)k.pools[layer][1]);
  block_sync();
  stamp(c, layer, 10);
  if (layer + 1 < LAYERS) load_head_norms(c, layer + 1, ahead.norms);
  attend_row(c, 0, c.warp, ahead.unit);
  stamp(c, layer, 12);
  publish_splits(c, 0, 0, head, split);
  stamp(c, layer, 13);
  ahead.unit += k.first_unit[1];
  stamp(c, layer, 11);
}
DEV void combine_one(Context& c) {
  constexpr int VECTORS = BLOCK_COMBINE / 4, SIDES = 32 / SPLITS;
  static_assert(VECTORS <= WARPS * SIDES, "one vector a part of a warp");
  if (c.warp * SIDES >= VECTORS) return;
  const int head = c.block / SPLITS, share = c.block % SPLITS, split = c.lane % SPLITS;
  const int index = min(c.warp * SIDES + c.lane / SPLITS, VECTORS - 1);
  const int d = share * BLOCK_COMBINE + index * 4, at = head * SPLITS + split;
  const u32 *pv = c.now + W_PART + at * GROUP_DIM + d, *pl = c.now + W_LSE + at * GROUP + d / HEAD_DIM;
  uint4 v;
  u32 word, polls = 0;
  while (true) {
    v = load_exchange(pv);
    word = load_exchange_word(pl);
    if (!__any_sync(~0u, max(greatest(v), word) == EMPTY) || give_up(c, polls, 3)) break;
  }
  const float lse = __uint_as_float(word);
  float top = lse;
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  const float weight = fast_exp2(lse - top);
  float total = weight;
  float x[4] = {mul(__uint_as_float(v.x), weight), mul(__uint_as_float(v.y), weight), mul(__uint_as_float(v.z), weight),
                mul(__uint_as_float(v.w), weight)};
#pragma unroll
  for (int o = SPLITS / 2; o; o >>= 1) {
    total += __shfl_xor_sync(~0u, total, o);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(~0u, x[e], o);
  }
  const float scale = 1.f / total;
  if (split < 2)
    publish_one(c, W_ATTN + (head * GROUP_DIM + d) / 2 + split,
                split == 0 ? bf_pair(x[0] * scale, x[1] * scale) : bf_pair(x[2] * scale, x[3] * scale));
}
