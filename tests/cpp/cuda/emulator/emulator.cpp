// Runs kernels on the host: the scheduler behind cuda_runtime.h. Compiled without sanitizers, because it changes stacks and
// writes over shared memory.
//
// Of the threads that can go on, the one that comes first in an order always does, as far as it can. So some threads are as
// far ahead of the others as barriers let them be, and a missing barrier gives wrong results. The order of threads and of
// blocks is forward for one launch, backward for the next, and random for the third.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_runtime.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" char __start_gossamer_shared[], __stop_gossamer_shared[];  // from shared.ld

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kMaxThreads = 1024, kMaxArgumentBytes = 32764;
constexpr size_t kUsualDynamicBytes = 48 << 10;
constexpr size_t kMaxDynamicBytes = 227 << 10;  // where cudaFuncSetAttribute asks for it (sm_90)

// ---- fibers

#if defined(__x86_64__)
using Context = void*;  // the stack pointer, with what the called function must keep above it
extern "C" void gossamer_switch(Context* from, Context to);
asm(R"(
.text
gossamer_switch:
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
void switch_to(Context& from, Context& to) { gossamer_switch(&from, to); }
void prepare(Context& context, char* stack, void (*run)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes) - 8;  // six registers, where to go on, alignment
  std::fill(top, top + 8, nullptr);
  top[6] = reinterpret_cast<void*>(run);
  context = top;
}
#else
using Context = ucontext_t;
void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
void prepare(Context& context, char* stack, void (*run)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run, 0);
}
#endif

// A thread of the block, as long as the process lives.
struct Thread {
  Context context;
  uint3 index;
  size_t turn;  // its place in the order
  bool ended;
  const char* waits;  // the name of the call in which it waits; null if it does not
  Place place;
  unsigned mask;
  Finish finish;
  Lane lane;
};

struct Block {
  std::vector<Thread> threads;
  size_t size;                       // of the running block
  std::vector<size_t> order;         // order[turn] is a thread
  uint64_t ready[kMaxThreads / 64];  // by turn: who can go on
  uint64_t later[kMaxThreads / 64];  // who lets the others run first
  size_t current, arrived, ended;    // arrived: at the barrier
  Context scheduler;
  void (*body)(const void*);
  const void* context;
  void* dynamic;
} block;

Thread& mine() { return block.threads[block.current]; }

void make_ready(Thread& thread) {
  thread.waits = nullptr;
  block.ready[thread.turn / 64] |= uint64_t{1} << (thread.turn % 64);
}

// The next thread that can go on, which then is the current one; false if there is none.
bool choose() {
  bool waiting = false;
  for (size_t word = 0; word * 64 < block.size; ++word) {
    waiting |= block.later[word] != 0;
    if (block.ready[word] == 0) continue;
    block.current = block.order[word * 64 + __builtin_ctzll(block.ready[word])];
    threadIdx = mine().index;
    return true;
  }
  if (!waiting) return false;
  std::swap(block.ready, block.later);
  sched_yield();  // what they wait for may be another process
  return choose();
}

// The current thread waits or has ended: another runs, until this one is chosen again.
void leave() {
  Thread& from = mine();
  if (!choose()) return switch_to(from.context, block.scheduler);
  if (&mine() != &from) switch_to(from.context, mine().context);
}

uint64_t& word_of_mine(uint64_t* words) { return words[mine().turn / 64]; }
uint64_t bit_of_mine() { return uint64_t{1} << (mine().turn % 64); }

void wait(const char* call, Place place) {
  mine().waits = call;
  mine().place = place;
  word_of_mine(block.ready) &= ~bit_of_mine();
}

void run_thread() {
  while (true) {
    block.body(block.context);
    mine().ended = true;
    ++block.ended;
    word_of_mine(block.ready) &= ~bit_of_mine();
    leave();
  }
}

void add_threads(size_t count) {
  if (block.threads.empty()) block.threads.reserve(kMaxThreads);  // a context must not move
  while (block.threads.size() < count) {
    // The page below a stack stays unmapped for use.
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory =
        mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) fail("no memory for a stack");
    block.threads.emplace_back();
    prepare(block.threads.back().context, static_cast<char*>(memory) + page, run_thread);
  }
}

// ---- blocks and launches

std::mt19937 random_numbers(1);
size_t launched;
int order_of_launch;  // 0 forward, 1 backward, 2 random
std::map<const void*, size_t> dynamic_bytes;
struct Registered {
  void* address;
  size_t bytes;
};
std::map<void*, Registered> registered;  // by the host's address
cudaError_t last_error = cudaSuccess;

void put_in_order(std::vector<size_t>& order, size_t size) {
  order.resize(size);
  std::iota(order.begin(), order.end(), size_t{0});
  if (order_of_launch == 1) std::reverse(order.begin(), order.end());
  if (order_of_launch == 2) std::shuffle(order.begin(), order.end(), random_numbers);
}

// Where a thread is, of a block in which none can go on.
std::string state_of(const Thread& thread) {
  if (thread.ended) return "has ended";
  std::ostringstream text;
  text << "waits in " << thread.waits << " at " << thread.place.file << ":" << thread.place.line
       << ", mask 0x" << std::hex << thread.mask;
  return text.str();
}

void report_deadlock() {
  size_t waiting = 0, other = 0;
  while (block.threads[waiting].ended) ++waiting;
  const std::string state = state_of(block.threads[waiting]);
  while (other + 1 < block.size && state_of(block.threads[other]) == state) ++other;
  fail("thread %zu %s, but thread %zu %s", waiting, state.c_str(), other,
       state_of(block.threads[other]).c_str());
}

void run_block(size_t index) {
  blockIdx = {static_cast<unsigned>(index % gridDim.x), static_cast<unsigned>(index / gridDim.x % gridDim.y),
              static_cast<unsigned>(index / gridDim.x / gridDim.y)};
  for (volatile char* p = __start_gossamer_shared; p != __stop_gossamer_shared; ++p) *p = '\xa5';
  put_in_order(block.order, block.size);
  block.arrived = block.ended = 0;
  for (size_t turn = 0; turn < block.size; ++turn) {
    Thread& thread = block.threads[block.order[turn]];
    const auto i = static_cast<unsigned>(block.order[turn]);
    thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    thread.turn = turn;
    thread.ended = false;
    make_ready(thread);
  }
  choose();
  switch_to(block.scheduler, mine().context);
  if (block.ended < block.size) report_deadlock();
}

}  // namespace

void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "emulator: block (%u, %u, %u): ", blockIdx.x, blockIdx.y, blockIdx.z);
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
  std::fflush(nullptr);
  _exit(1);
}

int lane() { return static_cast<int>(block.current % 32); }

void let_others_run() {
  word_of_mine(block.ready) &= ~bit_of_mine();
  word_of_mine(block.later) |= bit_of_mine();
  leave();
}

void* dynamic_shared() { return block.dynamic; }

void meet_block(Place place) {
  wait("__syncthreads", place);
  mine().mask = 0;
  if (++block.arrived == block.size) {
    for (size_t i = 0; i < block.size; ++i) {
      Thread& thread = block.threads[i];
      if (thread.place.line != place.line || thread.place.file != place.file)
        fail("threads meet at two barriers, at %s:%d and at %s:%d", thread.place.file, thread.place.line,
             place.file, place.line);
      make_ready(thread);
    }
    block.arrived = 0;
  }
  leave();
}

uint64_t meet_lanes(const char* name, unsigned mask, Lane mine_brings, Finish finish, Place place) {
  const size_t first = block.current / 32 * 32;
  if (!(mask >> lane() & 1))
    fail("%s at %s:%d: lane %d calls, and its mask %#x does not name it", name, place.file, place.line,
         lane(), mask);
  Thread& thread = mine();
  thread.mask = mask;
  thread.finish = finish;
  thread.lane = mine_brings;
  wait(name, place);

  bool complete = true;
  for (size_t l = 0; l < 32 && complete; ++l) {
    if (!(mask >> l & 1)) continue;
    if (first + l >= block.size)
      fail("%s at %s:%d: the mask names lane %zu, which the block lacks", name, place.file, place.line, l);
    const Thread& other = block.threads[first + l];
    complete = other.waits != nullptr && other.finish == finish && other.mask == mask &&
               other.place.line == place.line && other.place.file == place.file && other.waits == name;
  }
  if (complete) {
    Lane lanes[32] = {};
    for (size_t l = 0; l < 32; ++l)
      if (mask >> l & 1) lanes[l] = block.threads[first + l].lane;
    finish(lanes, mask);
    for (size_t l = 0; l < 32; ++l) {
      if (!(mask >> l & 1)) continue;
      block.threads[first + l].lane.result = lanes[l].result;
      make_ready(block.threads[first + l]);
    }
  }
  leave();
  return thread.lane.result;
}

cudaError_t run(const cudaLaunchConfig_t& config, size_t argument_bytes, const void* kernel,
                void (*body)(const void*), const void* context) {
  const dim3 grid = config.gridDim, threads = config.blockDim;
  const size_t blocks = size_t{grid.x} * grid.y * grid.z, size = size_t{threads.x} * threads.y * threads.z;
  const auto asked = dynamic_bytes.find(kernel);
  const size_t most = asked == dynamic_bytes.end() ? kUsualDynamicBytes : asked->second;
  const bool fits = blocks > 0 && grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535 && size > 0 &&
                    size <= kMaxThreads && threads.z <= 64 && config.dynamicSmemBytes <= most &&
                    argument_bytes <= kMaxArgumentBytes;
  if (!fits) return last_error = cudaErrorInvalidConfiguration;

  add_threads(size);
  gridDim = grid;
  blockDim = threads;
  block.size = size;
  block.body = body;
  block.context = context;
  std::vector<size_t> order;
  put_in_order(order, blocks);
  for (const size_t index : order) {
    block.dynamic = malloc(config.dynamicSmemBytes);
    run_block(index);
    free(block.dynamic);
  }
  order_of_launch = (order_of_launch + 1) % 3;
  ++launched;
  return cudaSuccess;
}

size_t launches() { return launched; }

}  // namespace emulator

cudaError_t cudaGetLastError() {
  const cudaError_t error = emulator::last_error;
  emulator::last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                     ? "no error"
         : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                  : "invalid value";
}

// Exactly as many bytes, so that AddressSanitizer sees an access just beyond them.
cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = nullptr;
  return bytes == 0 || posix_memalign(p, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags) {
  if (flags != (cudaHostRegisterPortable | cudaHostRegisterMapped)) return cudaErrorInvalidValue;
  if (emulator::registered.count(memory) > 0) return cudaErrorHostMemoryAlreadyRegistered;
  // A second mapping of the same pages, which must be shared.
  void* address = mremap(memory, 0, bytes, MREMAP_MAYMOVE);
  if (address == MAP_FAILED) return cudaErrorMemoryAllocation;
  emulator::registered[memory] = {address, bytes};
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** address, void* memory, unsigned) {
  const auto found = emulator::registered.find(memory);
  if (found == emulator::registered.end()) return cudaErrorInvalidValue;
  *address = found->second.address;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  const auto found = emulator::registered.find(memory);
  if (found == emulator::registered.end()) return cudaErrorHostMemoryNotRegistered;
  munmap(found->second.address, found->second.bytes);
  emulator::registered.erase(found);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (static_cast<size_t>(value) > emulator::kMaxDynamicBytes) return cudaErrorInvalidValue;
  emulator::dynamic_bytes[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}
