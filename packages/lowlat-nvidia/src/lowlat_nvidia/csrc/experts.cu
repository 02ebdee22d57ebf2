// Routed experts of a mixture for at most 8 rows: router, products (gate and up, then down), weighted sum. Three kernels
// under programmatic dependent launch. The products start while the router runs and need nothing from it but logits.
//
// One launch for all products, a block a multiprocessor. Weights come through a ring of pages, from the first tile of gate
// and up to the last of down, without regard to what is waited for meanwhile. Activations go to other blocks as words that
// carry the launch's tag, so blocks need no barrier between them. 16 warps multiply and wait for nothing but their next page;
// two more sum over them, publish, and fill pages again.
#include "experts.cuh"

constexpr int SUM_THREADS = 256, ROUTER_EXPERTS = 4, ROUTER_THREADS = HIDDEN / 16, ROUTER_WARPS = ROUTER_THREADS / 32;
// Gate and up: tiles of 8 and the 8 that belong to them; all warps share a tile and split its inputs.
constexpr int FIRST_PAIRS = HIDDEN / (64 * WARPS), FIRST_TILES = INNER / 8, FIRST_PART = FIRST_PAIRS * PAIR_ALL;
constexpr int PAGE_PARTS = 8, PARTS_PAGES = WARPS / PAGE_PARTS;  // parts of a page; pages of a tile
// Down: a warp takes tiles of 16 outputs over all inputs.
constexpr int SECOND_PAIRS = INNER / 64, SECOND_TILES = HIDDEN / 16, SECOND_TILE = SECOND_PAIRS * PAIR_ALL;
constexpr int PAGE_TILES = 4;  // tiles of a page
constexpr int DEPTH = SECOND_PAIRS % 3 == 0 ? 3 : SECOND_PAIRS % 2 == 0 ? 2 : 1;  // pairs that a warp has loaded ahead
constexpr int PLACES = PAGES * PAGE_TILES, BUFFERS = 4;  // of tiles of down; of a tile's partial sums
constexpr int PAGE = PAGE_PARTS * FIRST_PART > PAGE_TILES * SECOND_TILE ? PAGE_PARTS * FIRST_PART : PAGE_TILES * SECOND_TILE;
static_assert(PLACES <= 32 && PARTS_PAGES * PAGE_TILES <= 32 && PAGES / 2 <= 2 * PARTS_PAGES, "a lane fills a place");
static_assert(HIDDEN % (64 * WARPS) == 0 && INNER % 64 == 0 && ROUTER_THREADS % 32 == 0, "sizes");

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) expert_router(const Params p) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  wait_for_earlier_kernel();
  let_next_kernel_start();  // the rows are there: what comes next prepares them meanwhile
  uint4 w[ROUTER_EXPERTS][2];
  const int expert = blockIdx.x * ROUTER_EXPERTS;
#pragma unroll
  for (int e = 0; e < ROUTER_EXPERTS; e++)
#pragma unroll
    for (int c = 0; c < 2; c++)
      w[e][c] = load_stream(p.gate + ((long long)(expert + e) * HIDDEN + (c * ROUTER_THREADS + thread) * 8) * 2);
  __shared__ float part[ROUTER_WARPS][ROUTER_EXPERTS * MAX_ROWS];
#pragma unroll 1
  for (int row = 0; row < p.rows; row++) {
    float sum[ROUTER_EXPERTS] = {};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint4 x = *(const uint4*)(p.hidden + ((long long)row * HIDDEN + (c * ROUTER_THREADS + thread) * 8) * 2);
#pragma unroll
      for (int e = 0; e < ROUTER_EXPERTS; e++) {
        const u32* a = (const u32*)&w[e][c];
        const u32* b = (const u32*)&x;
#pragma unroll
        for (int i = 0; i < 4; i++) sum[e] += bf_low(a[i]) * bf_low(b[i]) + bf_high(a[i]) * bf_high(b[i]);
      }
    }
#pragma unroll
    for (int e = 0; e < ROUTER_EXPERTS; e++) {
#pragma unroll
      for (int o = 16; o; o /= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], o);
      if (lane == 0) part[warp][row * ROUTER_EXPERTS + e] = sum[e];
    }
  }
  __syncthreads();
  if (thread < p.rows * ROUTER_EXPERTS) {
    float sum = 0;
    for (int i = 0; i < ROUTER_WARPS; i++) sum += part[i][thread];
    p.logits[thread / ROUTER_EXPERTS * EXPERTS + expert + thread % ROUTER_EXPERTS] = sum;
  }
}

struct Shared {
  union {
    alignas(16) float parts[BUFFERS][WARPS][16 * MAX_ROWS];  // gate and up
    alignas(16) uint4 rows[2][SECOND_PAIRS * 2][32];         // down: a block's outputs come from at most two experts
    float2 scores[MAX_ROWS * EXPERTS];                       // before both
  };
  u32 most[2][WARPS][MAX_ROWS];
  float units[2][MAX_ROWS];
  Choice choice;
  // Barriers: pages of gate and up and tiles of down that have come, tiles of down that have been read, partial sums that
  // are there, and that have been taken.
  u64 full[PAGES], tiles[PLACES], empty[PLACES], whole[BUFFERS], taken[BUFFERS];
};
static_assert(sizeof(Shared) <= RING, "the ring lies behind");
// What a block does. Tiles of gate and up go round the blocks, so that all but the last experts' are done long before the
// end, and down of those need not wait. Tiles of down lie side by side; they even out what whole tiles of the former leave
// uneven, and blocks that have down of the last experts get fewer, because they wait for them.
struct Work {
  int firsts, second, second_end;
};
constexpr u32 WAITING = 128, TILE = WARPS * FIRST_PAIRS;  // in pairs; pairs of a tile of gate and up
static_assert(MAX_ROWS * TOP * (FIRST_TILES * TILE + SECOND_TILES * SECOND_PAIRS) < (1 << 23), "products fit 32 bits");
DEV int first_item(int k) { return blockIdx.x + k * gridDim.x; }
DEV Work share_work(u32 experts) {
  const u32 blocks = gridDim.x, block = blockIdx.x, items = experts * FIRST_TILES, seconds = experts * SECOND_TILES;
  const u32 each = items / blocks, rest = items - each * blocks, pairs = seconds * SECOND_PAIRS;
  const int firsts = each + (block < rest);
  if (pairs < (TILE + WAITING + 1) * blocks)
    return {firsts, (int)(seconds * block / blocks), (int)(seconds * (block + 1) / blocks)};
  const u32 last = 3 * blocks / experts, all = items * TILE + pairs + last * WAITING;
  auto before = [&](u32 b) {  // tiles of down of blocks before b
    const u32 other = (each * b + min(b, rest)) * TILE + (b + last > blocks ? b + last - blocks : 0) * WAITING;
    return (int)((all * b / blocks - other) / SECOND_PAIRS);
  };
  return {firsts, before(block), before(block + 1)};
}

// The ring. Pages are numbered in the order in which they are filled: two for a tile of gate and up, then those of down.
DEV u32 page_address(int number) { return shared_address(dynamic_shared() + RING) + number % PAGES * PAGE; }
DEV void wait_for(const Params& p, u64* barrier, u32 phase, u32 stage) {
  u32 polls = 0;
  while (!barrier_done(shared_address(barrier), phase))
    if (++polls > p.spin_limit) {
      *p.error = stage;
      break;
    }
}
// One thread: the tile of down that is number `n` of this block, to its place.
DEV void copy_second(const Params& p, Shared& s, const Work& work, int n, u64 policy) {
  if (p.phases < 2 || work.second + n >= work.second_end) return;
  const int item = work.second + n, place = n % PLACES, before = work.firsts * PARTS_PAGES;
  const long long tile = (long long)s.choice.experts[item / SECOND_TILES] * SECOND_TILES + item % SECOND_TILES;
  const u32 barrier = shared_address(&s.tiles[place]);
  barrier_expect(barrier, SECOND_TILE);
  copy_bulk(page_address(before + n / PAGE_TILES) + place % PAGE_TILES * SECOND_TILE, p.second + tile * SECOND_TILE,
            SECOND_TILE, barrier, policy);
}
// PAGE_TILES threads fill a page for the first time, or again when a tile of gate and up is done with.
DEV void fill_page(const Params& p, Shared& s, const Work& work, int number, int part, u64 policy) {
  const int before = work.firsts * PARTS_PAGES, item = first_item(number / PARTS_PAGES);
  if (number >= before) return copy_second(p, s, work, (number - before) * PAGE_TILES + part, policy);
  if (part) return;
  constexpr int BYTES = PAGE_PARTS * FIRST_PART;
  const long long tile = (long long)s.choice.experts[item / FIRST_TILES] * FIRST_TILES + item % FIRST_TILES;
  const u32 barrier = shared_address(&s.full[number % PAGES]);
  barrier_expect(barrier, BYTES);
  copy_bulk(page_address(number), p.first + (tile * PARTS_PAGES + number % PARTS_PAGES) * BYTES, BYTES, barrier, policy);
}

// A warp's share of the rows, which it keeps in registers, and what its sums are worth for rows 2q and 2q + 1.
struct Rows {
  uint4 x[2 * FIRST_PAIRS];
  float even, odd;
};
DEV void fetch_rows(const Params& p, Rows& rows, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * FIRST_PAIRS; i++) {
    const long long place = (long long)(lane / 4) * HIDDEN + (warp * 2 * FIRST_PAIRS + i) * GROUP + lane % 4 * 8;
    rows.x[i] = warp < WARPS && lane / 4 < p.rows ? *(const uint4*)(p.hidden + place * 2) : make_uint4(0, 0, 0, 0);
  }
}
DEV void quantise_rows(Rows& rows, int lane) {
  const u32 unit = quantise_share<2 * FIRST_PAIRS>(rows.x, [&](int i, float(&v)[8]) { unpack_bf16(rows.x[i], v); });
  rows.even = FP4_TO_HALF * power_value(__shfl_sync(~0u, unit, lane % 4 * 8));
  rows.odd = FP4_TO_HALF * power_value(__shfl_sync(~0u, unit, lane % 4 * 8 + 4));
}
// One warp sums a tile over all warps, applies the activation and publishes. Lane: output lane / 2, four rows; outputs 8
// to 15 are ups. Both halves of the warp take two rows each of what the other has loaded.
DEV void activate(const Params& p, Shared& s, int buffer, int lane, int item, u32 epoch) {
  float v[4] = {0, 0, 0, 0}, other[4];
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float4 add = *(const float4*)(s.parts[buffer][w] + lane * 4);
    v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) other[i] = __shfl_xor_sync(~0u, v[i], 16);
  if (lane == 0) barrier_arrive(shared_address(&s.taken[buffer]));
  const bool gates = lane < 16;
  const int slot = item / FIRST_TILES, n = item % FIRST_TILES * 8 + lane % 16 / 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane % 2 * 4 + (gates ? i : 2 + i);
    const float gate = fminf(gates ? v[i] : other[2 + i], LIMIT);
    const float up = fminf(fmaxf(gates ? other[i] : v[2 + i], -LIMIT), LIMIT);
    const long long place = ((long long)slot * MAX_ROWS + row) * INNER + n;
    if (row < p.rows) store_exchange(p.inner + place * 8, __float_as_uint(gate / (1.f + expf(-gate)) * up), epoch);
  }
}
DEV void multiply_first(const Params& p, Shared& s, const Rows& rows, const Work& work, int warp, int lane) {
  constexpr int NEXT = FIRST_PAIRS > 2 ? FIRST_PAIRS - 3 : 0;  // after this pair the next tile is waited for and loaded
  uint4 w[FIRST_PAIRS];
  u32 scales[FIRST_PAIRS], part = 0;
  auto go_to = [&](int k) {  // the tile that is loaded from now on
    const int number = k * PARTS_PAGES + warp / PAGE_PARTS;
    wait_for(p, &s.full[number % PAGES], number / PAGES & 1, 1);
    part = page_address(number) + warp % PAGE_PARTS * FIRST_PART;
  };
  auto load = [&](int i) {
    scales[i] = load_shared_word(part + FIRST_PAIRS * PAIR_BYTES + i * PAIR_SCALES + lane / 4 * 4);
    w[i] = load_shared(part + i * PAIR_BYTES + lane * 16);
  };
  if (work.firsts) go_to(0);
#pragma unroll
  for (int i = 0; i < FIRST_PAIRS; i++)
    if (work.firsts) load(i);
#pragma unroll 1
  for (int k = 0; k < work.firsts; k++) {
    const int buffer = k % BUFFERS;
    const bool more = k + 1 < work.firsts;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < FIRST_PAIRS; i++) {
      add_pair(sum, w[i], scales[i], rows.x[2 * i], rows.x[2 * i + 1]);
      if (i == NEXT && more) go_to(k + 1);
      if (i == NEXT && more)
        for (int j = 0; j < NEXT; j++) load(j);
      if (i >= NEXT && more) load(i);
    }
    if (k >= BUFFERS) wait_for(p, &s.taken[buffer], (k / BUFFERS - 1) & 1, 4);
    float* to = s.parts[buffer][warp] + lane / 4 * MAX_ROWS + lane % 4 * 2;
    *(float2*)to = make_float2(sum[0] * rows.even, sum[1] * rows.odd);
    *(float2*)(to + 8 * MAX_ROWS) = make_float2(sum[2] * rows.even, sum[3] * rows.odd);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.whole[buffer]));
  }
}
// The finishers take turns.
DEV void finish_first(const Params& p, Shared& s, const Work& work, int turn, int lane, u64 policy, u32 epoch) {
  // The second half of the ring: asked for when the first comes, or all would come late together. By the warp that will
  // fill the first half again, which cannot be late for it so.
  for (int page = 0; turn == 0 && page < PAGES / 2; page++) {
    if (page < work.firsts * PARTS_PAGES) wait_for(p, &s.full[page], 0, 1);
    if (lane < PAGE_TILES) fill_page(p, s, work, PAGES / 2 + page, lane, policy);
    __syncwarp();
  }
#pragma unroll 1
  for (int k = turn; k < work.firsts; k += FINISHERS) {
    wait_for(p, &s.whole[k % BUFFERS], k / BUFFERS & 1, 4);
    for (int tile = k ? k + 1 : 0; tile <= k + 1 && tile < work.firsts; tile++)  // all warps have read the next one, too
      if (lane < PARTS_PAGES * PAGE_TILES)
        fill_page(p, s, work, tile * PARTS_PAGES + PAGES + lane / PAGE_TILES, lane % PAGE_TILES, policy);
    __syncwarp();
    activate(p, s, k % BUFFERS, lane, first_item(k), epoch);
  }
}

// The activations of the experts of this block's outputs, as rows of matrix instructions. They come from other blocks.
DEV void take_activations(const Params& p, Shared& s, int first_slot, int slots, int warp, int lane, u32 epoch) {
  constexpr int GROUPS = INNER / GROUP, EACH = (2 * GROUPS + WARPS - 1) / WARPS;
  const int row = lane / 4;
  uint4 got[EACH][4], x[EACH];
  u32 powers[EACH], polls = 0, unit0 = 0, unit1 = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool wanted = i * WARPS + warp < slots * GROUPS && row < p.rows;
      got[i][j] = make_uint4(0, wanted ? ~epoch : epoch, 0, epoch);
    }
  bool missing = true;
  while (missing && polls <= p.spin_limit) {  // all that have not come are asked for at once
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int u = i * WARPS + warp;
      const u8* at = p.inner + (((long long)(first_slot + u / GROUPS) * MAX_ROWS + row) * INNER + u % GROUPS * GROUP +
                                lane % 4 * 8) * 8;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (got[i][j].y != epoch || got[i][j].w != epoch) got[i][j] = load_exchange(at + j * 16);
    }
    missing = false;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) missing |= got[i][j].y != epoch || got[i][j].w != epoch;
    if (++polls > p.spin_limit) *p.error = 3;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; j++) v[2 * j] = __uint_as_float(got[i][j].x), v[2 * j + 1] = __uint_as_float(got[i][j].z);
    powers[i] = group_power(group_largest(v));
    x[i] = rounded_half(v, powers[i]);
    const int u = i * WARPS + warp;
    if (u < GROUPS) unit0 = max(unit0, powers[i]);
    if (u >= GROUPS && u < slots * GROUPS) unit1 = max(unit1, powers[i]);
  }
  if (lane % 4 == 0) s.most[0][warp][row] = unit0, s.most[1][warp][row] = unit1;
  named_sync(2, THREADS);  // partial sums are no longer read, too: rows take their place
#pragma unroll
  for (int w = lane % 4; w < WARPS; w += 4) unit0 = max(unit0, s.most[0][w][row]), unit1 = max(unit1, s.most[1][w][row]);
#pragma unroll
  for (int o = 1; o < 4; o *= 2)
    unit0 = max(unit0, __shfl_xor_sync(~0u, unit0, o)), unit1 = max(unit1, __shfl_xor_sync(~0u, unit1, o));
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int u = i * WARPS + warp;
    if (u < slots * GROUPS) s.rows[u / GROUPS][u % GROUPS][lane] = in_units(x[i], powers[i], u < GROUPS ? unit0 : unit1);
  }
  if (warp == 0 && lane % 4 == 0) s.units[0][row] = power_value(unit0), s.units[1][row] = power_value(unit1);
  named_sync(1, 32 * WARPS);
}
// Where the outputs of an expert go for rows 2q and 2q + 1: row * TOP + place among the row's experts, or -1.
DEV void find_places(const Params& p, const Choice& c, int expert, int lane, int (&place)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane % 4 * 2 + i;
    place[i] = -1;
    if (row < p.rows)
      for (int k = 0; k < TOP; k++)
        if (c.chosen[row][k] == expert) place[i] = row * TOP + k;
  }
}
DEV void multiply_second(const Params& p, Shared& s, const Work& work, int first_slot, int warp, int lane) {
  const int before = work.firsts * PARTS_PAGES;
  u32 tile = 0, rows = 0, scales[DEPTH];
  uint4 w[DEPTH], x[DEPTH][2];
  auto go_to = [&](int n) {  // the tile that is loaded from now on
    const int place = n % PLACES;
    rows = shared_address(s.rows[(work.second + n) / SECOND_TILES - first_slot]) + lane * 16;
    tile = page_address(before + n / PAGE_TILES) + place % PAGE_TILES * SECOND_TILE;
    wait_for(p, &s.tiles[place], n / PLACES & 1, 2);
  };
  auto load = [&](int pair, int i) {
    scales[i] = load_shared_word(tile + SECOND_PAIRS * PAIR_BYTES + pair * PAIR_SCALES + lane / 4 * 4);
    w[i] = load_shared(tile + pair * PAIR_BYTES + lane * 16);
    x[i][0] = load_shared(rows + pair * 1024);
    x[i][1] = load_shared(rows + pair * 1024 + 512);
  };
  bool more = work.second + warp < work.second_end;
  if (more) go_to(warp);
  for (int i = 0; more && i < DEPTH; i++) load(i, i);
  int slot = -1, goes[2] = {-1, -1};
#pragma unroll 1
  for (int n = warp; more; n += WARPS) {
    const int item = work.second + n;
    if (item / SECOND_TILES != slot) {
      slot = item / SECOND_TILES;
      find_places(p, s.choice, s.choice.experts[slot], lane, goes);
    }
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int pair = 0; pair < SECOND_PAIRS; pair++) {
      const int i = pair % DEPTH;
      add_pair(sum, w[i], scales[i], x[i][0], x[i][1]);
      if (pair + DEPTH == SECOND_PAIRS) {  // all of the tile has been read
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.empty[n % PLACES]));
        more = item + WARPS < work.second_end;
        if (more) go_to(n + WARPS);
      }
      if (pair + DEPTH < SECOND_PAIRS || more) load((pair + DEPTH) % SECOND_PAIRS, i);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (goes[i] >= 0) {
        float* to = p.parts + (long long)goes[i] * HIDDEN + item % SECOND_TILES * 16 + lane / 4;
        const float unit = FP4_TO_HALF * s.units[slot - first_slot][lane % 4 * 2 + i];
        to[0] = sum[i] * unit;
        to[8] = sum[i + 2] * unit;
      }
  }
}

// One warp, a lane a place: fills it again when its tile has been read.
DEV void refill_second(const Params& p, Shared& s, const Work& work, int lane, u64 policy) {
  int n = lane + PLACES, polls = 0;
  while (lane < PLACES && work.second + n < work.second_end) {
    if (barrier_test(shared_address(&s.empty[lane]), n / PLACES - 1 & 1)) {
      copy_second(p, s, work, n, policy);
      n += PLACES, polls = 0;
    } else if (++polls > p.spin_limit) {
      *p.error = 2;
      return;
    } else {
      __nanosleep(32);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_products(const Params p) {
  Shared& s = *(Shared*)dynamic_shared();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  constexpr int BARRIERS = PAGES + 2 * PLACES + 2 * BUFFERS, WHOLE = PAGES + 2 * PLACES;
  if (thread < BARRIERS) {
    barrier_init(shared_address(s.full + thread), thread >= WHOLE && thread < WHOLE + BUFFERS ? WARPS : 1);
    barriers_ready();
  }
  Rows rows;
  if (!p.listed) {  // the router has the rows, too
    fetch_rows(p, rows, warp, lane);
    quantise_rows(rows, lane);
  }
  wait_for_earlier_kernel();
  const u32 last = __ldcg(p.epochs + blockIdx.x);
  choose(p, s.choice, s.scores);
  let_next_kernel_start();
  const Work work = share_work(s.choice.count);
  const u64 policy = read_once_policy();
  if (warp < PAGES / 2 && lane < PAGE_TILES) fill_page(p, s, work, warp, lane, policy);
  if (p.listed) fetch_rows(p, rows, warp, lane);  // after the weights are on their way
  if (thread == 0) p.epochs[blockIdx.x] = last + 1;
  if (blockIdx.x == 0 && !p.listed && warp < p.rows && lane < TOP) {
    p.chosen[warp * TOP + lane] = s.choice.chosen[warp][lane];
    p.weights[warp * TOP + lane] = s.choice.weights[warp][lane];
  }
  __syncwarp();
  const bool down = p.phases > 1 && work.second < work.second_end;
  const int first_slot = work.second / SECOND_TILES, slots = (work.second_end - 1) / SECOND_TILES - first_slot + 1;
  if (warp >= WARPS) {
    give_registers<64>();
    finish_first(p, s, work, warp - WARPS, lane, policy, last + 1);
    if (down) named_arrive(2, THREADS);
    if (down && warp == WARPS) refill_second(p, s, work, lane, policy);
  } else {
    take_registers<104>();
    if (p.listed) quantise_rows(rows, lane);
    multiply_first(p, s, rows, work, warp, lane);
    if (!down) return;
    take_activations(p, s, first_slot, slots, warp, lane, last + 1);
    multiply_second(p, s, work, first_slot, warp, lane);
  }
}

// Sums in the order of the choices.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) experts_sum(const Params p) {
  wait_for_earlier_kernel();
  const int i = blockIdx.x * SUM_THREADS + threadIdx.x, row = i / (HIDDEN / 4), n = i % (HIDDEN / 4);
  if (row >= p.rows) return;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int k = 0; k < TOP; k++) {
    const float w = __ldcg(p.weights + row * TOP + k);
    const float4 y = __ldcg((const float4*)(p.parts + (long long)(row * TOP + k) * HIDDEN) + n);
    sum.x += w * y.x, sum.y += w * y.y, sum.z += w * y.z, sum.w += w * y.w;
  }
  ((float4*)p.out)[i] = sum;
}
