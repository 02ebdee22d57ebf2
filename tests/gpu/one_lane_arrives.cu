// A producer warp and a consumer warp hand a buffer to each other by two mbarriers, and do nothing else. With ONE=1 one lane
// of the consumer arrives for its warp after __syncwarp, as the dense step does; with ONE=0 every lane arrives.
#include <cstdio>
typedef unsigned int u32;
__device__ u32 addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ void arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ bool done(u32 b, u32 ph) {
  u32 d;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(d) : "r"(b), "r"(ph) : "memory");
  return d;
}
__global__ void hand(int* out) {
  __shared__ __align__(16) int data[32];
  __shared__ unsigned long long full, empty;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) { init(addr(&full), 32); init(addr(&empty), ONE ? 1 : 32); }
  __syncthreads();
  int sum = 0;
  for (int turn = 0; turn < 8; turn++) {
    if (warp == 0) {
      if (turn) while (!done(addr(&empty), (turn - 1) & 1)) {}
      data[lane] = turn * 32 + lane;
      arrive(addr(&full));
    } else {
      while (!done(addr(&full), turn & 1)) {}
      sum += data[31 - lane];
      __syncwarp();
      if (!ONE || lane == 0) arrive(addr(&empty));
    }
  }
  if (warp) out[lane] = sum;
}
int main() {
  int* out; cudaMalloc(&out, 128); hand<<<1, 64>>>(out);
  int h[32]; cudaMemcpy(h, out, 128, cudaMemcpyDeviceToHost);
  printf("sum %d %s\n", h[0], cudaGetErrorString(cudaGetLastError()));
}
