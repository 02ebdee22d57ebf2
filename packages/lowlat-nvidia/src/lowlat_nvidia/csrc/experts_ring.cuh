// The products' shared memory, what each block does, and the ring of pages through which weights come: pages are numbered in
// the order in which they are filled, two for a tile of gate and up, then those of down.
#pragma once
#include "experts.cuh"

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
static_assert(HIDDEN % (64 * WARPS) == 0 && INNER % 64 == 0, "sizes");

constexpr int GROUPS = INNER / GROUP;  // of a row of down
struct Shared {
  union {
    alignas(16) float parts[BUFFERS][WARPS][16 * MAX_ROWS];  // gate and up
    alignas(16) uint4 rows[2][GROUPS][32];                   // down: a block's outputs come from at most two experts
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
  const u32 last = min(3 * blocks / experts, blocks), all = items * TILE + pairs + last * WAITING;
  auto before = [&](u32 b) {  // tiles of down of blocks before b
    const u32 other = (each * b + min(b, rest)) * TILE + (b + last > blocks ? b + last - blocks : 0) * WAITING;
    return (int)((all * b / blocks - other) / SECOND_PAIRS);
  };
  return {firsts, before(block), before(block + 1)};
}

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
