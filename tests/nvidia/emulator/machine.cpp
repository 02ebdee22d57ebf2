// Runs the kernel KERNEL of the source SOURCE on fibers. Compiled with the definitions of a plan; `emu_run` is called from
// Python.
#include SOURCE

Fiber* emu_now;
std::vector<Block> emu_blocks;
int emu_cluster, emu_threads;
u32 emu_random_state = 1;
bool emu_misused;
static std::deque<Fiber*> ready;
static std::vector<Later> later;
static void* scheduler;
static const Params* parameters;

u32 emu_random() {
  emu_random_state ^= emu_random_state << 13;
  emu_random_state ^= emu_random_state >> 17;
  emu_random_state ^= emu_random_state << 5;
  return emu_random_state;
}
extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static void next_fiber() { emu_switch(&emu_now->stack_pointer, scheduler); }
void emu_park() { next_fiber(); }
void emu_yield() { ready.push_back(emu_now); next_fiber(); }
void emu_wake(Fiber* f) { ready.push_back(f); }
void emu_later(const Later& l) { later.push_back(l); }

static void do_one(size_t i) {
  const Later l = later[i];
  later[i] = later.back();
  later.pop_back();
  if (l.kind == 2) {
    memcpy((void*)l.to, &l.value, l.bytes);
    return;
  }
  u8* to = emu_resolve((u32)l.to, l.block);
  memcpy(to, l.kind == 0 ? l.from : (const u8*)&l.value, l.bytes);
  // A barrier that is told of belongs to the block that receives.
  EmuBarrier& b = emu_barrier(l.barrier, l.block);
  b.bytes -= l.bytes;
  emu_settle(b);
}
static void body() {
  KERNEL(*parameters);
  emu_now->done = true;
  next_fiber();
}
static void misused() { abort(); }

// Runs one step; false if nothing can go on, or a barrier was misused.
extern "C" bool emu_run(const Params* p, int blocks, int threads, int cluster, int shared_bytes, u32 seed) {
  parameters = p;
  emu_cluster = cluster;
  emu_threads = threads;
  emu_random_state = seed * 2654435761u + 1;
  emu_misused = false;
  std::vector<Fiber> fibers(blocks * threads);
  std::vector<Warp> warps(blocks * threads / LANES);
  std::vector<Meeting> meetings(blocks / cluster);
  emu_blocks.assign(blocks, Block());
  u8* stacks = (u8*)mmap(nullptr, (size_t)blocks * threads * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int b = 0; b < blocks; b++) {
    emu_blocks[b].memory = (u8*)aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024);
    memset(emu_blocks[b].memory, 0xff, shared_bytes);  // NaN
    emu_blocks[b].cluster = &meetings[b / cluster];
  }
  ready.clear();
  later.clear();
  for (int i = 0; i < blocks * threads; i++) {
    Fiber& f = fibers[i];
    f.block = i / threads;
    f.thread = i % threads;
    f.lane = f.thread % LANES;
    f.warp = &warps[i / LANES];
    f.home = &emu_blocks[f.block];
    void** top = (void**)(stacks + (size_t)(i + 1) * STACK) - 2;
    *--top = (void*)misused;
    *--top = (void*)body;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    f.stack_pointer = top;
    ready.push_back(&f);
  }
  int left = blocks * threads;
  long idle = 0;
  int asleep = -1;
  const int NAP = 16 * blocks * threads;
  while (left) {
    if (emu_misused) { fprintf(stderr, "too many arrivals\n"); return false; }
    if (ready.empty() && later.empty()) { fprintf(stderr, "deadlock: %d threads wait\n", left); return false; }
    if (!later.empty() && (ready.empty() || emu_random() % 4 == 0)) { do_one(emu_random() % later.size()); }
    if (ready.empty()) continue;
    if (++idle > 30000000) { fprintf(stderr, "no end\n"); return false; }
    // Mostly in order, so that warps stay together; now and then one overtakes.
    if (emu_random() % 64 == 0) std::swap(ready[0], ready[emu_random() % ready.size()]);
    emu_now = ready.front();
    ready.pop_front();
    // A warp of every block sleeps for a while: the others go on as far as they can without it.
    if (idle % NAP == 0) asleep = emu_random() % (threads / LANES);
    if (emu_now->thread / LANES == asleep && idle % NAP < NAP / 2) {
      ready.push_back(emu_now);
      continue;
    }
    emu_switch(&scheduler, emu_now->stack_pointer);
    if (emu_now->done) left--;
  }
  while (!later.empty()) do_one(later.size() - 1);
  for (Block& b : emu_blocks) free(b.memory);
  munmap(stacks, (size_t)blocks * threads * STACK);
  return true;
}
