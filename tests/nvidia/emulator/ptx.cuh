// The instructions of `csrc/ptx.cuh` on a CPU: every thread of the grid is a fiber, warps meet at collectives, and what the
// hardware does asynchronously (bulk copies, stores to other blocks, published words) happens later, in random order. The
// kernel's own sources are compiled with this file in place of theirs; see test_nvidia_dense_emulated.py.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <deque>
#include <vector>

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV static inline
#define DEV_MEMBER inline
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
DEV uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEV uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEV float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEV float2 make_float2(float x, float y) { return {x, y}; }

// ---- fibers
constexpr int LANES = 32, STACK = 16 * 1024 + 320;  // not a power of two: caches would hold few of them
struct Fiber;
struct Warp {
  int arrived = 0, parity = 0;
  u64 slots[2][LANES][4];
  std::vector<Fiber*> waiting;
};
struct Meeting {
  int arrived = 0;
  std::vector<Fiber*> waiting;
};
struct Launch;
struct Block {
  u8* memory = nullptr;
  Meeting all, compute, named[16];
  Meeting* cluster = nullptr;
  int place = 0, grid = 0, blocks_a_cluster = 1;  // among the blocks of its launch
  Launch* launch = nullptr;
};
struct Fiber {
  void* stack_pointer;
  int thread, block, lane, cluster_waits = 0;
  Warp* warp;
  Block* home;
  bool done = false;
};
struct Index { int x; };
extern Fiber* emu_now;
extern std::vector<Block> emu_blocks;
extern int emu_threads;
extern u32 emu_random_state;
extern bool emu_misused;  // a barrier was told of too many arrivals
#define threadIdx (Index{emu_now->thread})
#define blockIdx (Index{emu_now->home->place})
#define gridDim (Index{emu_now->home->grid})

u32 emu_random();
void emu_park();                 // another fiber runs; somebody wakes this one
void emu_yield();                // another fiber runs; this one stays ready
void emu_poll();                 // the same; where several launches overlap, all others that are ready run first
void emu_wake(Fiber* f);
struct Later { int kind; u64 to; uint4 value; int bytes; const u8* from; u32 barrier; int block; };
void emu_later(const Later& later);

DEV u8* emu_resolve(u32 address, int block) {
  const int rank = address >> 24;
  if (rank) block += rank - 1 - emu_blocks[block].place % emu_blocks[block].blocks_a_cluster;
  return emu_blocks[block].memory + (address & 0xffffffu);
}
DEV u8* emu_resolve(u32 address) { return emu_resolve(address, emu_now->block); }
DEV u8* dynamic_shared() { return emu_now->home->memory; }
DEV u32 shared_address(const void* p) { return (u32)((const u8*)p - emu_now->home->memory); }
DEV u32 peer_address(u32 address, u32 rank) { return (address & 0xffffffu) | (rank + 1) << 24; }

// ---- warps
DEV void emu_meet_warp(const u64* mine, int words, u64 (**all)[4]) {
  Warp& w = *emu_now->warp;
  const int parity = w.parity;
  for (int i = 0; i < words; i++) w.slots[parity][emu_now->lane][i] = mine[i];
  *all = w.slots[parity];
  if (++w.arrived == LANES) {
    w.arrived = 0;
    w.parity ^= 1;
    for (Fiber* f : w.waiting) emu_wake(f);
    w.waiting.clear();
  } else {
    w.waiting.push_back(emu_now);
    emu_park();
  }
}
DEV void emu_meet(Meeting& m, int count) {
  if (++m.arrived == count) {
    m.arrived = 0;
    for (Fiber* f : m.waiting) emu_wake(f);
    m.waiting.clear();
  } else {
    m.waiting.push_back(emu_now);
    emu_park();
  }
}
DEV void __syncwarp() { u64 none[1] = {0}; u64 (*all)[4]; emu_meet_warp(none, 0, &all); }
DEV void __syncthreads() { emu_meet(emu_now->home->all, emu_threads); }
DEV void named_sync(int number, int threads) { emu_meet(emu_now->home->named[number], threads); }
DEV void named_arrive(int number, int threads) {
  Meeting& m = emu_now->home->named[number];
  if (++m.arrived < threads) return;
  m.arrived = 0;
  for (Fiber* f : m.waiting) emu_wake(f);
  m.waiting.clear();
}
DEV void block_sync() { emu_meet(emu_now->home->compute, 256); }
DEV void cluster_sync() { emu_meet(*emu_now->home->cluster, emu_threads * emu_now->home->blocks_a_cluster); }
DEV u64 emu_shuffle(u64 x, int from) {
  u64 (*all)[4];
  emu_meet_warp(&x, 1, &all);
  return all[from & 31][0];
}
template <class T>
DEV T emu_shuffle_as(T x, int from) {
  u64 bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = emu_shuffle(bits, from);
  T y;
  memcpy(&y, &bits, sizeof y);
  return y;
}
template <class T> DEV T __shfl_xor_sync(u32, T x, int o) { return emu_shuffle_as(x, emu_now->lane ^ o); }
template <class T> DEV T __shfl_down_sync(u32, T x, int o) { return emu_shuffle_as(x, emu_now->lane + o > 31 ? emu_now->lane : emu_now->lane + o); }
template <class T> DEV T __shfl_sync(u32, T x, int from) { return emu_shuffle_as(x, from); }
DEV u32 __ballot_sync(u32, bool x) {
  u64 mine = x, (*all)[4];
  emu_meet_warp(&mine, 1, &all);
  u32 bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (u32)all[i][0] << i;
  return bits;
}
DEV bool __any_sync(u32, bool x) { return __ballot_sync(~0u, x) != 0; }
DEV bool __all_sync(u32, bool x) { return __ballot_sync(~0u, x) == ~0u; }

DEV u32 any_bits(u32 x) {
  u64 mine = x, (*all)[4];
  emu_meet_warp(&mine, 1, &all);
  u32 bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (u32)all[i][0];
  return bits;
}

DEV u32 __reduce_max_sync(u32, u32 x) {
  u64 mine = x, (*all)[4];
  emu_meet_warp(&mine, 1, &all);
  u32 most = 0;
  for (int i = 0; i < LANES; i++) most = (u32)all[i][0] > most ? (u32)all[i][0] : most;
  return most;
}
DEV u32 __reduce_min_sync(u32 lanes, u32 x) { return ~__reduce_max_sync(lanes, ~x); }

// ---- arithmetic
DEV float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
DEV u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
DEV float rsqrtf(float x) { return 1.f / sqrtf(x); }
DEV float emu_exp(float x) { return expf(x); }
DEV float emu_log2(float x) { return log2f(x); }
#define __expf emu_exp  // the C library has those names
#define __log2f emu_log2
DEV float fast_exp2(float x) { return exp2f(x); }
DEV float mul(float x, float y) { return x * y; }
DEV float __fadd_rn(float x, float y) { return x + y; }
DEV int __popc(u32 x) { return __builtin_popcount(x); }
DEV int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
DEV int __ffs(u32 x) { return __builtin_ffs(x); }
template <class T> DEV T min(T a, T b) { return a < b ? a : b; }
template <class T> DEV T max(T a, T b) { return a > b ? a : b; }
DEV u32 __byte_perm(u32 x, u32 y, u32 s) {
  const u64 both = (u64)y << 32 | x;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> (s >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}
DEV float bf_low(u32 pair) { return __uint_as_float(pair << 16); }
DEV float bf_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEV u32 emu_bf(float x) {
  const u32 b = __float_as_uint(x);
  return x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
DEV u32 bf_pair(float low, float high) { return emu_bf(high) << 16 | emu_bf(low); }
DEV float bf_round(float x) { return bf_low(emu_bf(x)); }
DEV void mma(float (&d)[4], u32 a0, u32 a1, u32 b0, u32 b1) {
  const u64 mine[4] = {a0, a1, b0, b1};
  u64 (*all)[4];
  emu_meet_warp(mine, 4, &all);
  const int g = emu_now->lane / 4, q = emu_now->lane % 4;
  for (int j = 0; j < 2; j++)
    for (int k = 0; k < 4; k++)
      for (int half = 0; half < 2; half++) {
        const u32 a = all[4 * g + k][half], b = all[4 * (2 * q + j) + k][2 + half];
        d[j] += bf_low(a) * bf_low(b) + bf_high(a) * bf_high(b);
      }
}
DEV void mma(float (&d)[4], uint4 a, u32 b0, u32 b1) {
  const u64 mine[3] = {(u64)a.y << 32 | a.x, (u64)a.w << 32 | a.z, (u64)b1 << 32 | b0};
  u64 (*all)[4];
  emu_meet_warp(mine, 3, &all);
  const int g = emu_now->lane / 4, q = emu_now->lane % 4;
  for (int row = 0; row < 2; row++)
    for (int j = 0; j < 2; j++)
      for (int k = 0; k < 4; k++)
        for (int half = 0; half < 2; half++) {
          const u32 x = all[4 * g + k][half] >> 32 * row, y = all[4 * (2 * q + j) + k][2] >> 32 * half;
          d[2 * row + j] += bf_low(x) * bf_low(y) + bf_high(x) * bf_high(y);
        }
}
DEV float emu_half(u32 bits) {
  const unsigned short low = bits;
  _Float16 h;
  memcpy(&h, &low, 2);
  return h;
}
DEV u32 emu_to_half(float x) {
  const _Float16 h = x;
  unsigned short bits;
  memcpy(&bits, &h, 2);
  return bits;
}
DEV float emu_fp8(float x) {  // to the nearest e4m3, even where between two
  const float size = fabsf(x) > 448.f ? 448.f : fabsf(x);
  const float step = ldexpf(1.f, (size < 0x1p-6f ? -6 : ilogbf(size)) - 3);
  return copysignf(nearbyintf(size / step) * step, x);
}
DEV u32 halves_of_fp8(float low, float high) { return emu_to_half(emu_fp8(high)) << 16 | emu_to_half(emu_fp8(low)); }
DEV u32 multiply_halves(u32 a, u32 b) {
  return emu_to_half(emu_half(a >> 16) * emu_half(b >> 16)) << 16 | emu_to_half(emu_half(a) * emu_half(b));
}
DEV void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u64 mine[3] = {(u64)a1 << 32 | a0, (u64)a3 << 32 | a2, (u64)b1 << 32 | b0};
  u64 (*all)[4];
  emu_meet_warp(mine, 3, &all);
  const int g = emu_now->lane / 4, q = emu_now->lane % 4;
  for (int row = 0; row < 2; row++)
    for (int j = 0; j < 2; j++)
      for (int k = 0; k < 4; k++)
        for (int half = 0; half < 2; half++) {
          const u32 x = all[4 * g + k][half] >> 32 * row, y = all[4 * (2 * q + j) + k][2] >> 32 * half;
          d[2 * row + j] += emu_half(x) * emu_half(y) + emu_half(x >> 16) * emu_half(y >> 16);
        }
}

// ---- memory
template <class T> DEV T __ldg(const T* p) { return *p; }
template <class T> DEV T __ldcg(const T* p) { return *p; }
DEV uint4 load_constant(const void* p) { return *(const uint4*)p; }
DEV uint4 load_stream(const void* p) { return *(const uint4*)p; }
DEV uint4 load_shared(u32 address) {
  if (address % 16) { fprintf(stderr, "misaligned shared load\n"); abort(); }
  uint4 v;
  memcpy(&v, emu_resolve(address), 16);
  return v;
}
DEV u32 load_shared_word(u32 address) {
  u32 v;
  memcpy(&v, emu_resolve(address), 4);
  return v;
}
DEV uint4 load_transposed(u32 address) {
  if (address % 16) { fprintf(stderr, "misaligned shared load\n"); abort(); }
  u64 mine[1] = {(u64)emu_resolve(address)}, (*all)[4];
  emu_meet_warp(mine, 1, &all);
  const int g = emu_now->lane / 4, q = emu_now->lane % 4;
  u32 v[4];
  for (int m = 0; m < 4; m++) {
    const unsigned short *even = (const unsigned short*)all[8 * m + 2 * q][0], *odd = (const unsigned short*)all[8 * m + 2 * q + 1][0];
    v[m] = even[g] | (u32)odd[g] << 16;
  }
  return {v[0], v[1], v[2], v[3]};
}
DEV uint4 load_exchange(const void* p) { emu_poll(); return *(const uint4*)p; }
DEV u32 load_exchange_word(const void* p) { emu_poll(); return *(volatile const u32*)p; }
DEV void store_shared(u32 address, uint4 v) { memcpy(emu_resolve(address), &v, 16); }
DEV long long nanoseconds_now() { return 0; }
DEV void store_exchange(void* p, u32 v, u32 w) { emu_later({2, (u64)p, {v, w, 0, 0}, 8, nullptr, 0, 0}); }
DEV void store_exchange(void* p, u32 v) { emu_later({2, (u64)p, {v, 0, 0, 0}, 4, nullptr, 0, 0}); }
DEV void __threadfence() {}
DEV void __nanosleep(int) { emu_yield(); }
template <class T> DEV T atomicAdd(T* p, T x) { T old = *p; *p = old + x; return old; }
template <class T> DEV T atomicMax(T* p, T x) { T old = *p; *p = x > old ? x : old; return old; }
template <class T> DEV T atomicOr(T* p, T x) { T old = *p; *p = old | x; return old; }
template <class T> DEV T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }

// A barrier: phase in bit 0, arrivals that are missing from bit 1, arrivals of a phase from bit 12, missing bytes from bit 32.
struct EmuBarrier { u32 phase : 1, missing : 11, arrivals : 20; int bytes; };
DEV EmuBarrier& emu_barrier(u32 address, int block) { return *(EmuBarrier*)emu_resolve(address, block); }
DEV EmuBarrier& emu_barrier(u32 address) { return emu_barrier(address, emu_now->block); }
DEV void emu_settle(EmuBarrier& b) {
  if (b.missing || b.bytes) return;
  b.phase ^= 1;
  b.missing = b.arrivals;
}
DEV void barrier_init(u32 address, u32 arrivals) {
  EmuBarrier& b = emu_barrier(address);
  b.phase = 0; b.missing = b.arrivals = arrivals; b.bytes = 0;
}
DEV void barrier_arrive(u32 address) {
  EmuBarrier& b = emu_barrier(address);
  if (!b.missing) { emu_misused = true; return; }
  b.missing--;
  emu_settle(b);
}
DEV void barrier_expect(u32 address, u32 bytes) { emu_barrier(address).bytes += bytes; barrier_arrive(address); }
DEV bool barrier_test(u32 address, u32 phase) { return emu_barrier(address).phase != phase; }
DEV bool barrier_done(u32 address, u32 phase) {
  if (barrier_test(address, phase)) return true;
  emu_yield();
  return barrier_test(address, phase);
}
DEV bool barrier_received(u32 address, u32 phase) { return barrier_done(address, phase); }
DEV u64 read_once_policy() { return 0; }
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  if (to % 16 || (u64)from % 16 || bytes % 16) { fprintf(stderr, "misaligned bulk copy\n"); abort(); }
  emu_later({0, to, {}, (int)bytes, (const u8*)from, barrier, emu_now->block});
}
// What `machine.py` puts into a tensor map.
struct EmuMap { u64 address; long slot_stride, head_stride, panels; };
DEV void copy_tensor(u32 to, const u8* map, int slot, int head, u32 barrier, u64) {
  const EmuMap m = *(const EmuMap*)map;
  if (to % 1024) { fprintf(stderr, "misaligned tensor copy\n"); abort(); }
  for (int panel = 0; panel < m.panels; panel++)
    for (int t = 0; t < 16; t++)
      for (int piece = 0; piece < 8; piece++) {
        const u8* from = (const u8*)m.address + (slot + t) * m.slot_stride + head * m.head_stride + panel * 128 + piece * 16;
        emu_later({0, to + panel * 2048 + t * 128 + (piece ^ t % 8) * 16, {}, 16, from, barrier, emu_now->block});
      }
}
DEV void prefetch_tensor(const u8*, int, int) {}
DEV void map_ready(const u8*) {}
DEV void send(u32 to, u32 v, u32 barrier) { emu_later({1, to, {v, 0, 0, 0}, 4, nullptr, barrier, emu_now->block}); }
DEV void send(u32 to, uint4 v, u32 barrier) {
  if (to % 16) { fprintf(stderr, "misaligned store\n"); abort(); }
  emu_later({1, to, v, 16, nullptr, barrier, emu_now->block});
}
DEV void copy_async(u32 to, const void* from, bool present) {
  if (present) memcpy(emu_resolve(to), from, 16); else memset(emu_resolve(to), 0, 16);
}
DEV void copy_async_word(u32 to, const void* from) { memcpy(emu_resolve(to), from, 4); }
DEV void barrier_arrive_after_copies(u32 barrier) { barrier_arrive(barrier); }
DEV void copies_done() {}
DEV void barriers_ready() {}
template <int COUNT> DEV void take_registers() {}
template <int COUNT> DEV void give_registers() {}
DEV void forget(int&) {}
DEV void define(uint4& v) { v = make_uint4(0, 0, 0, 0); }
DEV long long clock_now() { static long long t = 0; return t += 100; }  // pauses are short, deadlines far
DEV u32 order_key(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
void wait_for_earlier_kernel();
void let_next_kernel_start();
// Clusters; no kernel that runs here mixes these with cluster_sync.
DEV void cluster_arrive() { emu_now->home->cluster->arrived++; }
DEV void cluster_wait() {  // nobody arrives for the second time before all have for the first
  const int all = ++emu_now->cluster_waits * emu_threads * emu_now->home->blocks_a_cluster;
  while (emu_now->home->cluster->arrived < all) emu_yield();
}
// Kernels with static shared memory are not run here, only compiled.
DEV void store_in_cluster(float*, u32, float) { abort(); }
