// How fast each block is given weights while all blocks read: 8 warps with a ring of pages each, as in the dense step, and nothing
// else. A block's cycles for the same pages say which multiprocessors get less of the memory.
#include "ptx.cuh"

constexpr int WARPS = 8;
struct Pace {
  const u8* weights;  // the first of the pages of all warps
  long long* cycles;  // [BLOCKS, 2]: until the pages that count had come, 0 where one did not; the multiprocessor
  int pages, counted; // of each warp; fast blocks go on reading while the others come to those that count
  u32 limit;          // cycles
};
extern "C" __global__ void __launch_bounds__(384, 1) pace(const __grid_constant__ Pace p) {
  u8* memory = dynamic_shared();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, block = blockIdx.x;
  const u32 ring = shared_address(memory) + warp * RING_PAGES * PAGE_BYTES;
  const u32 full = shared_address(memory) + WARPS * RING_PAGES * PAGE_BYTES + warp * RING_PAGES * 8;
  if (warp < WARPS && lane == 0)
    for (int i = 0; i < RING_PAGES; i++) barrier_init(full + i * 8, 1);
  barriers_ready();
  __syncthreads();
  const long long start = clock_now();
  long long took = 0;
  bool came = true;
  if (warp < WARPS && lane == 0) {
    const u64 policy = read_once_policy();
    auto ask = [&](int page) {
      const u32 slot = page % RING_PAGES;
      barrier_expect(full + slot * 8, PAGE_BYTES);
      copy_bulk(ring + slot * PAGE_BYTES, p.weights + (((long)page * BLOCKS + block) * WARPS + warp) * PAGE_BYTES, PAGE_BYTES,
                full + slot * 8, policy);
    };
    for (int page = 0; page < RING_PAGES && page < p.pages; page++) ask(page);
    for (int page = 0; page < p.pages && came; page++) {
      while (came && !barrier_done(full + page % RING_PAGES * 8, page / RING_PAGES & 1)) came = clock_now() - start < p.limit;
      if (page + RING_PAGES < p.pages) ask(page + RING_PAGES);
      if (page == p.counted - 1) took = clock_now() - start;
    }
  }
  came = __syncthreads_and(came);
  if (thread != 0) return;
  p.cycles[block * 2] = came ? took : 0;
  p.cycles[block * 2 + 1] = multiprocessor_now();
}
