// Emulates CUDA on one thread of a CPU, for tests: every thread of a block is a fiber, and a seed determines the order in which they run.
//
// A fiber runs alone until it waits: at a block barrier, at an operation of its warp (shuffle, matrix product, __syncwarp) or at the end of
// its kernel. Then any fiber that can run may be the next. The operations of two threads between the same two barriers thus occur in many
// orders, and code that lacks a barrier gives another result for some seed. Shared memory starts as NaN in every block. Asynchronous copies
// complete at once or when they are waited for, which the seed determines too. This detects reads before the wait, and writes to data that
// is still to be read.
//
// Blocks run one after the other, or a few of them interleaved ("resident"); the blocks of a cluster are always interleaved. A block that
// waits for another one calls emulator::pause in its loop. It is an error if all blocks only wait: they wait for each other, or for a block
// that has not started.
//
// The header replaces <cuda_runtime.h> and related headers. It and the headers beside it define only what generated code uses of CUDA.
// Every kernel includes it, so it includes few other headers. Everything else is in emulator.cpp, which is compiled once.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "types.hpp"

#define IM2WIN_EMULATOR 1

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ static __attribute__((section("emulated_shared")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
inline constexpr int warpSize = 32;

extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));

// A tensor map of TMA: innermost axis first, strides in bytes. A box takes every `steps`-th element along each axis but the first.
// swizzle: bytes of a box's rows, in which 16-byte pieces are permuted, or 0.
struct CUtensorMap {
  const char* base;
  int itemsize;
  long long sizes[4], strides[4];
  int box[4], steps[4], swizzle;
};

namespace emulator {

// A reference to a function that its owner keeps alive. std::function would take longer to compile than most kernels.
template <typename... Arguments>
class Function {
  const void* held = nullptr;
  void (*run)(const void*, Arguments...) = nullptr;

 public:
  Function() = default;
  template <typename Kept>
  Function(const Kept& kept) : held(&kept), run([](const void* held, Arguments... given) { (*static_cast<const Kept*>(held))(given...); }) {}
  void operator()(Arguments... given) const { run(held, given...); }
};

// ---------------------------------------------------------------- threads

extern size_t progress;  // increases with every event that a thread may wait for in another block

[[gnu::cold]] void fail(const char* what);
void syncthreads(int site);

// All lanes of `mask` pass an argument, and the last of them does the work for all. Then each continues. site: the line.
void warp_operation(int site, unsigned mask, void* argument, const Function<void**>& operation);

// The given mask (by default the whole warp), limited to the lanes that exist in the block's last warp.
unsigned mask_of(unsigned mask = 0xffffffffu);
size_t lane();

// Called in a loop that waits for another block: lets other blocks run.
void pause(int site);

char* dynamic_shared_memory();

template <typename T, typename Source>
T shuffle(int site, unsigned mask, T value, const Source& source, int width) {
  struct Argument {
    T value, result;
    const Source* source;
  } argument{value, value, &source};
  warp_operation(site, mask, &argument, [width](void* arguments[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      auto* own = static_cast<Argument*>(arguments[lane]);
      if (!own) continue;
      const int from = (*own->source)(lane);
      if (from / width != lane / width || from < 0 || from > 31 || !arguments[from]) continue;
      own->result = static_cast<Argument*>(arguments[from])->value;
    }
  });
  return argument.result;
}

// ---------------------------------------------------------------- asynchronous copies and products

void copy_async(void* to, const void* from, size_t bytes, size_t filled);  // the rest is zero
void stored(const void* to);  // a thread has stored 16 bytes that wgmma must not read without a fence
void commit_copies();
void wait_copies(size_t newest_left);

void init_full_barrier(const void* at);  // initialises an mbarrier that counts bytes of bulk copies
void copy_bulk(void* to, const void* from, size_t bytes, const void* at);
void wait_full_barrier(const void* at, int phase);
void expect_bytes(const void* at, size_t bytes);
void copy_box(void* to, const CUtensorMap& map, std::array<int, 4> first, const void* at);

// Clusters: blocks access the same offsets in each other's dynamic shared memory.
size_t cluster_rank();
void cluster_barrier();
void init_empty_barrier(const void* at, size_t blocks);  // initialises an mbarrier at which so many blocks arrive
void arrive_cluster(const void* at);                     // arrives at it in all blocks
void arrive(const void* at);                             // arrives at it in this block
void wait_empty_barrier(const void* at, int phase);
void copy_shared(void* to, const void* from, size_t bytes, size_t expected, const void* at);  // to all blocks; this one expects so many bytes
void send_shared(void* to, const void* from, size_t bytes, size_t rank, const void* at);  // to another block, which expects the bytes
void copy_box_shared(void* to, const CUtensorMap& map, std::array<int, 4> first, const void* at);  // multicast; receivers call expect_bytes

struct Product {
  virtual ~Product() = default;
  virtual void run() = 0;
};
void keep_for_later(Product* product);  // takes ownership
void check_fenced(const void* shared);
void fence_stores();  // makes this thread's writes visible to products (fence.proxy.async)
void group_barrier(int barrier, size_t threads);
void commit_products();
void wait_products(size_t newest_left);

// An asynchronous product of this warp. It runs after the earlier ones, at some time before the wait for it.
template <typename Body>
void later(const Body& body) {
  struct Kept : Product {
    Body body;
    explicit Kept(const Body& body) : body(body) {}
    void run() override { body(); }
  };
  keep_for_later(new Kept(body));
}

}  // namespace emulator

#define __syncthreads() emulator::syncthreads(__LINE__)
#define __syncwarp(...) emulator::warp_operation(__LINE__, emulator::mask_of(__VA_ARGS__), nullptr, [](void**) {})
#define __shfl_sync(mask, value, lane) \
  emulator::shuffle(__LINE__, emulator::mask_of(mask), value, [=](int) { return int(lane); }, 32)
#define __shfl_xor_sync(mask, value, bits) \
  emulator::shuffle(__LINE__, emulator::mask_of(mask), value, [=](int own) { return own ^ int(bits); }, 32)
#define __shfl_down_sync(mask, value, delta) \
  emulator::shuffle(__LINE__, emulator::mask_of(mask), value, [=](int own) { return own + int(delta); }, 32)
#define __shfl_up_sync(mask, value, delta) \
  emulator::shuffle(__LINE__, emulator::mask_of(mask), value, [=](int own) { return own - int(delta); }, 32)

template <typename T>
T atomicAdd(T* place, T value) {
  const T before = *place;
  *place = before + value;
  ++emulator::progress;
  return before;
}

#include "wmma.hpp"

namespace emulator {

// ---------------------------------------------------------------- launches

// A kernel's argument: the address of a tensor, a number, or the map of a tensor.
struct Argument {
  void* address = nullptr;
  long long number = 0;
  CUtensorMap map = {};
  Argument(const CUtensorMap& map) : map(map) {}
  Argument(void* address) : address(address) {}
  Argument(int number) : number(number) {}

  template <typename Type>
  Type as() const {
    if constexpr (std::is_pointer_v<Type>) {
      return static_cast<Type>(address);
    } else if constexpr (std::is_same_v<std::remove_cv_t<Type>, CUtensorMap>) {
      return map;
    } else {
      return static_cast<Type>(number);
    }
  }
};

template <typename... Types, size_t... Places>
void call_indexed(void (*kernel)(Types...), const Argument* arguments, std::index_sequence<Places...>) {
  kernel(arguments[Places].template as<Types>()...);
}

template <typename... Types>
void call(void (*kernel)(Types...), std::initializer_list<Argument> arguments) {
  call_indexed(kernel, arguments.begin(), std::index_sequence_for<Types...>());
}

// A grid. The seed determines the order of its blocks, of which at most `resident`, or one cluster, run interleaved. shared: the kernel's
// static arrays.
struct Grid {
  dim3 blocks, threads;
  size_t dynamic_bytes, cluster = 1;  // of blocks, neighbours along x
  char *shared = __start_emulated_shared, *shared_end = __stop_emulated_shared;
};
void set_limit(double seconds);  // of processor time, for each launch that follows; 0: none
const char* launch(const char* name, const Grid& grid, unsigned seed, size_t resident, const Function<>& kernel);  // null, or what went wrong

}  // namespace emulator
