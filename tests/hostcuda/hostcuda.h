// Runs a kernel's own source on the host: one fiber a CUDA thread, one block after the other, on one OS thread.
//
// An error ends the process with exit status 99 and one line: a barrier or shuffle that not all its threads reach at the
// same source line, a lane outside of its shuffle's mask, more shared memory than a device has. Shared memory is filled
// with NaN, so that a missing barrier shows without a sanitizer too. Under the address sanitizer red zones surround every
// shared array; under the thread sanitizer only barriers order memory, between threads of a block and never between
// blocks. Not here: cooperative groups, blocks that wait for each other, inline PTX, the cost of anything.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda_types.h"

#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

// The sanitizers must not see the scheduler: every switch would order memory that CUDA does not order.
#define HOSTCUDA_HIDDEN __attribute__((noinline, no_sanitize("thread"), no_sanitize("address")))

namespace hostcuda {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024, kMaxGridYZ = 65535;
constexpr size_t kStackBytes = 128 * 1024, kRedZone = 64;
constexpr size_t kStaticShared = 48 * 1024, kDefaultDynamicShared = 48 * 1024;
constexpr size_t kMaxDynamicShared = 163 * 1024;  // what sm_80 gives a block that asks for it
constexpr int kMultiprocessors = 4, kMaxStaticArrays = 16;
constexpr int kExitStatus = 99, kEndOfThread = -1;

struct Barrier {
  unsigned arrived = 0, generation = 0;
  int line = 0;       // where the first thread arrived
  char sync[2] = {};  // what the thread sanitizer knows a barrier by: two in turn, so that the next one orders nothing here
};

struct Warp {
  Barrier barriers[kWarpSize];  // one for each lowest lane of a mask
  uint64_t slots[2][kWarpSize] = {};
  unsigned lanes = 0;
};

// The shared memory of one block: static arrays one after the other, each between red zones, then the dynamic part.
struct SharedMemory {
  unsigned char* base = nullptr;
  unsigned char* dynamic = nullptr;
  size_t used = 0;
  // Plain arrays: the fibers share them, and the sanitizers would look into a container.
  const void* keys[kMaxStaticArrays] = {};
  void* arrays[kMaxStaticArrays] = {};
};

struct Thread {
  uint3 thread_index, block_index;
  dim3 block_dim, grid_dim;
  unsigned lane = 0, block_threads = 0;
  Warp* warp = nullptr;
  Barrier* barrier = nullptr;
  SharedMemory* shared = nullptr;
  void* stack_pointer = nullptr;
  unsigned char* stack = nullptr;
  void* sanitizer_fiber = nullptr;  // the thread sanitizer's handle
  void* fake_stack = nullptr;       // the address sanitizer's
  bool finished = false;
};

inline Thread* current = nullptr;
inline int last_error = cudaSuccess;

inline std::map<const void*, size_t>& dynamic_limits() {
  static std::map<const void*, size_t> limits;
  return limits;
}

[[noreturn]] HOSTCUDA_HIDDEN inline void fail(const char* what, int line, int other_line) {
  const uint3 block = current ? current->block_index : uint3{}, thread = current ? current->thread_index : uint3{};
  std::fprintf(stderr, "hostcuda: %s (line %d, line %d; %d is the end of a thread) block (%u, %u, %u) thread (%u, %u, %u)\n",
               what, line, other_line, kEndOfThread, block.x, block.y, block.z, thread.x, thread.y, thread.z);
  std::fflush(stderr);
  _exit(kExitStatus);
}

inline void tsan_release([[maybe_unused]] char* sync) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(sync);
#endif
}

inline void tsan_acquire([[maybe_unused]] char* sync) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(sync);
#endif
}

// ---- fibers

extern "C" void hostcuda_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.weak hostcuda_switch
.type hostcuda_switch,@function
hostcuda_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

// The threads of the block that runs, in the order in which they take turns.
struct Scheduler {
  Thread* threads = nullptr;
  unsigned count = 0;
  Thread host;  // the launch itself
  unsigned position = 0, alive = 0;
  unsigned fruitless = 0;  // turns since a barrier opened
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
  std::function<void()> kernel;
  char start_sync = 0, end_sync = 0;
};

inline Scheduler* scheduler = nullptr;

HOSTCUDA_HIDDEN inline void switch_to(Thread* to, [[maybe_unused]] bool from_ends) {
  Thread* from = current ? current : &scheduler->host;
#ifdef __SANITIZE_ADDRESS__
  const bool to_host = to == &scheduler->host;
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from->fake_stack, to_host ? scheduler->host_stack : to->stack,
                                 to_host ? scheduler->host_stack_bytes : kStackBytes);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(to->sanitizer_fiber, __tsan_switch_to_fiber_no_sync);
#endif
  current = to == &scheduler->host ? nullptr : to;
  hostcuda_switch(&from->stack_pointer, to->stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(from->fake_stack, &bottom, &bytes);
#endif
}

HOSTCUDA_HIDDEN inline Thread* next_alive() {
  const unsigned count = scheduler->count;
  for (unsigned tried = 0; tried < count; ++tried) {
    scheduler->position = (scheduler->position + 1) % count;
    if (!scheduler->threads[scheduler->position].finished) return &scheduler->threads[scheduler->position];
  }
  return &scheduler->host;
}

// Lets the others run until `count` threads have arrived; all of them at one line.
HOSTCUDA_HIDDEN inline void wait_at(Barrier& barrier, unsigned count, int line) {
  if (barrier.arrived == 0) barrier.line = line;
  if (barrier.line != line) fail("divergent barrier or shuffle", line, barrier.line);
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    scheduler->fruitless = 0;
    return;
  }
  while (barrier.generation == generation) {
    if (++scheduler->fruitless > scheduler->alive + 1) fail("some threads never reach a barrier or shuffle", line, line);
    Thread* next = next_alive();
    if (next != current) switch_to(next, false);
  }
}

inline void sync_block(int line) {
  Barrier& barrier = *current->barrier;
  char* sync = &barrier.sync[barrier.generation & 1];
  tsan_release(sync);
  wait_at(barrier, current->block_threads, line);
  tsan_acquire(sync);
}

HOSTCUDA_HIDDEN inline unsigned existing_lanes(unsigned mask, int line) {
  const unsigned lanes = mask & current->warp->lanes;
  if (!(lanes >> current->lane & 1)) fail("a lane is not in the mask of its own shuffle", line, line);
  return lanes;
}

inline void sync_warp(unsigned mask, int line) {
  const unsigned lanes = existing_lanes(mask, line);
  Barrier& barrier = current->warp->barriers[__builtin_ctz(lanes)];
  char* sync = &barrier.sync[barrier.generation & 1];
  tsan_release(sync);
  wait_at(barrier, unsigned(__builtin_popcount(lanes)), line);
  tsan_acquire(sync);
}

// A shuffle: hands in `value` and takes that of lane `source`; all bits set where no such lane takes part.
HOSTCUDA_HIDDEN inline uint64_t exchange(unsigned mask, uint64_t value, int source, int line) {
  const unsigned lanes = existing_lanes(mask, line);
  Warp& warp = *current->warp;
  Barrier& barrier = warp.barriers[__builtin_ctz(lanes)];
  // Two sets of slots in turn: a lane that runs ahead to the next shuffle must not overwrite what others still read.
  uint64_t* slots = warp.slots[barrier.generation & 1];
  slots[current->lane] = value;
  wait_at(barrier, unsigned(__builtin_popcount(lanes)), line);
  if (source < 0 || source >= int(kWarpSize)) return value;
  return lanes >> source & 1 ? slots[source] : ~uint64_t(0);
}

template <class T>
inline T shuffle(unsigned mask, T value, int source, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- shared memory

HOSTCUDA_HIDDEN inline void* static_shared(const void* key, size_t bytes) {
  SharedMemory& shared = *current->shared;
  int place = 0;
  while (place < kMaxStaticArrays && shared.keys[place] && shared.keys[place] != key) ++place;
  if (place == kMaxStaticArrays) fail("more static shared arrays than the header has room for", 0, 0);
  if (shared.keys[place] == key) return shared.arrays[place];
  const size_t offset = (shared.used + kRedZone + 15) / 16 * 16;
  if (offset + bytes > kStaticShared) fail("more than 48 KiB of static shared memory", 0, 0);
  shared.used = offset + bytes;
  shared.keys[place] = key;
  shared.arrays[place] = shared.base + offset;
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(shared.arrays[place], bytes);
#endif
  return shared.arrays[place];
}

HOSTCUDA_HIDDEN inline SharedMemory make_shared(size_t dynamic_bytes) {
  const size_t bytes = kStaticShared + 2 * kRedZone + dynamic_bytes + 128;
  SharedMemory shared;
  shared.base = static_cast<unsigned char*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128));
  shared.dynamic = shared.base + kStaticShared + kRedZone;
  std::memset(shared.base, 0xff, bytes);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(shared.base, bytes);
  __asan_unpoison_memory_region(shared.dynamic, dynamic_bytes);
#endif
  return shared;
}

HOSTCUDA_HIDDEN inline void release_shared(SharedMemory& shared) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(shared.base, kStaticShared);
#endif
  std::free(shared.base);
}

// ---- launches

HOSTCUDA_HIDDEN inline void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!scheduler->host_stack) {
    scheduler->host_stack = bottom;
    scheduler->host_stack_bytes = bytes;
  }
#endif
  tsan_acquire(&scheduler->start_sync);
  scheduler->kernel();
  wait_at(*current->barrier, current->block_threads, kEndOfThread);  // orders no memory
  tsan_release(&scheduler->end_sync);
  current->finished = true;
  --scheduler->alive;
  scheduler->fruitless = 0;
  switch_to(next_alive(), true);
  __builtin_trap();
}

// Six saved registers, then the address that `ret` takes.
HOSTCUDA_HIDDEN inline void prepare_stack(Thread& thread) {
  void** top = reinterpret_cast<void**>(thread.stack + kStackBytes) - 8;
  std::memset(top, 0, 8 * sizeof(void*));
  top[6] = reinterpret_cast<void*>(fiber_main);
  thread.stack_pointer = top;
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(thread.stack, kStackBytes);
#endif
#ifdef __SANITIZE_THREAD__
  thread.sanitizer_fiber = __tsan_create_fiber(__tsan_switch_to_fiber_no_sync);
#endif
}

HOSTCUDA_HIDDEN inline unsigned char* map_stacks(size_t bytes) {
  void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("no address space for the stacks of a launch", 0, 0);
  return static_cast<unsigned char*>(stacks);
}

// Runs one block from start to end.
struct BlockRun {
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  SharedMemory shared;
  unsigned char* stacks;

  HOSTCUDA_HIDDEN BlockRun(dim3 grid, dim3 block, size_t index, size_t dynamic_bytes, unsigned char* stack_memory)
      : warps((block.x * block.y * block.z + kWarpSize - 1) / kWarpSize), threads(block.x * block.y * block.z),
        shared(make_shared(dynamic_bytes)), stacks(stack_memory) {
    const unsigned count = unsigned(threads.size());
    scheduler->threads = threads.data();
    scheduler->count = scheduler->alive = count;
    scheduler->position = scheduler->fruitless = 0;
    for (unsigned t = 0; t < count; ++t) {
      Thread& thread = threads[t];
      thread.thread_index = {t % block.x, t / block.x % block.y, t / block.x / block.y};
      thread.block_index = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
      thread.block_dim = block;
      thread.grid_dim = grid;
      thread.lane = t % kWarpSize;
      thread.block_threads = count;
      thread.warp = &warps[t / kWarpSize];
      thread.warp->lanes |= 1u << thread.lane;
      thread.barrier = &barrier;
      thread.shared = &shared;
      thread.stack = stacks + t * kStackBytes;
      prepare_stack(thread);
    }
    tsan_release(&scheduler->start_sync);
    switch_to(&threads[0], false);
  }
  ~BlockRun() { release_shared(shared); }
};

HOSTCUDA_HIDDEN inline bool is_valid(dim3 grid, dim3 block, size_t shared_bytes, const void* kernel) {
  const auto limit = dynamic_limits().find(kernel);
  const size_t allowed = limit == dynamic_limits().end() ? kDefaultDynamicShared : limit->second;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  const bool sizes = threads > 0 && threads <= kMaxThreads && block.z <= 64 && grid.x > 0 && grid.x <= 0x7fffffffu &&
                     grid.y > 0 && grid.y <= kMaxGridYZ && grid.z > 0 && grid.z <= kMaxGridYZ;
  if (!sizes) last_error = cudaErrorInvalidConfiguration;
  if (shared_bytes > allowed) last_error = cudaErrorInvalidValue;
  return sizes && shared_bytes <= allowed;
}

HOSTCUDA_HIDDEN inline void destroy_fibers(std::vector<void*>& fibers) {
#ifdef __SANITIZE_THREAD__
  for (void* fiber : fibers) __tsan_destroy_fiber(fiber);
#endif
  fibers.clear();
}

inline void launch(std::function<void()> kernel, const void* address, dim3 grid, dim3 block, size_t shared_bytes) {
  // The thread sanitizer has room for about 8000 fibers and takes a new one with an old one's number for the old one.
  constexpr size_t kMaxFibers = 6000;
  if (!is_valid(grid, block, shared_bytes, address)) return;
  Scheduler run;
  run.kernel = std::move(kernel);
  scheduler = &run;
  const size_t threads = size_t(block.x) * block.y * block.z, blocks = size_t(grid.x) * grid.y * grid.z;
  std::vector<void*> fibers;
#ifdef __SANITIZE_THREAD__
  run.host.sanitizer_fiber = __tsan_get_current_fiber();
  const size_t stack_sets = blocks;
#else
  const size_t stack_sets = 1;
#endif
  unsigned char* stacks = map_stacks(stack_sets * threads * kStackBytes);
  // To the thread sanitizer, memory that two blocks use one after the other would look like a race: there all that the
  // blocks used stays alive until the launch ends.
  std::vector<std::unique_ptr<BlockRun>> finished;
  for (size_t index = 0; index < blocks; ++index) {
    unsigned char* own_stacks = stacks + index % stack_sets * threads * kStackBytes;
    finished.push_back(std::make_unique<BlockRun>(grid, block, index, shared_bytes, own_stacks));
    for (const Thread& thread : finished.back()->threads) fibers.push_back(thread.sanitizer_fiber);
    if (fibers.size() + threads > kMaxFibers) destroy_fibers(fibers);
#ifndef __SANITIZE_THREAD__
    finished.clear();
#endif
  }
  tsan_acquire(&run.end_sync);
  destroy_fibers(fibers);
  munmap(stacks, stack_sets * threads * kStackBytes);
  scheduler = nullptr;
}

template <class... Parameters, class... Arguments>
void launch_kernel(
    void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, Arguments... arguments) {
  launch([=] { kernel(Parameters(arguments)...); }, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes);
}

template <class... Parameters>
cudaError_t allow_shared(void (*kernel)(Parameters...), size_t bytes) {
  if (bytes > kMaxDynamicShared) return last_error = cudaErrorInvalidValue;
  dynamic_limits()[reinterpret_cast<const void*>(kernel)] = std::max(bytes, kDefaultDynamicShared);
  return cudaSuccess;
}

}  // namespace hostcuda

#define threadIdx (hostcuda::current->thread_index)
#define blockIdx (hostcuda::current->block_index)
#define blockDim (hostcuda::current->block_dim)
#define gridDim (hostcuda::current->grid_dim)

#define __syncthreads() hostcuda::sync_block(__LINE__)
#define __syncwarp(...) hostcuda::sync_warp(0xffffffffu __VA_OPT__(& (__VA_ARGS__)), __LINE__)
#define __shfl_sync(mask, value, source) hostcuda::shuffle(mask, value, int(source), __LINE__)
#define __shfl_xor_sync(mask, value, lanes) \
  hostcuda::shuffle(mask, value, int(hostcuda::current->lane ^ unsigned(lanes)), __LINE__)
#define __shfl_down_sync(mask, value, lanes) \
  hostcuda::shuffle(mask, value, int(hostcuda::current->lane + unsigned(lanes)), __LINE__)
#define __shfl_up_sync(mask, value, lanes) \
  hostcuda::shuffle(mask, value, int(hostcuda::current->lane) - int(lanes), __LINE__)

#define MD_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  hostcuda::launch_kernel(kernel, dim3(grid), dim3(block), shared_bytes, stream, __VA_ARGS__)
#define MD_SHARED(Type, name, count) \
  static const char md_key_##name = 0; \
  Type* const name = static_cast<Type*>(hostcuda::static_shared(&md_key_##name, sizeof(Type) * (count)))
#define MD_DYNAMIC_SHARED(Type, name) Type* const name = reinterpret_cast<Type*>(hostcuda::current->shared->dynamic)
#define MD_ALLOW_SHARED(kernel, bytes) hostcuda::allow_shared(kernel, bytes)

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = hostcuda::last_error;
  hostcuda::last_error = cudaSuccess;
  return error;
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "invalid argument";
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = hostcuda::kMultiprocessors;
  return cudaSuccess;
}
