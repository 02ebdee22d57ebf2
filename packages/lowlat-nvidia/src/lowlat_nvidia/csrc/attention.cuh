// Attention of one KV head over one split of the context, then the sum over splits.
// A token's HEAD_DIM elements lie over LANES lanes, 8 each; a warp load covers TOKENS tokens, a chunk DEPTH loads.
// Which warp and lane sums which token depends on the row's own context alone, so its bits do not depend on neighbours.
#pragma once
#include "gemv.cuh"

constexpr int LANES = HEAD_DIM / 8, TOKENS = 32 / LANES, DEPTH = 4, STRIPE = WARPS * TOKENS;
constexpr float LOG2E = 1.44269504f;

// Normalises (Qwen3) and rotates 8 elements of one head, given as the float32 words v; element i is 8 * part + i.
DEV void rotate(Context& c, const uint4 (&v)[2], const u8* norm, const float* rotary, float (&x)[8]) {
  const int part = c.lane % LANES;
  const u32 w[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(w[i]);
  if constexpr (QK_NORM) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) square = fmaf(x[i], x[i], square);
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
    float scale = rsqrtf(square * (1.f / HEAD_DIM) + c.p.head_eps);
    uint4 n = load_constant(norm + part * 16);
    float weight[8] = {bf_low(n.x), bf_high(n.x), bf_low(n.y), bf_high(n.y),
                       bf_low(n.z), bf_high(n.z), bf_low(n.w), bf_high(n.w)};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale * weight[i];
  }
  const bool first_half = part < LANES / 2;
  const float* table = rotary + part % (LANES / 2) * 8;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float other = __shfl_xor_sync(~0u, x[i], LANES / 2);
    float cosine = __ldg(table + i), sine = __ldg(table + HEAD_DIM / 2 + i);
    x[i] = first_half ? x[i] * cosine - other * sine : x[i] * cosine + other * sine;
  }
}
DEV uint4 pack8(const float (&x)[8]) {
  return make_uint4(bf_pair(x[0], x[1]), bf_pair(x[2], x[3]), bf_pair(x[4], x[5]), bf_pair(x[6], x[7]));
}
DEV void unpack8(uint4 u, float (&x)[8]) {
  x[0] = bf_low(u.x); x[1] = bf_high(u.x); x[2] = bf_low(u.y); x[3] = bf_high(u.y);
  x[4] = bf_low(u.z); x[5] = bf_high(u.z); x[6] = bf_low(u.w); x[7] = bf_high(u.w);
}

struct RowWindow {      // what one warp reads of one row's context
  int begin, end;       // tokens of this split
  int cached;           // tokens before this are in the cache, later ones come from this step
  const int* pages;
};
DEV RowWindow window_of(Context& c, int row, int split) {
  const int total = (int)c.p.positions[row] + 1, first = c.p.row_first[row];
  const int each = (total + SPLITS * TOKENS - 1) / (SPLITS * TOKENS) * TOKENS;
  RowWindow w;
  w.begin = split * each;
  w.end = min(total, w.begin + each);
  w.cached = (int)c.p.positions[first];
  w.pages = c.p.page_table + (long)c.p.row_request[row] * c.p.table_stride;
  return w;
}
DEV long slot_offset(Context& c, const int* pages, int token, int head) {
  int page = token / c.p.page_size;
  long slot = (long)__ldg(pages + page) * c.p.page_size + (token - page * c.p.page_size);
  return (slot * c.p.slot_stride + head * c.p.head_stride) * 2;
}

struct Chunk { uint4 k[DEPTH], v[DEPTH]; };
// Loads the cached tokens among this lane's DEPTH tokens from `token` on; everything else is left zero.
DEV void load_chunk(Context& c, const RowWindow& w, int head, const u8* k, const u8* v, int token, Chunk& out) {
  const int part = c.lane % LANES;
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    int t = token + i * STRIPE;
    bool cached = t < w.end && t < w.cached;
    long at = cached ? slot_offset(c, w.pages, t, head) + part * 16 : 0;
    out.k[i] = cached ? load_stream(k + at) : make_uint4(0, 0, 0, 0);
    out.v[i] = cached ? load_stream(v + at) : make_uint4(0, 0, 0, 0);
  }
}
// This step's own key and value of `token` (row row_first + token - cached), in the chunk's form.
DEV void load_new(Context& c, const RowWindow& w, int row, int head, const u8* norms, int token, uint4& k, uint4& v) {
  // Lanes whose token is cached follow another lane's token, for the shuffles; they keep their own values.
  const int part = c.lane % LANES;
  const bool mine = token >= w.cached && token < w.end;
  const int source = mine ? c.p.row_first[row] + token - w.cached : row;
  const u32* at = c.now + W_QKV + (source * KV_HEADS + head) * HEAD_ROWS + GROUP_DIM + part * 8;
  uint4 kv[4];
  gather<4>(c, at, [](int i) { return i / 2 * HEAD_DIM + i % 2 * 4; }, true, kv, 2);
  float x[8];
  rotate(c, {kv[0], kv[1]}, norms + HEAD_DIM * 2, c.p.rotary + c.p.positions[source] * HEAD_DIM, x);
  if (!mine) return;
  k = pack8(x);
  const u32 y[8] = {kv[2].x, kv[2].y, kv[2].z, kv[2].w, kv[3].x, kv[3].y, kv[3].z, kv[3].w};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(y[i]);
  v = pack8(x);
}

struct Accumulator { float top[GROUP], sum[GROUP], out[GROUP][8]; };
DEV void attend(const float (&query)[GROUP][8], const Chunk& chunk, int token, int end, Accumulator& acc) {
  float score[GROUP][DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    float key[8];
    unpack8(chunk.k[i], key);
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
      float s = 0.f;
#pragma unroll
      for (int e = 0; e < 8; e++) s = fmaf(query[h][e], key[e], s);
      score[h][i] = s;
    }
  }
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1)
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
#pragma unroll
      for (int h = 0; h < GROUP; h++) score[h][i] += __shfl_xor_sync(~0u, score[h][i], o);
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    float top = acc.top[h];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (token + i * STRIPE >= end) score[h][i] = -1e30f;
      top = fmaxf(top, score[h][i]);
    }
    float shrink = exp2f(acc.top[h] - top);
    acc.top[h] = top;
    acc.sum[h] *= shrink;
#pragma unroll
    for (int e = 0; e < 8; e++) acc.out[h][e] *= shrink;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      score[h][i] = token + i * STRIPE < end ? exp2f(score[h][i] - top) : 0.f;
      acc.sum[h] += score[h][i];
    }
  }
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    float value[8];
    unpack8(chunk.v[i], value);
#pragma unroll
    for (int h = 0; h < GROUP; h++)
#pragma unroll
      for (int e = 0; e < 8; e++) acc.out[h][e] = fmaf(score[h][i], value[e], acc.out[h][e]);
  }
}

// Joins the tokens of a warp, then of the block, and publishes the split's output and log-sum.
DEV void publish_split(Context& c, int row, int head, int split, Accumulator& acc) {
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    float top = acc.top[h];
#pragma unroll
    for (int o = LANES; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float shrink = exp2f(acc.top[h] - top), sum = acc.sum[h] * shrink;
#pragma unroll
    for (int o = LANES; o < 32; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      float x = acc.out[h][e] * shrink;
#pragma unroll
      for (int o = LANES; o < 32; o *= 2) x += __shfl_xor_sync(~0u, x, o);
      acc.out[h][e] = x;
    }
    float* at = part_now(c) + c.warp * GROUP_DIM + h * HEAD_DIM + c.lane % LANES * 8;
    if (c.lane < LANES) {
      *(float4*)at = make_float4(acc.out[h][0], acc.out[h][1], acc.out[h][2], acc.out[h][3]);
      *(float4*)(at + 4) = make_float4(acc.out[h][4], acc.out[h][5], acc.out[h][6], acc.out[h][7]);
    }
    if (c.lane == 0) { c.s.merge[c.part_parity][c.warp][h][0] = top; c.s.merge[c.part_parity][c.warp][h][1] = sum; }
  }
  block_sync();
#pragma unroll
  for (int i = 0; i < GROUP_DIM / THREADS; i++) {
    const int d = c.thread + i * THREADS, h = d / HEAD_DIM;
    float top = -1e30f, sum = 0.f, out = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, c.s.merge[c.part_parity][w][h][0]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float shrink = exp2f(c.s.merge[c.part_parity][w][h][0] - top);
      sum = fmaf(c.s.merge[c.part_parity][w][h][1], shrink, sum);
      out = fmaf(part_now(c)[w * GROUP_DIM + d], shrink, out);
    }
    const int at = (row * KV_HEADS + head) * SPLITS + split;
    publish(c, W_PART + at * GROUP_DIM + d, __float_as_uint(sum > 0.f ? out / sum : 0.f));
    if (d % HEAD_DIM == 0)
      publish(c, W_LSE + at * GROUP + h, __float_as_uint(sum > 0.f ? top + log2f(sum) : -1e30f));
  }
  c.part_parity ^= 1;
}

// All rows: read the cached part before the projections arrive, take this step's own tokens from the exchange.
DEV void attention(Context& c, int layer) {
  const int head = c.block / SPLITS, split = c.block % SPLITS, part = c.lane % LANES;
  u8* k = (u8*)c.p.pools[2 * layer];
  u8* v = (u8*)c.p.pools[2 * layer + 1];
  const u8* norms = c.p.head_norms + (long)layer * 2 * HEAD_DIM * 2;
  RowWindow w = window_of(c, 0, split);
  int token = w.begin + c.warp * TOKENS + c.lane / LANES;
  Chunk chunk;
  load_chunk(c, w, head, k, v, token, chunk);
#pragma unroll 1
  for (int row = 0; row < c.rows; row++) {
    float query[GROUP][8];
    {
      uint4 q[2 * GROUP];
      const u32* at = c.now + W_QKV + (row * KV_HEADS + head) * HEAD_ROWS + part * 8;
      gather<2 * GROUP>(c, at, [](int i) { return i / 2 * HEAD_DIM + i % 2 * 4; }, true, q, 2);
      const float* rotary = c.p.rotary + c.p.positions[row] * HEAD_DIM;
#pragma unroll
      for (int h = 0; h < GROUP; h++) {
        rotate(c, {q[2 * h], q[2 * h + 1]}, norms, rotary, query[h]);
#pragma unroll
        for (int e = 0; e < 8; e++) query[h][e] *= rsqrtf((float)HEAD_DIM) * LOG2E;
      }
    }
    Accumulator acc = {};
#pragma unroll
    for (int h = 0; h < GROUP; h++) acc.top[h] = -1e30f;
    const int own = (int)c.p.positions[row];
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        const int t = token + i * STRIPE;
        if (__any_sync(~0u, t >= w.cached && t < w.end)) {
          load_new(c, w, row, head, norms, t, chunk.k[i], chunk.v[i]);
          if (t == own && t < w.end) {
            long at = slot_offset(c, w.pages, t, head) + part * 16;
            *(uint4*)(k + at) = chunk.k[i];
            *(uint4*)(v + at) = chunk.v[i];
          }
        }
      }
      attend(query, chunk, token, w.end, acc);
      token += DEPTH * STRIPE;
      if (!__any_sync(~0u, token < w.end)) break;
      load_chunk(c, w, head, k, v, token, chunk);
    }
    if (row + 1 < c.rows) {
      w = window_of(c, row + 1, split);
      token = w.begin + c.warp * TOKENS + c.lane / LANES;
      load_chunk(c, w, head, k, v, token, chunk);
    }
    publish_split(c, row, head, split, acc);
  }
}

// Sums the splits for this block's share of the head group: a lane per split, four elements a lane.
DEV void combine(Context& c) {
  constexpr int VECTORS = BLOCK_COMBINE / 4, SIDES = 32 / SPLITS;
  const int head = c.block / SPLITS, share = c.block % SPLITS, split = c.lane % SPLITS;
#pragma unroll 1
  for (int base = 0; base < c.rows * VECTORS; base += WARPS * SIDES) {
    const int index = base + c.warp * SIDES + c.lane / SPLITS, row = index / VECTORS;
    if (base + c.warp * SIDES >= c.rows * VECTORS) break;
    const bool active = index < c.rows * VECTORS;
    const int d = share * BLOCK_COMBINE + index % VECTORS * 4;
    const int at = (row * KV_HEADS + head) * SPLITS + split;
    uint4 v = make_uint4(0, 0, 0, 0);
    float lse = -1e30f;
    if (active) {
      const u32 *pv = c.now + W_PART + at * GROUP_DIM + d, *pl = c.now + W_LSE + at * GROUP + d / HEAD_DIM;
      u32 polls = 0, word;
      do {
        v = load_exchange(pv);
        word = load_exchange_word(pl);
      } while ((is_empty(v) || word == EMPTY) && may_wait(c, polls, 3));
      lse = __uint_as_float(word);
    }
    __syncwarp();
    float top = lse;
#pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float weight = exp2f(lse - top), total = weight;
    float x[4] = {__uint_as_float(v.x) * weight, __uint_as_float(v.y) * weight, __uint_as_float(v.z) * weight,
                  __uint_as_float(v.w) * weight};
#pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) {
      total += __shfl_xor_sync(~0u, total, o);
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(~0u, x[e], o);
    }
    const float scale = 1.f / total;
    if (active && split < 2) {
      u32 word = split == 0 ? bf_pair(x[0] * scale, x[1] * scale) : bf_pair(x[2] * scale, x[3] * scale);
      publish(c, W_ATTN + (row * QDIM + head * GROUP_DIM + d) / 2 + split, word);
    }
  }
}
