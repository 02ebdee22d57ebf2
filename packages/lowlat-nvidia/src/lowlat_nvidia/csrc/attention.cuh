// Attention of one KV head over one split of the context, then the sum over splits.
// A warp takes 8 tokens at a time (a unit) through the matrix instruction: scores = queries (A: head g in row g) x keys
// (B: a token a column), output = weights (A) x values (B). With lane (g, q): keys of token g, elements 8 q to 8 q + 7
// of every 32; values of tokens 2q and 2q + 1, elements 8 g to 8 g + 7 of every 64. The layouts of scores and weights
// agree, so nothing moves between lanes but the maximum.
// Units lie in a ring of shared memory for each warp. The cache does not depend on this step, so the ring runs ahead
// over rows and layers. Which warp sums which token depends on the row's own context alone, so its bits do not depend
// on its neighbours.
#pragma once
#include "gemv.cuh"

constexpr int STRIPE = WARPS * 8;           // tokens that a block takes at a time
constexpr int KEY_LOADS = HEAD_DIM / 32, VALUE_LOADS = HEAD_DIM / 64;  // 16-byte loads a token and lane
constexpr float LOG2E = 1.44269504f;
static_assert(GROUP <= 8, "a query head in each row of the matrix instruction");

DEV int slot_of(Context& c, int row, int token) {
  const int page = token >> c.p.page_shift;
  return (__ldg(c.s.control.pages[row] + page) << c.p.page_shift) + (token - (page << c.p.page_shift));
}

DEV float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// What does not change from layer to layer is read once, when the step begins.
DEV void read_rows(Context& c) {
  Control& k = c.s.control;
  const int split = c.block % SPLITS;
  for (int i = c.thread; i < c.rows * HEAD_DIM; i += THREADS) {
    const int row = i / HEAD_DIM, d = i % HEAD_DIM;
    k.rotary[row][d] = c.p.rotary[c.p.positions[row] * HEAD_DIM + d];
  }
  for (int i = c.thread; i < 2 * LAYERS; i += THREADS) k.pools[i / 2][i % 2] = (const u8*)c.p.pools[i];
  if (c.thread < c.rows) {
    const int row = c.thread, total = (int)c.p.positions[row] + 1;
    const int each = (total + SPLITS - 1) / SPLITS;
    k.first[row] = c.p.row_first[row];
    k.begin[row] = min(total, split * each);
    k.end[row] = min(total, (split + 1) * each);
    k.cached[row] = (int)c.p.positions[c.p.row_first[row]];
    k.own[row] = total - 1;
    k.pages[row] = c.p.page_table + (long)c.p.row_request[row] * c.p.table_stride;
  }
  block_sync();
  for (int i = c.thread; i < c.rows * KNOWN_SLOTS; i += THREADS) {
    const int row = i / KNOWN_SLOTS, token = k.begin[row] + i % KNOWN_SLOTS;
    if (token < k.end[row]) k.slot[row][i % KNOWN_SLOTS] = slot_of(c, row, token);
  }
  block_sync();
}
DEV void unpack8(uint4 u, float (&x)[8]) {
  x[0] = bf_low(u.x); x[1] = bf_high(u.x); x[2] = bf_low(u.y); x[3] = bf_high(u.y);
  x[4] = bf_low(u.z); x[5] = bf_high(u.z); x[6] = bf_low(u.w); x[7] = bf_high(u.w);
}

constexpr int EACH = HEAD_DIM / 32;  // elements of a head in a lane: lane, lane + 32, ...
struct HeadNorms { unsigned short query[EACH], key[EACH]; };
DEV void load_head_norms(Context& c, int layer, HeadNorms& norms) {
  if constexpr (QK_NORM) {
    const unsigned short* at = (const unsigned short*)c.p.head_norms + (long)layer * 2 * HEAD_DIM + c.lane;
#pragma unroll
    for (int e = 0; e < EACH; e++) { norms.query[e] = at[e * 32]; norms.key[e] = at[HEAD_DIM + e * 32]; }
  }
}
// Heads of q, k and v of all rows, a warp each: normalise (Qwen3), rotate, leave in shared memory for the block. The
// block whose split holds a row's own token also writes its key and value to the cache.
DEV void prepare_heads(Context& c, const HeadNorms& norms, int head, u8* k_pool, u8* v_pool) {
  Control& k = c.s.control;
#pragma unroll 1
  for (int item = c.warp; item < c.rows * (GROUP + 2); item += WARPS) {
    const int row = item / (GROUP + 2), part = item % (GROUP + 2);  // GROUP queries, then key, then value
    const u32* at = c.now + row * ROW_WORDS + W_QKV + head * HEAD_ROWS + part * HEAD_DIM + c.lane;
    float x[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) x[e] = __uint_as_float(load_exchange_word(at + e * 32));
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (__float_as_uint(x[e]) == EMPTY) x[e] = __uint_as_float(gather_word(c, at + e * 32, 2));
    __syncwarp();
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
        const float cosine = k.rotary[row][e * 32 + c.lane], sine = k.rotary[row][HEAD_DIM / 2 + e * 32 + c.lane];
        x[e] = a * cosine - b * sine;
        x[e + EACH / 2] = b * cosine + a * sine;
      }
    }
    if (part < GROUP) {
#pragma unroll
      for (int e = 0; e < EACH; e++)
        c.s.query[row][part * HEAD_DIM + e * 32 + c.lane] = (unsigned short)bf_pair(x[e], 0.f);
    } else {
      const int own = k.own[row];
      const bool write = own >= k.begin[row] && own < k.end[row];
      u8* pool = part == GROUP ? k_pool : v_pool;
      const long slot = write ? slot_of(c, row, own) : 0;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const unsigned short value = (unsigned short)bf_pair(x[e], 0.f);
        c.s.fresh[part - GROUP][row][e * 32 + c.lane] = value;
        if (write)
          ((unsigned short*)pool)[slot * c.p.slot_stride + head * c.p.head_stride + e * 32 + c.lane] = value;
      }
    }
  }
}

// The next unit to copy: this warp's tokens base to base + 7 of a row of a layer.
struct Cursor { int layer, row, base, slot; };

// Piece i of PIECES of the next unit, copied over the unit last read (`seen` comes from it) without waiting. Tokens that
// are not cached become zeros.
constexpr int PIECES = HEAD_DIM / 32;
DEV void copy_piece(Context& c, const Cursor& at, int i, u32 seen) {
  if (at.layer == LAYERS) return;
  const Control& k = c.s.control;
  const int head = c.block / SPLITS, last = min(k.end[at.row], k.cached[at.row]);
  const u32 to = after(c, seen, c.units + at.slot * UNIT);
  const int index = i * 32 + c.lane, t = index / (HEAD_DIM / 8), piece = index % (HEAD_DIM / 8);
  const int token = at.base + t, known = token - k.begin[at.row];
  const bool cached = token < last;
  long slot = 0;
  if (cached) slot = known < KNOWN_SLOTS ? k.slot[at.row][known] : slot_of(c, at.row, token);
  const long from = (slot * c.p.slot_stride + head * c.p.head_stride + piece * 8) * 2;
  copy_async(to + t * KEY_STRIDE + piece * 16, k.pools[at.layer][0] + from, cached);
  copy_async(to + 8 * KEY_STRIDE + t * VALUE_STRIDE + piece * 16, k.pools[at.layer][1] + from, cached);
}
DEV void next_unit(Context& c, Cursor& at) {
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (at.layer == LAYERS) return;
  const Control& k = c.s.control;
  at.base += STRIPE;
  if (at.base >= k.end[at.row]) {
    if (++at.row == c.rows) { at.row = 0; at.layer++; }
    at.base = k.begin[at.row] + c.warp * 8;
  }
  if (++at.slot == UNITS) at.slot = 0;
}
DEV void copy_unit(Context& c, Cursor& at, u32 seen) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) copy_piece(c, at, i, seen);
  next_unit(c, at);
}

struct Accumulator {
  float top, sum;                // of head g; the sum over this lane's tokens alone
  float out[VALUE_LOADS][8][4];  // head g; elements 64 i + 16 q + j in [i][j][0], + 8 in [i][j][1]
};
// Weights of 8 tokens, packed as the A operand. `keys` is the address of token g's key pieces in shared memory.
DEV u32 score(Context& c, const uint4 (&query)[KEY_LOADS], u32 keys, int left, Accumulator& acc) {
  float s[2][4] = {};
#pragma unroll
  for (int i = 0; i < KEY_LOADS; i++) {
    const int piece = i * 4 + c.q;
    const uint4 key = load_shared(keys + piece * 16);
    mma(s[0], query[i].x, query[i].y, key.x, key.y);
    mma(s[1], query[i].z, query[i].w, key.z, key.w);
  }
  const float scale = rsqrtf((float)HEAD_DIM) * LOG2E;
  const float s0 = 2 * c.q < left ? (s[0][0] + s[1][0]) * scale : -1e30f;
  const float s1 = 2 * c.q + 1 < left ? (s[0][1] + s[1][1]) * scale : -1e30f;
  float top = fmaxf(acc.top, fmaxf(s0, s1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float shrink = fast_exp2(acc.top - top);
  acc.top = top;
#pragma unroll
  for (int i = 0; i < VALUE_LOADS; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) { acc.out[i][j][0] *= shrink; acc.out[i][j][1] *= shrink; }
  const u32 weight = bf_pair(2 * c.q < left ? fast_exp2(s0 - top) : 0.f, 2 * c.q + 1 < left ? fast_exp2(s1 - top) : 0.f);
  acc.sum = acc.sum * shrink + bf_low(weight) + bf_high(weight);
  return weight;
}
// `even` and `odd` are the addresses of the value pieces of tokens 2q and 2q + 1.
DEV u32 accumulate(Context& c, u32 weight, u32 even, u32 odd, Accumulator& acc) {
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < VALUE_LOADS; i++) {
    const int piece = i * 8 + c.g;
    const uint4 x = load_shared(even + piece * 16);
    const uint4 y = load_shared(odd + piece * 16);
    seen ^= x.w ^ y.w;
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      mma8(acc.out[i][2 * j], weight, __byte_perm(a[j], b[j], 0x5410));
      mma8(acc.out[i][2 * j + 1], weight, __byte_perm(a[j], b[j], 0x7632));
    }
  }
  return seen;
}
// One unit: tokens from the ring, this step's own from where `prepare_heads` left them.
DEV u32 attend(Context& c, const uint4 (&query)[KEY_LOADS], int row, int base, int slot, Accumulator& acc) {
  const Control& k = c.s.control;
  const int cached = k.cached[row], end = k.end[row], newest = k.own[row];
  const u32 unit = c.units + slot * UNIT;
  // Tokens after the row's own have no row; their weights are zero, any finite value does.
  auto fresh_at = [&](int which, int token) {
    return shared_address(c.s.fresh[which][k.first[row] + min(token, newest) - cached]);
  };
  const int t = base + c.g, even = base + 2 * c.q, odd = even + 1;
  const u32 values = unit + 8 * KEY_STRIDE;
  const u32 weight = score(c, query, t >= cached ? fresh_at(0, t) : unit + c.g * KEY_STRIDE, end - base, acc);
  return accumulate(c, weight, even >= cached ? fresh_at(1, even) : values + 2 * c.q * VALUE_STRIDE,
                    odd >= cached ? fresh_at(1, odd) : values + (2 * c.q + 1) * VALUE_STRIDE, acc);
}

// Joins the warps of the block and publishes the split's output and log-sum.
DEV void publish_split(Context& c, int row, int head, int split, Accumulator& acc) {
  acc.sum += __shfl_xor_sync(~0u, acc.sum, 1);
  acc.sum += __shfl_xor_sync(~0u, acc.sum, 2);
  if (c.g < GROUP) {
#pragma unroll
    for (int i = 0; i < VALUE_LOADS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float* at = part_now(c) + c.warp * GROUP_DIM + c.g * HEAD_DIM + i * 64 + c.q * 16 + half * 8;
        *(float4*)at = make_float4(acc.out[i][0][half], acc.out[i][1][half], acc.out[i][2][half], acc.out[i][3][half]);
        *(float4*)(at + 4) =
            make_float4(acc.out[i][4][half], acc.out[i][5][half], acc.out[i][6][half], acc.out[i][7][half]);
      }
    if (c.q == 0) *(float2*)c.s.merge[c.part_parity][c.warp][c.g] = make_float2(acc.top, acc.sum);
  }
  block_sync();
#pragma unroll
  for (int i = 0; i < GROUP_DIM / THREADS; i++) {
    const int d = c.thread + i * THREADS, h = d / HEAD_DIM;
    float2 m[WARPS];
    float top = -1e30f, sum = 0.f, out = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      m[w] = *(const float2*)c.s.merge[c.part_parity][w][h];
      top = fmaxf(top, m[w].x);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float shrink = fast_exp2(m[w].x - top);
      sum = fmaf(m[w].y, shrink, sum);
      out = fmaf(part_now(c)[w * GROUP_DIM + d], shrink, out);
    }
    const int at = head * SPLITS + split;
    publish(c, row, W_PART + at * GROUP_DIM + d, __float_as_uint(sum > 0.f ? out / sum : 0.f));
    if (d % HEAD_DIM == 0)
      publish(c, row, W_LSE + at * GROUP + h, __float_as_uint(sum > 0.f ? top + __log2f(sum) : -1e30f));
  }
  c.part_parity ^= 1;
}

struct Ahead {      // what attention has under way for later layers
  Cursor cursor;
  int slot;         // the next unit to use
  HeadNorms norms;  // of the next layer
};
DEV void attention(Context& c, int layer, Ahead& ahead) {
  const int head = c.block / SPLITS, split = c.block % SPLITS;
  prepare_heads(c, ahead.norms, head, (u8*)c.s.control.pools[layer][0], (u8*)c.s.control.pools[layer][1]);
  block_sync();
  stamp(c, layer, 10);
  if (layer + 1 < LAYERS) load_head_norms(c, layer + 1, ahead.norms);
#pragma unroll 1
  for (int row = 0; row < c.rows; row++) {
    uint4 query[KEY_LOADS];
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++)
      query[i] = c.g < GROUP ? *(const uint4*)&c.s.query[row][c.g * HEAD_DIM + i * 32 + 8 * c.q] : make_uint4(0, 0, 0, 0);
    Accumulator acc = {};
    acc.top = -1e30f;
    const int end = c.s.control.end[row];
    int base = c.s.control.begin[row] + c.warp * 8;
    u32 seen;
#pragma unroll 1
    while (true) {
      asm volatile("cp.async.wait_group %0;" ::"n"(UNITS - 1) : "memory");
      __syncwarp();
      seen = attend(c, query, row, base, ahead.slot, acc);
      __syncwarp();
      if (++ahead.slot == UNITS) ahead.slot = 0;
      base += STRIPE;
      if (base >= end) break;
      copy_unit(c, ahead.cursor, seen);
    }
    stamp(c, layer, 12);
    publish_split(c, row, head, split, acc);
    stamp(c, layer, 13);
    copy_unit(c, ahead.cursor, seen);
  }
  stamp(c, layer, 11);
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
    const int at = head * SPLITS + split;
    uint4 v = make_uint4(0, 0, 0, 0);
    float lse = -1e30f;
    if (active) {
      const u32* now = c.now + row * ROW_WORDS;
      const u32 *pv = now + W_PART + at * GROUP_DIM + d, *pl = now + W_LSE + at * GROUP + d / HEAD_DIM;
      u32 polls = 0, word;
      do {
        v = load_exchange(pv);
        word = load_exchange_word(pl);
      } while ((greatest(v) == EMPTY || word == EMPTY) && may_wait(c, polls, 3));
      lse = __uint_as_float(word);
    }
    __syncwarp();
    float top = lse;
#pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float weight = fast_exp2(lse - top), total = weight;
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
      publish_to_all(c, row, W_ATTN + (head * GROUP_DIM + d) / 2 + split, word);
    }
  }
}
