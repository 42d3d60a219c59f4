// CUDA on one thread of a CPU, for tests: every thread of a block is a fiber, and the order in which they run is drawn from a seed.
//
// A fiber runs alone until it waits: at a block barrier, at an operation of its warp (shuffle, matrix product, __syncwarp) or at the end of
// its kernel. Then any fiber that can run may be the next. What two threads do between the same two barriers so happens in many orders, and
// code that lacks a barrier gives another result for some seed. Shared memory starts as NaN in every block. Asynchronous copies land at once
// or when they are waited for, drawn from the seed, too: who reads before the wait, or writes what is still to be read, is found out.
//
// Blocks run one after the other, or a few of them in turns ("resident"), those of a cluster always. A block that waits for another calls emulator::pause in its loop;
// if all of them only wait, they wait for each other, or for a block that has not started: an error.
//
// The header stands for <cuda_runtime.h> and its like; what generated code uses of CUDA is here and in the headers beside it, nothing else.
// Every kernel compiles it, so it includes little: what needs more is in emulator.cpp, which is compiled once.
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

// A tensor as copies of boxes see it: innermost axis first, strides in bytes; of a box every `steps`-th element along an axis but the first.
// swizzle: bytes of a box's rows, where their places are exchanged; else 0.
struct CUtensorMap {
  const char* base;
  int itemsize;
  long long sizes[4], strides[4];
  int box[4], steps[4], swizzle;
};

namespace emulator {

// A function that somebody else keeps while it is called; std::function would take longer to compile than most kernels.
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

extern size_t progress;  // goes up with whatever a thread that waits for another block may wait for

[[gnu::cold]] void fail(const char* what);
void syncthreads(int site);

// All lanes of `mask` bring an argument; the last of them does the work for all. Then each goes on. site: the line.
void warp_operation(int site, unsigned mask, void* argument, const Function<void**>& operation);

// A mask, or the whole warp; of the last warp of a block only the lanes that exist.
unsigned mask_of(unsigned mask = 0xffffffffu);
size_t lane();

// In a loop that waits for another block: lets others run.
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

// ---------------------------------------------------------------- copies and products that run on

void copy_async(void* to, const void* from, size_t bytes, size_t filled);  // the rest is zero
void commit_copies();
void wait_copies(size_t newest_left);

void start_phases(const void* at);  // of a barrier that counts bulk copies
void copy_bulk(void* to, const void* from, size_t bytes, const void* at);
void wait_bulk(const void* at, int phase);
void expect_bytes(const void* at, size_t bytes);
void copy_box(void* to, const CUtensorMap& map, std::array<int, 4> first, const void* at);

// Of blocks of a cluster, which reach what lies at the same place in each other's dynamic shared memory.
size_t cluster_rank();
void cluster_barrier();
void start_releases(const void* at, size_t blocks);  // of a barrier that so many blocks arrive at
void release(const void* at);                        // arrives there in all blocks
void arrive(const void* at);                         // in this one
void wait_releases(const void* at, int phase);
void copy_shared(void* to, const void* from, size_t bytes, size_t expected, const void* at);  // to all blocks; this one expects so many bytes
void send_shared(void* to, const void* from, size_t bytes, size_t rank, const void* at);  // of this thread, to another; who gets them expects them
void copy_box_shared(void* to, const CUtensorMap& map, std::array<int, 4> first, const void* at);  // likewise; who expects them says so itself

struct Product {
  virtual ~Product() = default;
  virtual void run() = 0;
};
void keep_for_later(Product* product);  // and delete it
void check_fenced(const void* shared);
void fence_stores();  // what this thread copied may be read by products
void group_barrier(int barrier, size_t threads);
void commit_products();
void wait_products(size_t newest_left);

// A product of this warp, in order with those before it: some time from now to the wait for it.
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

// A grid, its blocks in an order drawn from the seed, at most `resident` of them in turns, or one cluster. shared: where the kernel's static
// arrays are.
struct Grid {
  dim3 blocks, threads;
  size_t dynamic_bytes, cluster = 1;  // of blocks, neighbours along x
  char *shared = __start_emulated_shared, *shared_end = __stop_emulated_shared;
};
void set_limit(double seconds);  // of processor time, for each launch that follows; 0: none
const char* launch(const char* name, const Grid& grid, unsigned seed, size_t resident, const Function<>& kernel);  // null, or what went wrong

}  // namespace emulator
