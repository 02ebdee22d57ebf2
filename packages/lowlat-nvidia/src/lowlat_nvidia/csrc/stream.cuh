// Weights: pages on their way, and the products of one stage.
#pragma once
#include "gemv.cuh"

constexpr int LAYER_PAGES = LAYER_FRAGMENTS / PAGE_FRAGMENTS;
// The head takes no page from registers, and of a folded step one would come into them while the head's inputs are waited for.
static_assert(!HOLD || (ONE && !NARROW && !FOLD), "");
constexpr int FIRST_O_PAGE = BLOCK_QKV / 8 * K_HIDDEN / PAGE_FRAGMENTS, O_PAGES = BLOCK_HIDDEN / 8 * K_QDIM / PAGE_FRAGMENTS;

// Counts a fruitless poll of the whole warp; true when it must go on with what it has.
DEV bool give_up(Context& c, u32& polls, int stage) {
  if ((++polls & 255u) == 0) {
    if (polls > c.p.spin_limit) store_exchange(c.p.state + 1, 1u + c.block * 16 + stage);
    c.failed = __any_sync(~0u, load_exchange_word(c.p.state + 1) != 0);
  }
  return c.failed;
}
// A warp's pages on their way. Not all that fit are asked for at once: what blocks exchange queues behind them. The rest is asked
// for while other blocks are waited for. Of a narrow model a stage's first pages are in registers before its inputs are there, if
// they have come by then, and their slots are filled again. With HOLD one page is in registers from any wait to the next product,
// whatever stages lie between: the ring has room for a page more while nothing is multiplied.
struct Stream {
  int oldest, under_way;  // slot of the oldest page under way, and how many are
  u32 oldest_phase;
  int next, room;      // slot of the next page to ask for, and how many slots are empty
  int landed;          // pages known to be there that have not been taken
  u32 seen;            // depends on all that was loaded from slots that are empty now
#if HOLD
  bool holds;          // the next page is in `held`
  uint4 held[PAGE_FRAGMENTS];
#endif
#if FOLD
  long elsewhere;      // from this warp's place in a page of all warps to the one whose output projection it computes
  int page;            // of a layer: the next to ask for
#endif
};
DEV void begin_stream(Context& c, Stream& f) { f = {0, 0, 0, 0, RING_PAGES, 0, 0}; }
DEV void next_slot(int& slot, u32& phase) {
  if (++slot == RING_PAGES) { slot = 0; phase ^= 1; }
}
// Asks for a page. At the end of the weights there is no room any more.
DEV void ask_page(Context& c, Stream& f) {
  if (c.pages == end_page(c.p)) {
    f.room = 0;
    return;
  }
  if (c.lane == 0) {
    const u32 full = c.full + f.next * 8;
    barrier_expect(full, PAGE);
#if FOLD
    const u8* from = c.weights + ((u32)(f.page - FIRST_O_PAGE) < (u32)O_PAGES ? f.elsewhere : 0);
#else
    const u8* from = c.weights;
#endif
    copy_bulk(after(c, f.seen, c.ring + f.next * PAGE), from, PAGE, full, c.policy);
  }
  c.pages++;
  c.weights += (long)BLOCKS * WARPS * PAGE;
#if FOLD
  if (++f.page == LAYER_PAGES) f.page = c.pages < LAYERS * LAYER_PAGES ? 0 : LAYER_PAGES + 1;
#endif
  u32 unused = 0;
  next_slot(f.next, unused);
  f.room--;
  f.under_way++;
}
DEV void page_landed(Stream& f) {
  next_slot(f.oldest, f.oldest_phase);
  f.under_way--;
}
// Loads pages that are there. Once the loads have returned the slots are empty.
template <int PAGES>
DEV void load_pages(Context& c, Stream& f, uint4 (&w)[PAGES * PAGE_FRAGMENTS]) {
#pragma unroll
  for (int j = 0; j < PAGES; j++) {
    const u32 page = c.ring + c.slot * PAGE + c.lane * 16;
#pragma unroll
    for (int i = 0; i < PAGE_FRAGMENTS; i++) w[j * PAGE_FRAGMENTS + i] = load_shared(page + i * FRAGMENT);
    if (f.landed) f.landed--;
    else page_landed(f);
    next_slot(c.slot, c.phase);
  }
#pragma unroll
  for (int i = 0; i < PAGES * PAGE_FRAGMENTS; i++) f.seen ^= w[i].w;
  f.room += PAGES;
}
// Pages of a warp that may be under way at once.
DEV int most_under_way(Context& c) { return BUSY_UNDER_WAY > UNDER_WAY && c.busy ? BUSY_UNDER_WAY : UNDER_WAY; }
// Asks for as many pages as may be under way. All lanes have loaded from the slots that are empty.
DEV void ask_pages(Context& c, Stream& f) {
  __syncwarp();
#pragma unroll 1
  while (f.room && f.under_way < most_under_way(c)) ask_page(c, f);
}
// What a warp does while it waits for other blocks: it notices that the oldest page is there, and asks for another. With HOLD it
// takes the next page and asks for all that may be asked for.
constexpr bool PUMPS = HOLD || UNDER_WAY < RING_PAGES;
static_assert(BUSY_UNDER_WAY >= UNDER_WAY, "what is taken together is under way or there in busy steps too");
DEV void pump(Context& c, Stream& f) {
#if HOLD
#pragma unroll 1
  while (f.under_way && __all_sync(~0u, barrier_test(c.full + f.oldest * 8, f.oldest_phase))) {
    page_landed(f);
    f.landed++;
  }
  if (!f.holds && f.landed) {
    load_pages<1>(c, f, f.held);
    f.holds = true;
  }
  ask_pages(c, f);
#else
  if (!PUMPS || !f.room) return;
  if (f.under_way && __all_sync(~0u, barrier_test(c.full + f.oldest * 8, f.oldest_phase))) {
    page_landed(f);
    f.landed++;
  }
  if (f.under_way < most_under_way(c)) {
    __syncwarp();  // all lanes have loaded from the slots that are empty
    ask_page(c, f);
  }
#endif
}
// A pause in which pages are asked for.
DEV void pause(Context& c, Stream& f, int stage) {
  pause(c, stage, [&] { pump(c, f); });
}
// Whether pages are there that nobody need wait for.
template <int PAGES>
DEV bool pages_there(Context& c) {
  int slot = c.slot;
  u32 phase = c.phase;
  bool there = true;
#pragma unroll
  for (int j = 0; j < PAGES; j++) {
    there = there && barrier_test(c.full + slot * 8, phase);
    next_slot(slot, phase);
  }
  return __all_sync(~0u, there);
}
template <int PAGES>
DEV void wait_pages(Context& c) {
  int slot = c.slot;
  u32 phase = c.phase;
#pragma unroll
  for (int j = 0; j < PAGES; j++) {
    wait_barrier(c, c.full + slot * 8, phase, 8);
    next_slot(slot, phase);
  }
}

// Pages of a tile that are taken together: at most 8 fragments, in registers, and no more than are under way.
template <int PAGES, int AT_MOST>
constexpr int dividing = PAGES % AT_MOST == 0 ? AT_MOST : dividing<PAGES, AT_MOST - 1>;
template <int PAGES>
constexpr int dividing<PAGES, 1> = 1;
template <int PAGES>
constexpr int at_once = HOLD ? 1 : dividing<PAGES, (8 / PAGE_FRAGMENTS < UNDER_WAY ? 8 / PAGE_FRAGMENTS : UNDER_WAY)>;

// Fragments of a stage, in the groups in which they are taken: a tile of 16 outputs, or of the 8 that are left over.
// A fragment is the operand of one matrix instruction, 16 outputs x 16 inputs; of a narrow tile 8 outputs x 32 inputs, whose
// halves lie in the upper and lower 8 rows of the operand: each half of a product is of use to one of them.
template <int CHUNK, bool WIDE>
struct Tile {
  static constexpr int FRAGMENTS = (WIDE ? 2 : 1) * CHUNK, PAGES = at_once<FRAGMENTS / PAGE_FRAGMENTS>;
  static constexpr int COUNT = PAGES * PAGE_FRAGMENTS, GROUPS = FRAGMENTS / COUNT;
  static constexpr bool ASK_EACH = HOLD || GROUPS * PAGES > UNDER_WAY;
  static_assert(PAGES <= UNDER_WAY, "what is taken together is always under way or there");
  uint4 w[COUNT];  // the next group
  bool taken;

  // Without a value here the registers keep one from layer to layer, in all stages between: too many for several rows.
  DEV_MEMBER void begin() {
    if constexpr (NARROW && ROWS > 1) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) define(w[i]);
    }
  }
  // Takes the next group if it is there.
  DEV_MEMBER void take_early(Context& c, Stream& f) {
    taken = NARROW && pages_there<PAGES>(c);
    if (taken) load_pages<PAGES>(c, f, w);
  }
  // Output g of rows 2q and 2q + 1 in x and y; of a wide tile output g + 8 in z and w. `more`: another such tile follows at
  // once.
  DEV_MEMBER float4 multiply(Context& c, Stream& f, const uint4 (&a)[CHUNK], bool more) {
    float sum[4][4] = {};
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
#if HOLD
      if (!f.holds) {
        wait_pages<1>(c);
        load_pages<1>(c, f, f.held);
      }
      f.holds = false;
#pragma unroll
      for (int i = 0; i < COUNT; i++) w[i] = f.held[i];
#else
      if (!taken) {
        wait_pages<PAGES>(c);
        load_pages<PAGES>(c, f, w);
      }
#endif
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const int at = group * COUNT + i;
        if (WIDE) {
          const uint4 x = a[at / 2];
          mma(sum[i % PAGE_FRAGMENTS % 4], w[i], i % 2 ? x.z : x.x, i % 2 ? x.w : x.y);
        } else {
          const uint4 x = a[WIDE ? 0 : at];
          mma(sum[i % 2], w[i], x.x, x.y);
          mma(sum[2 + i % 2], w[i], x.z, x.w);
        }
      }
      taken = false;
      if (group + 1 < GROUPS || more) take_early(c, f);
      if (ASK_EACH || group + 1 == GROUPS) ask_pages(c, f);
    }
    float d[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      d[j] = WIDE    ? 0.f + ((sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]))
             : j < 2 ? 0.f + ((sum[0][j] + sum[1][j]) + (sum[2][2 + j] + sum[3][2 + j]))
                     : 0.f;
    return make_float4(d[0], d[1], d[2], d[3]);
  }
};
// Partial sums of one row: [warp][64 outputs]; of several as `store_partial` has them.
DEV void store_sums(Context& c, int tile, float first, float second) {
  if constexpr (ONE) {
    if (c.q == 0) part_now(c)[c.warp * 64 + tile * 8 + c.g] = first;
  } else {
    store_partial(c, tile, first, second);
  }
}
DEV float sum_one(const float* part, int n) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += part[w * 64 + n];
  return sum;
}
DEV void add(float4& sum, float4 x) { sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w; }
// One stage of TILES * 8 outputs: `load(chunk, a)` gathers a chunk of inputs, `late()` is done behind the products, and
// `finish(tile0, tiles, part)` publishes sums of up to 8 tiles.
template <int K, int TILES, class Load, class Late, class Finish>
DEV void gemv(Context& c, Stream& f, Load load, Late late, Finish finish) {
  constexpr int CHUNK = chunk_of<K>, CHUNKS = K / CHUNK, WIDE = TILES / 2;
  uint4 a[CHUNK];
  Tile<CHUNK, true> wide;
  Tile<CHUNK, false> narrow;
  narrow.taken = false;
  if constexpr (WIDE > 0) {
    wide.begin();
    wide.take_early(c, f);
  } else {
    narrow.begin();
    narrow.take_early(c, f);
  }
  if constexpr (CHUNKS == 1) {
    load(0, a);
#pragma unroll 1
    for (int tile0 = 0; tile0 < TILES; tile0 += 8) {
      const int tiles = TILES - tile0 < 8 ? TILES - tile0 : 8;
      if constexpr (WIDE > 0) {
#pragma unroll 1
        for (int tile = 0; tile < tiles - 1; tile += 2) {
          const float4 d = wide.multiply(c, f, a, tile + 2 < tiles - 1);
          store_sums(c, tile, d.x, d.y);
          store_sums(c, tile + 1, d.z, d.w);
        }
      }
      if constexpr (TILES % 2)
        if (tile0 + 8 >= TILES) {
          const float4 d = narrow.multiply(c, f, a, false);
          store_sums(c, tiles - 1, d.x, d.y);
        }
      if (tile0 == 0) late();
      block_sync();
      finish(tile0, tiles, part_now(c));
      c.part_parity ^= 1;
    }
  } else {
    static_assert(TILES <= 8, "");
    float4 d[WIDE + 1] = {};  // the last of a narrow tile
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      load(chunk, a);
#pragma unroll
      for (int tile = 0; tile < WIDE; tile++) {
        add(d[tile], wide.multiply(c, f, a, tile + 1 < WIDE));
      }
      if constexpr (TILES % 2) add(d[WIDE], narrow.multiply(c, f, a, false));
    }
#pragma unroll
    for (int tile = 0; tile < WIDE; tile++) {
      store_sums(c, 2 * tile, d[tile].x, d[tile].y);
      store_sums(c, 2 * tile + 1, d[tile].z, d[tile].w);
    }
    if constexpr (TILES % 2) store_sums(c, TILES - 1, d[WIDE].x, d[WIDE].y);
    late();
    block_sync();
    finish(0, TILES, part_now(c));
    c.part_parity ^= 1;
  }
}
