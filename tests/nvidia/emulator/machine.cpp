// Runs a kernel on fibers. Compiled with the definitions of a plan, and SOURCE, PARAMETERS and KERNELS: the file, the type of its
// kernels' parameter, and their names; `emu_run` is called from Python.
#include SOURCE

Fiber* emu_now;
std::vector<Block> emu_blocks;
int emu_threads;
u32 emu_random_state = 1;
bool emu_misused;
static std::deque<Fiber*> ready, polling;
static std::vector<Later> later;
static void* scheduler;
static void (*const kernels[])(const PARAMETERS) = {KERNELS};

// A launch starts when every block of the one before it has let it, or has ended.
struct Request { int kernel, blocks, cluster, shared_bytes; const PARAMETERS* parameters; };
struct Launch {
  Request asked;
  int first_block = 0, left = 0, letting = 0;
  bool started = false;
  Launch *before = nullptr, *after = nullptr;
  std::vector<bool> let;
  std::vector<int> running;  // threads of each block
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Meeting> meetings;
  std::vector<Fiber*> waiting;  // for the end of the launch before
  u8* stacks = nullptr;
};
static std::vector<Launch> launches;

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
void emu_poll() {
  if (launches.size() == 1) return emu_yield();
  polling.push_back(emu_now);
  next_fiber();
}
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
  const Request& asked = emu_now->home->launch->asked;
  kernels[asked.kernel](*asked.parameters);
  emu_now->done = true;
  next_fiber();
}
static void misused() { abort(); }

static void start(Launch& l) {
  const Request& asked = l.asked;
  l.started = true;
  l.left = asked.blocks * emu_threads;
  l.fibers.resize(l.left);
  l.warps.resize(l.left / LANES);
  l.meetings.resize(asked.blocks / asked.cluster);
  l.running.assign(asked.blocks, emu_threads);
  for (int b = 0; b < asked.blocks; b++) {
    Block& block = emu_blocks[l.first_block + b];
    block.memory = (u8*)aligned_alloc(1024, (asked.shared_bytes + 1023) / 1024 * 1024);
    memset(block.memory, 0xff, asked.shared_bytes);  // NaN
    block.cluster = &l.meetings[b / asked.cluster];
    block.place = b, block.grid = asked.blocks, block.blocks_a_cluster = asked.cluster, block.launch = &l;
  }
  for (int i = 0; i < l.left; i++) {
    Fiber& f = l.fibers[i];
    f.block = l.first_block + i / emu_threads;
    f.thread = i % emu_threads;
    f.lane = f.thread % LANES;
    f.warp = &l.warps[i / LANES];
    f.home = &emu_blocks[f.block];
    void** top = (void**)(l.stacks + (size_t)(i + 1) * STACK) - 2;
    *--top = (void*)misused;
    *--top = (void*)body;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    f.stack_pointer = top;
    ready.push_back(&f);
  }
}
static bool ended(const Launch& l) { return l.started && !l.left; }
static void let(Launch& l, int block) {
  if (l.let[block]) return;
  l.let[block] = true;
  if (++l.letting == l.asked.blocks && l.after) start(*l.after);
}
void stores_before() {
  for (size_t i = later.size(); i-- > 0;)
    if (later[i].kind == 2) do_one(i);
}
static void end(Launch& l) {
  stores_before();
  for (int i = 0; i < l.asked.blocks * emu_threads; i++)
    for (int word = 0; word < 8; word++)
      if (((const u64*)(l.stacks + (size_t)i * STACK))[word]) { fprintf(stderr, "a stack of %d bytes is too small\n", STACK); abort(); }
  if (l.after)
    for (Fiber* f : l.after->waiting) emu_wake(f);
}
void let_next_kernel_start() { let(*emu_now->home->launch, emu_now->home->place); }
void wait_for_earlier_kernel() {
  Launch& l = *emu_now->home->launch;
  if (!l.before || ended(*l.before)) return;
  l.waiting.push_back(emu_now);
  emu_park();
}

extern "C" int emu_stack_bytes() { return STACK; }
// Runs launches that may overlap, with a stack for each of their threads that was zeros before its first use; false if nothing
// can go on.
extern "C" bool emu_run(const Request* requests, int count, int threads, u32 seed, u8* stacks) {
  emu_threads = threads;
  emu_random_state = seed * 2654435761u + 1;
  emu_misused = false;
  ready.clear(), polling.clear(), later.clear();
  launches.assign(count, Launch());
  int blocks = 0;
  for (int i = 0; i < count; i++) {
    Launch& l = launches[i];
    l.asked = requests[i], l.first_block = blocks, l.let.assign(l.asked.blocks, false);
    l.before = i ? &launches[i - 1] : nullptr, l.after = i + 1 < count ? &launches[i + 1] : nullptr;
    l.stacks = stacks + (size_t)blocks * threads * STACK;
    blocks += l.asked.blocks;
  }
  emu_blocks.assign(blocks, Block());
  start(launches[0]);
  const int NAP = 16 * blocks * threads;
  long idle = 0;
  int asleep = -1;
  while (!ended(launches.back())) {
    if (!polling.empty() && (ready.empty() || emu_random() % 4096 == 0)) {
      ready.insert(ready.end(), polling.begin(), polling.end());
      polling.clear();
    }
    if (emu_misused) { fprintf(stderr, "too many arrivals\n"); return false; }
    if (ready.empty() && later.empty()) { fprintf(stderr, "deadlock\n"); return false; }
    if (!later.empty() && (ready.empty() || emu_random() % 4 == 0)) { do_one(emu_random() % later.size()); }
    if (ready.empty()) continue;
    if (++idle > 30000000) { fprintf(stderr, "no end\n"); return false; }
    // Mostly in order, so that warps stay together; now and then one overtakes.
    if (emu_random() % 64 == 0) std::swap(ready[0], ready[emu_random() % ready.size()]);
    emu_now = ready.front();
    ready.pop_front();
    // What a switch waits for is memory: of a fiber that comes soon its own words, then the end of its stack.
    if (ready.size() > 8) {
      __builtin_prefetch(ready[7]);
      for (int line = 0; line < 4; line++) __builtin_prefetch((const u8*)ready[3]->stack_pointer + 64 * line);
    }
    // A warp of every block sleeps for a while: the others go on as far as they can without it.
    if (idle % NAP == 0) asleep = emu_random() % (threads / LANES);
    if (emu_now->thread / LANES == asleep && idle % NAP < NAP / 2) {
      ready.push_back(emu_now);
      continue;
    }
    emu_switch(&scheduler, emu_now->stack_pointer);
    if (!emu_now->done) continue;
    Launch& l = *emu_now->home->launch;
    if (--l.running[emu_now->home->place] == 0) let(l, emu_now->home->place);
    if (--l.left == 0) end(l);
  }
  while (!later.empty()) do_one(later.size() - 1);
  for (Block& b : emu_blocks) free(b.memory);
  return true;
}
