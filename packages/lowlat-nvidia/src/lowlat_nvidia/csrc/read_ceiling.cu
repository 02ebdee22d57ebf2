// Reads a buffer once, 16 bytes a load, and does nothing else: the ceiling that steps are measured against.
#include "ptx.cuh"

struct Reading { const u8* from; u64 bytes; u32* out; };
extern "C" __global__ void __launch_bounds__(1024, 2) read_ceiling(const __grid_constant__ Reading p) {
  const u64 step = (u64)gridDim.x * blockDim.x * 16;
  u32 all = 0;
  u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
  for (; at + 3 * step < p.bytes; at += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = load_stream(p.from + at + i * step);
#pragma unroll
    for (int i = 0; i < 4; i++) all ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (all == 0x12345678u) *p.out = all;  // never true for the buffer that is read, but the compiler does not know
}
