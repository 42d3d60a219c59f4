// Runs blocks and threads for the emulator. It is compiled once, for all kernels.
#include "emulator.hpp"

#if defined(__linux__)
#include <csignal>
#include <ctime>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <list>
#include <memory>
#include <random>
#include <string>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

// ---------------------------------------------------------------- fibers

#if defined(__x86_64__)
extern "C" void im2win_switch_fiber(void** from, void* to);
asm(R"(
.text
.weak im2win_switch_fiber
.type im2win_switch_fiber,@function
im2win_switch_fiber:
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
struct Stack {
  void* top = nullptr;
  void start(char* memory, size_t size, void (*entry)()) {
    auto end = reinterpret_cast<uintptr_t>(memory + size) & ~uintptr_t(15);
    auto** slot = reinterpret_cast<void**>(end) - 2;  // as if `entry` had been called: the stack is 8 beyond a multiple of 16
    *slot = reinterpret_cast<void*>(entry);
    top = slot - 6;
    std::memset(top, 0, 6 * sizeof(void*));
  }
};
static void switch_fiber(Stack& from, Stack& to) { im2win_switch_fiber(&from.top, to.top); }
#else
}  // namespace emulator
#include <ucontext.h>
namespace emulator {
struct Stack {
  ucontext_t context;
  void start(char* memory, size_t size, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = memory;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
};
static void switch_fiber(Stack& from, Stack& to) { swapcontext(&from.context, &to.context); }
#endif

// ---------------------------------------------------------------- a block and its threads

enum class State { ready, barrier, group, warp, done };

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes, filled;  // the rest is zero
};

using Products = std::vector<std::unique_ptr<Product>>;

struct Thread {
  Stack stack;
  State state = State::ready;
  dim3 index;
  int barrier = 0;                              // the named barrier that it waits at
  size_t paused = 0;                            // `progress` at its last pause for another block
  size_t cluster_barriers = 0;                  // barriers of its cluster that it has reached
  int site = 0;                                 // line of the barrier or warp operation it waits at
  unsigned mask = 0;                            // lanes that take part in its warp operation
  void* argument = nullptr;                     // its argument of that operation
  std::vector<std::vector<AsyncCopy>> groups;   // asynchronous copies, by commit group, oldest first
  std::vector<AsyncCopy> open;                  // not committed yet
  std::vector<size_t> unfenced;                 // what it has written since its last fence
  std::vector<Products> products;               // in a warp's first thread: pending products, by commit group
  Products open_products;
  bool group_open = false, late = false;        // whether a group of products is open; whether it runs only at the wait for it
};

struct Phases {  // of an mbarrier that counts bytes of bulk copies
  int begun = 0, ended = 0;
  size_t expected = 0, copied = 0;  // bytes
  std::vector<AsyncCopy> under_way;
  std::list<std::vector<char>> sent;  // data from threads of other blocks, until it is delivered
};

struct Releases {  // of an mbarrier at which blocks of a cluster arrive
  size_t blocks = 0, arrived = 0;
  int ended = 0;
};

struct Block {
  static constexpr size_t stack_bytes = 64 << 10;
  std::vector<Thread> threads;
  std::vector<char> memory;
  Stack scheduler;
  Thread* current = nullptr;
  std::mt19937_64 random;
  std::string failure;
  std::vector<unsigned> pace;  // of warps: some run whenever they can, others lag until another thread waits for them
  std::vector<char> dynamic_shared;
  std::vector<std::pair<const void*, Phases>> all_phases;      // by address
  std::vector<std::pair<const void*, Releases>> all_releases;  // likewise
  size_t at_cluster_barrier = 0;                               // total number of arrivals
  std::vector<char> unfenced;  // by 16 bytes of dynamic shared memory: written without a fence, so that wgmma must not read it
};
static Block block;
static Function<> kernel;
static size_t cluster = 1;  // blocks of a cluster
static char *shared, *shared_end;  // the kernel's static arrays
size_t progress = 1;

static void wait(State state) {
  block.current->state = state;
  switch_fiber(block.current->stack, block.scheduler);
}

static void fail(const std::string& what) {
  if (block.failure.empty()) block.failure = what;
  wait(State::done);
}
void fail(const char* what) { fail(std::string(what)); }

// ---------------------------------------------------------------- the time limit

static double limit_s = 0;         // of a launch, in seconds of this thread's processor time; 0: none
static volatile bool expired = false, inside = false;  // whether the limit has passed; whether a kernel's thread runs, not the scheduler
void set_limit(double seconds) { limit_s = seconds; }

#if defined(__linux__)
// First it sets a flag, which the scheduler reads. A thread that does not return within another second is abandoned.
static void at_limit(int) {
  const bool again = expired;
  expired = true;
  if (again && inside) {
    block.current->state = State::done;
    switch_fiber(block.current->stack, block.scheduler);
  }
}

class Limit {
 public:
  Limit() {
    expired = false;
    if (limit_s <= 0) return;
    struct sigaction action = {};
    action.sa_handler = at_limit;
    action.sa_flags = SA_NODEFER | SA_RESTART;  // the handler may never return
    sigaction(signal_, &action, &before_);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = signal_;
#ifdef sigev_notify_thread_id
    event.sigev_notify_thread_id = int(syscall(SYS_gettid));
#else
    event._sigev_un._tid = int(syscall(SYS_gettid));
#endif
    armed_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
    const auto whole = time_t(limit_s);
    const itimerspec times = {{1, 0}, {whole, long((limit_s - double(whole)) * 1e9)}};
    if (armed_) timer_settime(timer_, 0, &times, nullptr);
  }
  ~Limit() {
    if (limit_s <= 0) return;
    if (armed_) timer_delete(timer_);
    sigaction(signal_, &before_, nullptr);
  }

 private:
  const int signal_ = SIGRTMIN + 7;
  struct sigaction before_ = {};
  timer_t timer_ = {};
  bool armed_ = false;
};
#else
struct Limit {};
#endif

static std::string past_limit() {
  return "no end after " + std::to_string(limit_s).substr(0, std::to_string(limit_s).find('.') + 3) + " s: a thread waits for what never comes";
}

static void land(const AsyncCopy& copy) {
  std::memcpy(copy.to, copy.from, copy.filled);
  std::memset(static_cast<char*>(copy.to) + copy.filled, 0, copy.bytes - copy.filled);
}

static void run_thread() {
  kernel();
  for (auto& group : block.current->groups)
    for (auto& copy : group) land(copy);
  wait(State::done);
}

void syncthreads(int site) {
  block.current->site = site;
  wait(State::barrier);
}

void group_barrier(int barrier, size_t threads) {
  std::vector<Thread*> waiting;
  for (auto& thread : block.threads)
    if (thread.state == State::group && thread.barrier == barrier) waiting.push_back(&thread);
  if (waiting.size() + 1 < threads) {
    block.current->barrier = barrier;
    return wait(State::group);
  }
  for (Thread* thread : waiting) thread->state = State::ready;
}

size_t lane() { return (block.current - block.threads.data()) % 32; }

void warp_operation(int site, unsigned mask, void* argument, const Function<void**>& operation) {
  Thread& self = *block.current;
  const size_t lane = emulator::lane(), first = (&self - block.threads.data()) - lane;
  if (!(mask >> lane & 1)) fail("line " + std::to_string(site) + ": a thread is not in the mask of its own warp operation");
  self.site = site, self.mask = mask, self.argument = argument;
  void* arguments[32] = {};
  bool all = true;
  for (size_t other = 0; other < 32; ++other) {
    if (!(mask >> other & 1) || other == lane) continue;
    const bool exists = first + other < block.threads.size();
    Thread* thread = exists ? &block.threads[first + other] : nullptr;
    if (!exists || thread->state == State::done) fail("line " + std::to_string(site) + ": a lane of the mask has ended or does not exist");
    if (thread->state != State::warp || thread->site != site || thread->mask != mask) all = false;
    else arguments[other] = thread->argument;
  }
  if (!all) return wait(State::warp);
  arguments[lane] = argument;
  operation(arguments);
  for (size_t other = 0; other < 32; ++other)
    if (other != lane && mask >> other & 1) block.threads[first + other].state = State::ready;
}

void pause(int site) {
  block.current->site = site;
  block.current->paused = progress;
  wait(State::ready);
}

static void begin_block(unsigned seed) {
  const size_t count = size_t(blockDim.x) * blockDim.y * blockDim.z;
  block.threads.resize(count);
  if (block.memory.size() < count * Block::stack_bytes) block.memory.resize(count * Block::stack_bytes);
  block.random.seed(seed);
  block.failure.clear();
  std::fill(shared, shared_end, char(0xff));
  std::fill(block.dynamic_shared.begin(), block.dynamic_shared.end(), char(0xff));
  block.unfenced.assign(block.dynamic_shared.size() / 16 + 1, 0);
  block.all_phases.clear(), block.all_releases.clear();
  block.at_cluster_barrier = 0;
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = block.threads[i];
    thread = Thread();
    thread.index = {unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y), unsigned(i / blockDim.x / blockDim.y)};
    thread.stack.start(block.memory.data() + i * Block::stack_bytes, Block::stack_bytes, run_thread);
  }
  block.pace.resize((count + 31) / 32);
  for (unsigned& one : block.pace) one = 1u << block.random() % 3 * 2;
}

enum class Turn { able, waiting, done };

// Runs the block's runnable threads, each until it waits. Errors are stored in block.failure. Returns whether all wait for another block.
static Turn step_block() {
  const size_t count = block.threads.size();
  std::vector<size_t> ready;
  size_t waiting = 0, done = 0;
  for (size_t i = 0; i < count; ++i) {
    if (block.threads[i].state == State::ready) ready.push_back(i);
    waiting += block.threads[i].state == State::barrier, done += block.threads[i].state == State::done;
  }
  if (!block.failure.empty() || done == count) return Turn::done;
  if (ready.empty()) {
    if (waiting + done < count) {
      block.failure = "a warp operation or a barrier of a group that some of its threads never reach";
      return Turn::done;
    }
    int site = 0;
    for (auto& thread : block.threads) {
      if (thread.state != State::barrier) continue;
      if (site && thread.site != site) {
        block.failure = "threads of a block wait at different barriers, lines " + std::to_string(site) + " and " + std::to_string(thread.site);
        return Turn::done;
      }
      site = thread.site, thread.state = State::ready;
    }
    return Turn::able;
  }
  // the order is either warp by warp, or any order of all threads
  const size_t warps = block.pace.size();
  std::shuffle(ready.begin(), ready.end(), block.random);
  if (block.random() & 1) {
    std::vector<size_t> rank(warps);
    for (size_t i = 0; i < warps; ++i) rank[i] = i;
    std::shuffle(rank.begin(), rank.end(), block.random);
    std::stable_sort(ready.begin(), ready.end(), [&](size_t a, size_t b) { return rank[a / 32] < rank[b / 32]; });
  }
  std::vector<char> resting(warps);
  for (size_t warp = 0; warp < warps; ++warp) resting[warp] = block.random() % block.pace[warp] != 0;
  for (size_t i : ready) {
    Thread& thread = block.threads[i];
    if (thread.state != State::ready || resting[i / 32]) continue;
    block.current = &thread;
    thread.paused = 0;
    threadIdx = thread.index;
    inside = true;
    switch_fiber(block.scheduler, thread.stack);
    inside = false;
    if (!thread.paused) ++progress;
    if (expired) {
      block.failure = past_limit();
      return Turn::done;
    }
  }
  return std::all_of(ready.begin(), ready.end(), [](size_t i) { return block.threads[i].paused == progress; }) ? Turn::waiting : Turn::able;
}

// A started block: its state while another block runs.
struct Resident {
  Block state;
  std::vector<char> own_shared;
  dim3 index;
  bool active = false;
  size_t waiting = 0;  // `progress` when all its runnable threads waited for another block

  // Swaps the block's state with the global one.
  void swap(bool begins) {
    std::swap(block, state);
    own_shared.resize(shared_end - shared);
    if (begins) std::copy(own_shared.begin(), own_shared.end(), shared);
    else std::copy(shared, shared_end, own_shared.begin());
    blockIdx = index;
  }
};
static std::vector<Resident> slots;  // reused by all launches
static Resident* running = nullptr;

static void let_run(Resident* next) {
  if (next == running) return;
  if (running) running->swap(false);
  if (next) next->swap(true);
  running = next;
}

static void start_block(Resident& slot, size_t i, unsigned seed) {
  let_run(nullptr);
  slot.index = {unsigned(i % gridDim.x), unsigned(i / gridDim.x % gridDim.y), unsigned(i / gridDim.x / gridDim.y)};
  slot.active = true, slot.waiting = 0;
  let_run(&slot);
  begin_block(seed);
}

// Runs clusters in this order. Returns "" or an error. Neighbouring slots hold the blocks of a cluster.
static std::string run_blocks(const std::vector<size_t>& order, std::mt19937_64& random) {
  const size_t blocks = order.size() * cluster;
  for (size_t next = 0, done = 0; done < blocks;) {
    for (size_t first = 0; first < slots.size() && next < order.size(); first += cluster) {
      const auto begin = slots.begin() + first;
      if (std::any_of(begin, begin + cluster, [](const Resident& slot) { return slot.active; })) continue;
      for (size_t rank = 0; rank < cluster; ++rank) start_block(begin[rank], order[next] * cluster + rank, unsigned(random()));
      ++next;
    }
    std::vector<Resident*> able;
    for (auto& slot : slots)
      if (slot.active && slot.waiting != progress) able.push_back(&slot);
    if (able.empty()) return "blocks wait for each other, or for one that has not started";
    Resident& slot = *able[able.size() > 1 ? random() % able.size() : 0];
    let_run(&slot);
    const Turn turn = step_block();
    if (!block.failure.empty()) {
      const auto [x, y, z] = slot.index;
      return "block (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + "): " + block.failure;
    }
    if (turn == Turn::waiting) slot.waiting = progress;
    if (turn == Turn::done) slot.active = false, ++done;
  }
  return "";
}

const char* launch(const char* name, const Grid& grid, unsigned seed, size_t resident, const Function<>& body) {
  static std::string failure;
  if (size_t(grid.threads.x) * grid.threads.y * grid.threads.z > 1024) {
    failure = std::string(name) + ", more than 1024 threads a block";
    return failure.c_str();
  }
  if (grid.blocks.x % grid.cluster) {
    failure = std::string(name) + ", a grid of blocks that are no whole clusters";
    return failure.c_str();
  }
  gridDim = grid.blocks, blockDim = grid.threads, kernel = body, shared = grid.shared, shared_end = grid.shared_end, cluster = grid.cluster;
  std::vector<size_t> order(size_t(gridDim.x) * gridDim.y * gridDim.z / cluster);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937_64 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  slots.resize(std::min(std::max(resident / cluster, size_t(1)), order.size()) * cluster);
  for (auto& slot : slots) {
    slot.state.dynamic_shared.assign(grid.dynamic_bytes + 1024, char(0xff));
    slot.active = false;
  }
  {
    Limit limit;
    failure = run_blocks(order, random);
  }
  let_run(nullptr);
  if (failure.empty()) return nullptr;
  failure = std::string(name) + ", " + failure;
  return failure.c_str();
}

static uintptr_t start_of_dynamic(const Block& block) { return (reinterpret_cast<uintptr_t>(block.dynamic_shared.data()) + 1023) & ~uintptr_t(1023); }
char* dynamic_shared_memory() { return reinterpret_cast<char*>(start_of_dynamic(block)); }

// ---------------------------------------------------------------- asynchronous copies

static char* fence_mark(const void* shared) {  // null outside dynamic shared memory
  const size_t at = size_t(static_cast<const char*>(shared) - block.dynamic_shared.data());
  return at < block.dynamic_shared.size() ? &block.unfenced[at / 16] : nullptr;
}

void stored(const void* to) {
  if (char* mark = fence_mark(to)) {
    *mark = 1;
    block.current->unfenced.push_back(mark - block.unfenced.data());
  }
}

void copy_async(void* to, const void* from, size_t bytes, size_t filled) {
  AsyncCopy copy{to, from, bytes, filled};
  stored(to);
  if (block.random() & 1) land(copy);
  else block.current->open.push_back(copy);
}
void commit_copies() {
  block.current->groups.push_back(std::move(block.current->open));
  block.current->open.clear();
}
void wait_copies(size_t newest_left) {
  auto& groups = block.current->groups;
  while (groups.size() > newest_left) {
    for (auto& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

// ---------------------------------------------------------------- bulk copies

static Phases& phases_at(Block& block, const void* at) {
  for (auto& [address, phases] : block.all_phases)
    if (address == at) return phases;
  fail("a barrier for bulk copies that was not started");
  return block.all_phases.front().second;
}
static Phases& phases_at(const void* at) { return phases_at(block, at); }
void init_full_barrier(const void* at) { block.all_phases.emplace_back(at, Phases()); }
void copy_bulk(void* to, const void* from, size_t bytes, const void* at) {
  Phases& phases = phases_at(at);
  if (phases.begun++ != phases.ended) fail("a bulk copy in a phase that has one");
  phases.under_way.push_back({to, from, bytes, bytes});
  if (block.random() & 1) land(phases.under_way.back());
}
void expect_bytes(const void* at, size_t bytes) {
  Phases& phases = phases_at(at);
  if (phases.begun++ != phases.ended) fail("bytes expected in a phase that has some");
  phases.expected = bytes;
}

// Copies 16 bytes at a time, since the swizzle permutes such pieces by their addresses.
static void land_box(Phases& phases, void* to, const CUtensorMap& map, std::array<int, 4> first) {
  static const char zeros[16] = {};
  if (reinterpret_cast<uintptr_t>(to) % 128) fail("a box to an address that is not aligned to 128 bytes");
  for (int step : map.steps)
    if (step < 1 || step > 8) fail("a box of more than every eighth element, or none");
  if (first[0] * map.itemsize % 16) fail("a box that does not begin at whole 16 bytes");
  const int across = 16 / map.itemsize;
  size_t offset = 0;
  std::array<int, 4> at_box;
  for (at_box[3] = 0; at_box[3] < map.box[3]; at_box[3] += map.steps[3])
    for (at_box[2] = 0; at_box[2] < map.box[2]; at_box[2] += map.steps[2])
      for (at_box[1] = 0; at_box[1] < map.box[1]; at_box[1] += map.steps[1])
        for (at_box[0] = 0; at_box[0] < map.box[0]; at_box[0] += across, offset += 16) {
          uintptr_t address = reinterpret_cast<uintptr_t>(to) + offset;
          if (map.swizzle) address ^= address >> 3 & (map.swizzle == 128 ? 0x70 : 0x30);
          for (int i = 0; i < across; ++i) {
            bool inside = true;
            long long from = 0;
            for (int axis = 0; axis < 4; ++axis) {
              const long long place = first[axis] + at_box[axis] + (axis ? 0 : i);
              inside = inside && place >= 0 && place < map.sizes[axis];
              from += place * map.strides[axis];
            }
            phases.under_way.push_back({reinterpret_cast<char*>(address) + i * map.itemsize, inside ? map.base + from : zeros,
                                        size_t(map.itemsize), size_t(map.itemsize)});
            if (block.random() & 1) land(phases.under_way.back());
          }
        }
  phases.copied += offset;
}

void copy_box(void* to, const CUtensorMap& map, std::array<int, 4> first, const void* at) {
  Phases& phases = phases_at(at);
  if (phases.begun == phases.ended) fail("a box in a phase that expects nothing");
  land_box(phases, to, map, first);
}

void wait_full_barrier(const void* at, int phase) {
  Phases& phases = phases_at(at);
  for (int tries = 0; phases.ended % 2 == phase; ++tries) {
    if (phases.begun > phases.ended && phases.copied < phases.expected && cluster > 1) {
      pause(-4);
    } else if (phases.begun > phases.ended) {
      if (phases.expected != phases.copied) fail("other bytes in boxes than expected");
      for (auto& copy : phases.under_way) land(copy);
      phases.under_way.clear(), phases.sent.clear(), ++phases.ended;
      phases.expected = phases.copied = 0;
    } else if (tries > 100000) {
      fail("a wait for a bulk copy that nobody began");
    } else {
      wait(State::ready);
    }
  }
}

// ---------------------------------------------------------------- clusters

size_t cluster_rank() { return blockIdx.x % cluster; }

static Resident& slot_of(size_t rank) { return *(running - cluster_rank() + rank); }  // the slot of a block of this cluster

static Block& member(size_t rank) {  // the block, which must not have ended
  Resident& slot = slot_of(rank);
  if (!slot.active) fail("a block of a cluster reaches for one that has ended");
  return &slot == running ? block : slot.state;
}

// The same offset in the dynamic shared memory of another block.
template <typename Type>
static Type* there(const Block& other, Type* here) {
  return reinterpret_cast<Type*>(start_of_dynamic(other) + (reinterpret_cast<uintptr_t>(here) - start_of_dynamic(block)));
}

void cluster_barrier() {
  const size_t all = ++block.current->cluster_barriers * block.threads.size();
  ++block.at_cluster_barrier, ++progress;
  for (size_t rank = 0; rank < cluster; ++rank)
    while (slot_of(rank).active && member(rank).at_cluster_barrier < all) pause(-5);
}

static Releases& releases_at(Block& block, const void* at) {
  for (auto& [address, releases] : block.all_releases)
    if (address == at) return releases;
  fail("a barrier of a cluster that was not started");
  return block.all_releases.front().second;
}
void init_empty_barrier(const void* at, size_t blocks) { block.all_releases.emplace_back(at, Releases{blocks}); }
void arrive_cluster(const void* at) {
  for (size_t rank = 0; rank < cluster; ++rank) {
    Block& other = member(rank);
    Releases& releases = releases_at(other, there(other, at));
    if (++releases.arrived == releases.blocks) releases.arrived = 0, ++releases.ended;
  }
  ++progress;
}
void arrive(const void* at) {
  Releases& releases = releases_at(block, at);
  if (++releases.arrived == releases.blocks) releases.arrived = 0, ++releases.ended;
  ++progress;
}
void wait_empty_barrier(const void* at, int phase) {
  while (releases_at(block, at).ended % 2 == phase) pause(-6);
}

void copy_shared(void* to, const void* from, size_t bytes, size_t expected, const void* at) {
  expect_bytes(at, expected);
  for (size_t rank = 0; rank < cluster; ++rank) {
    Block& other = member(rank);
    Phases& phases = phases_at(other, there(other, at));
    if (phases.copied + bytes > expected) fail("a copy from another block for a phase that has all its bytes");
    phases.under_way.push_back({there(other, to), from, bytes, bytes});
    if (block.random() & 1) land(phases.under_way.back());
    phases.copied += bytes;
  }
  ++progress;
}

void send_shared(void* to, const void* from, size_t bytes, size_t rank, const void* at) {
  if (rank >= cluster) fail("sums for a block that is not in the cluster");
  Block& other = member(rank);
  Phases& phases = phases_at(other, there(other, at));
  if (phases.begun > phases.ended && phases.copied + bytes > phases.expected) fail("sums from another block for a phase that has all its bytes");
  const char* first = static_cast<const char*>(from);
  phases.sent.emplace_back(first, first + bytes);
  phases.under_way.push_back({there(other, to), phases.sent.back().data(), bytes, bytes});
  if (block.random() & 1) land(phases.under_way.back());
  phases.copied += bytes, ++progress;
}

void copy_box_shared(void* to, const CUtensorMap& map, std::array<int, 4> first, const void* at) {
  for (size_t rank = 0; rank < cluster; ++rank) {
    Block& other = member(rank);
    Phases& phases = phases_at(other, there(other, at));
    if (phases.begun > phases.ended && phases.copied >= phases.expected) fail("a box from another block for a phase that has all its bytes");
    land_box(phases, there(other, to), map, first);
  }
  ++progress;
}

// ---------------------------------------------------------------- asynchronous products

static Thread& first_of_warp() { return block.threads[(block.current - block.threads.data()) / 32 * 32]; }

void check_fenced(const void* shared) {
  if (char* mark = fence_mark(shared); mark && *mark) fail("a warpgroup's product reads what threads copied, and no fence is between");
}

void fence_stores() {  // pending copies are not affected
  for (size_t mark : block.current->unfenced) block.unfenced[mark] = 0;
  block.current->unfenced.clear();
  for (auto& group : block.current->groups)
    for (auto& copy : group) stored(copy.to);
  for (auto& copy : block.current->open) stored(copy.to);
}

static void run_all(Products& products) {
  for (auto& product : products) product->run();
  products.clear();
}

void keep_for_later(Product* product) {
  Thread& warp = first_of_warp();
  if (!warp.group_open) warp.group_open = true, warp.late = block.random() & 1;
  warp.open_products.emplace_back(product);
  if (warp.late || block.random() & 1) return;
  for (auto& group : warp.products) run_all(group);
  run_all(warp.open_products);
}
void commit_products() {
  warp_operation(-2, 0xffffffffu, nullptr, [](void**) {
    Thread& warp = first_of_warp();
    warp.products.push_back(std::move(warp.open_products));
    warp.open_products.clear();
    warp.group_open = false;
  });
}
void wait_products(size_t newest_left) {
  warp_operation(-3, 0xffffffffu, nullptr, [=](void**) {
    auto& groups = first_of_warp().products;
    while (groups.size() > newest_left) {
      run_all(groups.front());
      groups.erase(groups.begin());
    }
  });
}

unsigned mask_of(unsigned mask) {
  const size_t first = (block.current - block.threads.data()) / 32 * 32, left = block.threads.size() - first;
  return left < 32 ? mask & ((1u << left) - 1) : mask;
}

}  // namespace emulator
