// Attention of one KV head over one split of the context, then the sum over splits.
// A warp takes 8 tokens at a time (a unit) through the matrix instruction: scores = queries (A: head g in row g) x keys
// (B: a token a column), output = weights (A) x values (B). With lane (g, q): keys of token g, elements 8 q to 8 q + 7
// of every 32; values of tokens 2q and 2q + 1, elements 8 g to 8 g + 7 of every 64. The layouts of scores and weights
// agree, so nothing moves between lanes but the maximum.
// Units lie in a ring of shared memory for each warp, filled by four warps that do nothing else: the cache does not depend
// on this step, so they run ahead over rows and layers. Which warp sums which token depends on the row's own context alone, so its bits do not depend
// on its neighbours.
#pragma once
#include "gemv.cuh"

constexpr int STRIPE = WARPS * 8;           // tokens that a block takes at a time
constexpr int KEY_LOADS = HEAD_DIM / 32, VALUE_LOADS = HEAD_DIM / 64;  // 16-byte loads a token and lane
constexpr float LOG2E = 1.44269504f;
static_assert(GROUP <= 8, "a query head in each row of the matrix instruction");

DEV int slot_of(const Params& p, const Shared& s, int row, int token) {
  const int page = token >> p.page_shift;
  return (__ldg(s.control.pages[row] + page) << p.page_shift) + (token - (page << p.page_shift));
}

// What does not change from layer to layer is read once, when the step begins. A row of padding computes the first real
// row again, to the same bits and the same place; where all are padding, they compute one token and write to the scratch.
DEV void read_rows(Context& c) {
  Control& k = c.s.control;
  const int split = c.block % SPLITS;
  u32 real = ~0u;
  if (c.p.write_slots) {
    real = 0;
#pragma unroll 1
    for (int row = 0; row < c.rows; row++) real |= (u32)(c.p.write_slots[row] >= 0) << row;
  }
  if (c.thread < c.rows) {
    const int row = c.thread, source = real >> row & 1 ? row : max(0, __ffs(real) - 1);
    int request = 0;
#pragma unroll 1
    for (int q = 1; q < c.p.requests; q++) request += c.p.query_start[q] <= source;
    const int first = c.p.query_start[request], total = real ? (int)c.p.positions[source] + 1 : 1;
    const int each = (total + SPLITS - 1) / SPLITS;
    k.token[row] = (int)c.p.tokens[source];
    k.first[row] = first;
    k.begin[row] = min(total, split * each);
    k.end[row] = min(total, (split + 1) * each);
    k.cached[row] = real ? (int)c.p.positions[first] : 0;
    k.own[row] = total - 1;
    k.pages[row] = c.p.page_table + (long)(c.p.table_rows ? c.p.table_rows[request] : request) * c.p.table_stride;
    k.own_slot[row] = real ? slot_of(c.p, c.s, row, total - 1) : 0;
  }
  for (int i = c.thread; i < 2 * LAYERS; i += THREADS) k.pools[i / 2][i % 2] = (const u8*)(real ? c.p.pools[i] : c.p.scratch);
  block_sync();
  for (int i = c.thread; i < c.rows * HEAD_DIM; i += THREADS) {
    const int row = i / HEAD_DIM, d = i % HEAD_DIM;
    k.rotary[row][d] = c.p.rotary[(long)k.own[row] * HEAD_DIM + d];
  }
  block_sync();
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
  const int items = c.rows * (GROUP + 2);
  auto words = [&](int item) {
    return c.now + item / (GROUP + 2) * ROW_WORDS + W_QKV + head * HEAD_ROWS + item % (GROUP + 2) * HEAD_DIM + c.lane;
  };
  u32 coming[EACH];  // the next item's words
#pragma unroll
  for (int e = 0; e < EACH; e++) coming[e] = c.warp < items ? load_exchange_word(words(c.warp) + e * 32) : 0;
#pragma unroll 1
  for (int item = c.warp; item < items; item += WARPS) {
    const int row = item / (GROUP + 2), part = item % (GROUP + 2);  // GROUP queries, then key, then value
    float x[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) x[e] = __uint_as_float(coming[e]);
    if (item + WARPS < items)
#pragma unroll
      for (int e = 0; e < EACH; e++) coming[e] = load_exchange_word(words(item + WARPS) + e * 32);
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (__float_as_uint(x[e]) == EMPTY) x[e] = __uint_as_float(gather_word(c, words(item) + e * 32, 2));
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
      const long slot = k.own_slot[row];
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

// The next unit to copy for one consumer warp: its tokens base to base + 7 of a row of a layer.
struct Cursor {
  int warp, layer, row, base, slot;
  u32 phase;
  int where;  // lanes 0 to 7: the cache slot of token base + lane, looked up a unit ahead; -1 if it is not cached
};
DEV void look_up(const Params& p, const Shared& s, Cursor& at, int lane) {
  const Control& k = s.control;
  const int token = at.base + lane;
  at.where = lane < 8 && token < min(k.end[at.row], k.cached[at.row]) ? slot_of(p, s, at.row, token) : -1;
}
// Fills a unit with 16-byte copies; tokens that are not cached become zeros. Fast, but loads return in order within a
// multiprocessor: what is polled for waits behind these. PLAIN_COPIES does the same by loads and stores, and every
// lane says for itself that it has read a unit, for tools that know of no other way.
DEV void copy_pieces(const Params& p, u32 to, const u8* keys, const u8* values, long head, int where, u32 full, int lane) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const int index = i * 32 + lane, t = index / (HEAD_DIM / 8), piece = index % (HEAD_DIM / 8);
    const int slot = __shfl_sync(~0u, where, t);
    const long from = ((slot < 0 ? 0 : slot) * p.slot_stride + head + piece * 8) * 2;
#if PLAIN_COPIES
    const uint4 none = make_uint4(0, 0, 0, 0);
    store_shared(to + t * KEY_STRIDE + piece * 16, slot >= 0 ? load_stream(keys + from) : none);
    store_shared(to + 8 * KEY_STRIDE + t * VALUE_STRIDE + piece * 16, slot >= 0 ? load_stream(values + from) : none);
  }
  barrier_arrive(full);
#else
    copy_async(to + t * KEY_STRIDE + piece * 16, keys + from, slot >= 0);
    copy_async(to + 8 * KEY_STRIDE + t * VALUE_STRIDE + piece * 16, values + from, slot >= 0);
  }
  barrier_arrive_after_copies(full);
#endif
}
// The same with a bulk copy for each key and each value, which no other load waits for, at a tenth of the rate. Tokens
// that are not cached keep what was there: their weights are zero, and it is finite.
DEV void copy_tokens(const Params& p, u32 to, const u8* keys, const u8* values, long head, int where, u32 full, int lane,
                     u64 policy) {
  const int slot = __shfl_sync(~0u, where, lane % 8);
  const u32 bytes = __popc(__ballot_sync(~0u, where >= 0)) * HEAD_DIM * 4;
  if (lane == 0)
    barrier_expect(full, bytes);
  else
    barrier_arrive(full);
  __syncwarp();
  if (lane < 16 && slot >= 0) {
    to += lane < 8 ? lane * KEY_STRIDE : 8 * KEY_STRIDE + (lane - 8) * VALUE_STRIDE;
    copy_bulk(to, (lane < 8 ? keys : values) + (slot * p.slot_stride + head) * 2, HEAD_DIM * 2, full, policy);
  }
}
DEV void copy_unit(const Params& p, Shared& s, u32 units, Cursor& at, int lane, bool patient, u64 policy) {
  const Control& k = s.control;
  const long head = blockIdx.x / SPLITS * p.head_stride;
  const u32 to = units + (at.warp * UNITS + at.slot) * UNIT, full = shared_address(&s.unit_full[at.warp][at.slot]);
  const u8 *keys = k.pools[at.layer][0], *values = k.pools[at.layer][1];
  if (patient)
    copy_tokens(p, to, keys, values, head, at.where, full, lane, policy);
  else
    copy_pieces(p, to, keys, values, head, at.where, full, lane);
  at.base += STRIPE;
  if (at.base >= k.end[at.row]) {
    if (++at.row == p.rows) { at.row = 0; at.layer++; }
    at.base = k.begin[at.row] + at.warp * 8;
  }
  if (++at.slot == UNITS) { at.slot = 0; at.phase ^= 1; }
  look_up(p, s, at, lane);
}
// What a copying warp does: units for two consumer warps, as they become empty, in whatever order that is.
DEV void copy_cache(const Params& p, Shared& s, u32 units, int warp, int lane) {
  // One row of a short context: nothing is urgent, and the copies wait for the stage that streams most weights, where no
  // other block is waited for.
  const int tokens = s.control.end[0] - s.control.begin[0];
  const bool patient = !PLAIN_COPIES && p.rows == 1 && tokens <= 2 * STRIPE;
  const int lead = tokens <= STRIPE ? UNITS : max(1, UNITS / 2);  // layers that the ring holds
  const int end = runs(p, 2) ? end_layer(p) : 0;
  const u64 policy = read_once_policy();
  Cursor at[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    at[j] = {warp + j * WARPS / 2, first_layer(p), 0, s.control.begin[0] + (warp + j * WARPS / 2) * 8, 0, 1};
    look_up(p, s, at[j], lane);
  }
  long long since = clock_now();
#pragma unroll 1
  while (at[0].layer < end || at[1].layer < end) {
    bool idle = true;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (at[j].layer < end && !(PACED && patient && __any_sync(~0u, s.progress <= at[j].layer - lead)) &&
          __all_sync(~0u, barrier_test(shared_address(&s.unit_empty[at[j].warp][at[j].slot]), at[j].phase))) {
        copy_unit(p, s, units, at[j], lane, patient, policy);
        idle = false;
        since = clock_now();
      }
    if (!idle) continue;
    // The warps that compute wait at most once for every stage, and then go on: this is beyond all of their waits.
    if (__any_sync(~0u, clock_now() - since > p.spin_limit * 4096ll)) {
      if (lane == 0) store_exchange(p.state + 1, 1u + blockIdx.x * 16 + 10);
      break;
    }
    __nanosleep(IDLE_NS);  // polling takes shared memory's time from the warps that compute
  }
  copies_done();
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

// Leaves a warp's part of a row's attention for `publish_splits`.
DEV void store_attention(Context& c, int place, Accumulator& acc) {
  acc.sum += __shfl_xor_sync(~0u, acc.sum, 1);
  acc.sum += __shfl_xor_sync(~0u, acc.sum, 2);
  if (c.g >= GROUP) return;
#pragma unroll
  for (int i = 0; i < VALUE_LOADS; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* at = part_now(c) + (place * WARPS + c.warp) * GROUP_DIM + c.g * HEAD_DIM + i * 64 + c.q * 16 + half * 8;
      *(float4*)at = make_float4(acc.out[i][0][half], acc.out[i][1][half], acc.out[i][2][half], acc.out[i][3][half]);
      *(float4*)(at + 4) =
          make_float4(acc.out[i][4][half], acc.out[i][5][half], acc.out[i][6][half], acc.out[i][7][half]);
    }
  if (c.q == 0) *(float2*)c.s.merge[c.part_parity][place][c.warp][c.g] = make_float2(acc.top, acc.sum);
}
// Joins the warps of the block and publishes the split's output and log-sum of some rows.
DEV void publish_splits(Context& c, int row0, int rows, int head, int split) {
  block_sync();
#pragma unroll 1
  for (int i = c.thread; i < rows * GROUP_DIM; i += THREADS) {
    const int place = i / GROUP_DIM, d = i % GROUP_DIM, h = d / HEAD_DIM;
    const float* part = part_now(c) + place * WARPS * GROUP_DIM + d;
    float2 m[WARPS];
    float top = -1e30f, sum = 0.f, out = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      m[w] = *(const float2*)c.s.merge[c.part_parity][place][w][h];
      top = fmaxf(top, m[w].x);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float shrink = fast_exp2(m[w].x - top);
      sum = fmaf(m[w].y, shrink, sum);
      out = fmaf(part[w * GROUP_DIM], shrink, out);
    }
    const int at = head * SPLITS + split;
    publish(c, row0 + place, W_PART + at * GROUP_DIM + d, __float_as_uint(sum > 0.f ? out / sum : 0.f));
    if (d % HEAD_DIM == 0)
      publish(c, row0 + place, W_LSE + at * GROUP + h, __float_as_uint(sum > 0.f ? top + __log2f(sum) : -1e30f));
  }
  c.part_parity ^= 1;
}

struct Ahead {      // what attention has under way for later layers
  int slot;         // the next unit to use
  u32 phase;
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
#pragma unroll 1
    while (true) {
      wait_barrier(c, shared_address(&c.s.unit_full[c.warp][ahead.slot]), ahead.phase, 9);
      const u32 seen = attend(c, query, row, base, ahead.slot, acc);
      __syncwarp();
      if (PLAIN_COPIES || c.lane == 0) barrier_arrive(after(c, seen, shared_address(&c.s.unit_empty[c.warp][ahead.slot])));
      if (++ahead.slot == UNITS) { ahead.slot = 0; ahead.phase ^= 1; }
      base += STRIPE;
      if (base >= end) break;
    }
    stamp(c, layer, 12);
    store_attention(c, row % BATCH, acc);
    if (row % BATCH == BATCH - 1 || row == c.rows - 1) publish_splits(c, row - row % BATCH, row % BATCH + 1, head, split);
    stamp(c, layer, 13);
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
