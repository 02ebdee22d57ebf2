// Thin wrappers of the PTX instructions that the dense step uses. Nothing here knows about models.
#pragma once
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV __device__ __forceinline__
#define DEV_MEMBER DEV

DEV u8* dynamic_shared() {
  extern __shared__ __align__(1024) u8 memory[];
  return memory;
}
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// bfloat16 pairs: the low half is the element of lower index.
DEV float bf_low(u32 pair) { return __uint_as_float(pair << 16); }
DEV float bf_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEV u32 bf_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEV float bf_round(float x) { return bf_low(bf_pair(x, 0.f)); }

DEV u32 order_key(float x) {  // larger floats give larger keys; not for NaN
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Read-only data: weights of norms, rotary tables, the embedding.
DEV uint4 load_constant(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Read once: cached keys and values.
DEV uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEV uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
DEV u32 load_shared_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
DEV void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Exchanged data: relaxed, at the scope of the GPU, so that L1 never answers.
DEV uint4 load_exchange(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV u32 load_exchange_word(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV void store_exchange(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEV void store_exchange(void* p, u32 v, u32 w) {  // eight bytes at once
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"((u64)w << 32 | v) : "memory");
}

DEV void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEV void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEV bool barrier_done(u32 barrier, u32 phase) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  return done;
}
// What is read once must not push out of the L2 what is exchanged.
DEV u64 read_once_policy() { return 0x12f0000000000000ull; }  // what createpolicy.fractional.L2::evict_first makes for all
DEV bool barrier_test(u32 barrier, u32 phase) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  return done;
}
DEV void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// A box of 16 slots of one head from a tensor [HEAD_DIM / 64, heads, slots, 64], of which `map` is the description.
DEV void copy_tensor(u32 to, const u8* map, int slot, int head, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %2}], "
      "[%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(slot), "r"(head), "r"(barrier), "l"(policy) : "memory");
}
// The same into the L2 alone.
DEV void prefetch_tensor(const u8* map, int slot, int head) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %1}];" ::"l"(map), "r"(0), "r"(slot), "r"(head)
               : "memory");
}
// A description that the host wrote is seen by this block's copies from here on.
DEV void map_ready(const u8* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// Four 8x8 matrices of 2-byte elements, transposed; lane 8 m + r gives the address of row r of the m-th. Lane (g, q) gets
// elements [2q][g] and [2q + 1][g] of each.
DEV uint4 load_transposed(u32 address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// d += A b with A 16x16 (rows 8..15 zero) and B 16x8. Lane (g, q) = (lane / 4, lane % 4) gives A[g][2q, 2q+1] in a0,
// A[g][2q+8, 2q+9] in a1, B[2q, 2q+1][g] in b0, B[2q+8, 2q+9][g] in b1, and receives D[g][2q, 2q+1] in d0, d1.
DEV void mma(float (&d)[4], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(0u), "r"(a1), "r"(0u), "r"(b0), "r"(b1));
}
// d += A b with all 16 rows of A: lane (g, q) gives A[g][2q, 2q+1], A[g+8][2q, 2q+1], A[g][2q+8, 2q+9], A[g+8][2q+8, 2q+9] in
// a, B as above, and receives D[g][2q, 2q+1] in d0, d1 and D[g+8][2q, 2q+1] in d2, d3.
DEV void mma(float (&d)[4], uint4 a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// 16 bytes to shared memory, or zeros, without waiting.
DEV void copy_async(u32 to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}
DEV void copy_async_word(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Arrives when all copies that this thread has started are done.
DEV void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
DEV void block_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEV long long nanoseconds_now() {
  long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
DEV void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// A product that is rounded before it is added to: its bits do not depend on what the compiler makes of the sum.
DEV float mul(float x, float y) { return __fmul_rn(x, y); }
DEV float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <int COUNT>
DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// Hides where an index comes from.
DEV void forget(int& x) { asm volatile("" : "+r"(x)); }
// A value that the compiler does not know.
DEV void define(uint4& v) {
  asm volatile("mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
}
DEV long long clock_now() {
  long long t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
// Barriers by number, for some of a block's threads.
DEV void named_sync(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
DEV void named_arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
// Of all threads of a cluster; and a store to the same place in one of its blocks.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV void store_in_cluster(float* here, u32 block, float x) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
// Between kernels under programmatic dependent launch.
DEV void wait_for_earlier_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// d += A b for 16 outputs, 16 inputs, 8 rows. (Matrix instructions on FP8 from registers are conversions to float16 and
// this one on Hopper, and the conversions are slow.)
DEV void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Pairs of float16, the low half first: products, and what e4m3 makes of two floats.
DEV u32 multiply_halves(u32 a, u32 b) {
  u32 c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEV u32 halves_of_fp8(float low, float high) {
  unsigned short fp8;
  u32 halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(fp8) : "f"(high), "f"(low));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(fp8));
  return halves;
}
